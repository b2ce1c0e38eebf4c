"""CDNA2, CDNA3, CDNA4: the shared forward body over MFMA. Compiled and emulated; not run on AMD hardware."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .. import decode_call, forward_call
from ..append_call import AppendBody
from ..backward_call import BackwardBody
from ..decode_call import DecodeBody
from ..forward_call import ForwardBody
from ..images import ImageSpec
from .base import Backend

CAPABILITY = replace(
    forward_call.SHARED_CAPABILITY, vendors=frozenset({"amd"}), archs=frozenset({"gfx90a", "gfx942", "gfx950"})
)
GRADIENTS = forward_call.gradients(CAPABILITY)

# A cache is stored in what the architecture converts by an instruction; gfx90a has none, and converts in software.
_FNUZ = frozenset({"gfx942"})
FP8_CACHES = (
    forward_call.fp8_cache(CAPABILITY, "fp8_e4m3", CAPABILITY.archs - _FNUZ),
    forward_call.fp8_cache(CAPABILITY, "fp8_e4m3fnuz", _FNUZ),
)

# Q, K and V together fill at most the 64 KiB of LDS of gfx90a and gfx942; nothing here is measured.
BODY = ForwardBody(
    entry="arch/cdna/forward.hip",
    warp_size=64,
    tiles=((128, 64, 64, 4, 1), (256, 64, 32, 4, 1)),
    section_bytes=4 << 20,
    most_threads=(1 << 32) - 1,  # of a launch, by HIP's programming manual
)

# One stage: copies go through registers here, at once.
DECODE = DecodeBody(
    entry="arch/cdna/decode.hip",
    warp_size=64,
    tiles=((64, 32, 4, 1, 1), (128, 16, 4, 1, 1), (256, 16, 2, 1, 1)),
    narrow_tiles=((64, 32, 4, 1, 1), (128, 16, 4, 1, 1), (256, 16, 2, 1, 1)),
    narrow_cache=lambda arch: "e4m3fnuz" if arch in _FNUZ else "e4m3",
)

APPEND = AppendBody(entry="arch/cdna/append.hip", warp_size=64)

# One stage, as for decoding; all tiles of a block fill at most 64 KiB.
BACKWARD = BackwardBody(
    folder="arch/cdna",
    suffix=".hip",
    warp_size=64,
    keys=((64, 64, 64, 4, 1, 1, 16, 1), (128, 32, 64, 4, 1, 1, 16, 1), (256, 16, 32, 2, 1, 1, 16, 2)),
    queries=((64, 64, 64, 4, 1, 1, 16, 1), (128, 64, 32, 4, 1, 1, 16, 1), (256, 32, 16, 2, 1, 1, 16, 1)),
    section_bytes=4 << 20,
    most_threads=BODY.most_threads,
)


def _images(arch: str) -> Iterator[ImageSpec]:
    if arch in CAPABILITY.archs:
        yield from BODY.images(arch)
        yield from DECODE.images(arch)
        yield from APPEND.images(arch)
        yield from BACKWARD.images(arch)


BACKEND = Backend(
    "cdna",
    native=True,
    capabilities=lambda: (CAPABILITY, GRADIENTS, *FP8_CACHES),
    prepare=lambda inputs, config: decode_call.prepare(BODY, DECODE, inputs, config),
    config=lambda problem, size, device: (*decode_call.config(BODY, DECODE, problem, size), *BACKWARD.plan(problem)),
    backward=BACKWARD.backward,
    yields=forward_call.yields,
    notes=("not run on AMD hardware: compiled, and checked in emulation",),
    missing=BODY.missing,
    too_large=lambda problem, size: BODY.too_large(problem, size) or BACKWARD.too_large(problem, size),
    images=_images,
    append=APPEND,
)
