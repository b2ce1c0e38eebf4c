"""CDNA2, CDNA3, CDNA4: the shared forward body over MFMA. Compiled and emulated; not run on AMD hardware."""

from __future__ import annotations

from collections.abc import Iterator

from .. import forward_call
from ..capability import Capability, HeadDims
from ..forward_call import FEATURES, ForwardBody
from ..images import ImageSpec
from .base import Backend

CAPABILITY = Capability(
    vendors=frozenset({"amd"}),
    archs=frozenset({"gfx90a", "gfx942", "gfx950"}),
    kinds=frozenset({"attention", "varlen"}),
    dtypes=frozenset({("bf16", "bf16"), ("fp16", "fp16")}),
    head_dim=HeadDims(largest=256, multiple_of=8),
    head_dim_v=HeadDims(largest=256, multiple_of=8),
    features=FEATURES,
)

# Q, K and V together fill at most the 64 KiB of LDS of gfx90a and gfx942; nothing here is measured.
BODY = ForwardBody(
    entry="arch/cdna/forward.hip",
    warp_size=64,
    tiles=((128, 64, 64, 4, 1), (256, 64, 32, 4, 1)),
    section_bytes=4 << 20,
)


def _images(arch: str) -> Iterator[ImageSpec]:
    if arch in CAPABILITY.archs:
        yield from BODY.images(arch)


BACKEND = Backend(
    "cdna",
    native=True,
    capabilities=lambda: (CAPABILITY,),
    prepare=lambda inputs, config: forward_call.prepare(BODY, inputs, config),
    config=lambda problem, size, device: BODY.config(problem),
    notes=("not run on AMD hardware: compiled, and checked in emulation",),
    missing=BODY.missing,
    images=_images,
)
