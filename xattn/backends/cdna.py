"""CDNA2, CDNA3, CDNA4: MFMA. Its capability is empty until its kernels have run on such a device: it refuses every kind
of call. The images of the plain forward can be built."""

from collections.abc import Iterator
from itertools import product

from ..capability import Capability
from ..images import ImageSpec
from .base import Backend

CAPABILITY = Capability(vendors=frozenset({"amd"}), archs=frozenset({"gfx90a", "gfx942", "gfx950"}))

# Tiles by the larger head dimension: (up to, tile_m, tile_n, num_warps). Q, K and V together fill at most the 64 KiB of
# LDS of gfx90a and gfx942; nothing here is measured.
_TILES = ((128, 64, 64, 4), (256, 64, 32, 4))


def _images(arch: str) -> Iterator[ImageSpec]:
    """Every configuration, for the architectures of the capability."""
    if arch not in CAPABILITY.archs:
        return
    dims = range(32, 256 + 1, 32)
    masks = ("none", "boolean", "added16", "added32")
    for element, d, dv, softcap, alibi, mask in product(
        ("bf16", "fp16"), dims, dims, (False, True), (False, True), masks
    ):
        _, tile_m, tile_n, num_warps = next(row for row in _TILES if max(d, dv) <= row[0])
        config = (
            ("element", element),
            ("head_dim", d),
            ("head_dim_v", dv),
            ("tile_m", tile_m),
            ("tile_n", tile_n),
            ("num_warps", num_warps),
            ("min_blocks", 1),
            ("keep_q", False),
            ("softcap", softcap),
            ("alibi", alibi),
            ("attn_mask", mask),
        )
        yield ImageSpec("arch/cdna/forward.hip", config, arch)


BACKEND = Backend("cdna", native=True, capabilities=lambda: (CAPABILITY,), images=_images)
