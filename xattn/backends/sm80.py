"""Ampere and later without Hopper's own instructions: the shared forward body over mma.sync, ldmatrix and cp.async.

Its images: one of sm_80 serves all of 8.x, one of its own each later architecture, and PTX of compute_80 those that no
compiler at hand knows (jit.choose).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .. import append_call, backward_call, decode_call, forward_call
from ..forward_call import ForwardBody
from ..images import ImageSpec
from .base import Backend

CAPABILITY = replace(forward_call.SHARED_CAPABILITY, vendors=frozenset({"nvidia"}), least_arch="sm_80")
GRADIENTS = forward_call.gradients(CAPABILITY)
FP8_CACHE = forward_call.fp8_cache(CAPABILITY, "fp8_e4m3")

# Measured on an H200 beside smaller and larger tiles, see NOTES.md in csrc_cuda/arch/sm80.
BODY = ForwardBody(
    entry="arch/sm80/forward.cu",
    warp_size=32,
    tiles=((64, 128, 128, 4, 2), (128, 128, 64, 4, 2), (256, 64, 64, 4, 2)),
    section_bytes=32 << 20,
)

DECODE = decode_call.NVIDIA
BACKWARD = backward_call.NVIDIA
APPEND = append_call.NVIDIA


def _images(arch: str) -> Iterator[ImageSpec]:
    """For NVIDIA's architectures from 8.0 on, by their plain names."""
    vendor, _, number = arch.partition("_")
    if vendor in ("sm", "compute") and number.isascii() and number.isdigit() and int(number) >= 80:
        yield from BODY.images(arch)
        yield from DECODE.images(arch)
        yield from APPEND.images(arch)
        yield from BACKWARD.images(arch)


BACKEND = Backend(
    "sm80",
    native=True,
    capabilities=lambda: (CAPABILITY, GRADIENTS, FP8_CACHE),
    prepare=lambda inputs, config: decode_call.prepare(BODY, DECODE, inputs, config),
    config=lambda problem, size, device: (*decode_call.config(BODY, DECODE, problem, size), *BACKWARD.plan(problem)),
    backward=BACKWARD.backward,
    yields=forward_call.yields,
    missing=BODY.missing,
    too_large=lambda problem, size: BODY.too_large(problem, size) or BACKWARD.too_large(problem, size),
    images=_images,
    append=APPEND,
)
