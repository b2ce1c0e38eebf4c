"""Hopper's images: asynchronous products that nothing serialises, TMA, and no local memory where a call is plain."""

from __future__ import annotations

import pytest
from compile import nvrtc, resources

from xattn import forward_call, jit
from xattn.backends import sm90
from xattn.images import ImageSpec

DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
PLAIN = forward_call._switches()
# Bytes that a configuration may store and load again: what is not plain spills some; they may only become fewer.
SPILLS = {
    "any_scale": (forward_call._switches(any_scale=True), 64),
    "softcap alibi": (forward_call._switches(softcap=True, alibi=True), 384),
    "boolean": (forward_call._switches(attn_mask="boolean"), 256),
    "added16": (forward_call._switches(attn_mask="added16"), 384),
    "added32": (forward_call._switches(attn_mask="added32"), 384),
}


def spec(dims: tuple[int, int], switches: forward_call.Fields, element: str = "bf16") -> ImageSpec:
    fields = sm90._fields(("element", element), sm90._tile(*dims), switches)
    return ImageSpec("arch/sm90/forward.cu", fields, "sm_90a")


# NVRTC 12 makes what is shipped, NVRTC 13 what is compiled at first use.
@pytest.mark.parametrize("element, major", [("bf16", 12), ("fp16", 13)])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_plain(dims, element, major):
    image = nvrtc.library(major).build(spec(dims, PLAIN, element))
    config = dict(image_config(image))
    used = resources.of_nvidia(image)
    most = 8 if (dims, major) == ((128, 128), 12) else 0  # one register, once a tile
    assert jit.serialised(image) == "" and used.spilled <= most and used.stack <= most
    # Q K^T is issued in two places (the first block of all, every other one), P V in two (every other one, the last).
    products = 2 * (config["head_dim"] // 16 + config["tile_n"] // 16)
    assert resources.count(used, "HGMMA") == products
    assert resources.count(used, "UTMALDG") > 0 and resources.count(used, "LDL") <= most // 8
    assert _shared(config) <= 227 * 1024


@pytest.mark.parametrize("name", SPILLS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_variants(dims, name):
    switches, most = SPILLS[name]
    image = nvrtc.library(13).build(spec(dims, switches))
    assert jit.serialised(image) == ""
    assert jit.spilled_bytes(image) <= most


def image_config(image) -> list[tuple[str, int]]:
    """The numbers of a configuration, from the image's name."""
    inside = image.name.partition("[")[2].partition("]")[0]
    return [(n, int(v)) for n, v in (part.split("=") for part in inside.split(", ")) if v.isdigit()]


def _shared(config: dict[str, int]) -> int:
    panels = [-(-config[n] // 64) for n in ("head_dim", "head_dim_v")]
    rows = 64 * config["num_warpgroups"] * panels[0] + config["num_stages"] * config["tile_n"] * sum(panels)
    return 128 * rows + 8 * (2 + 4 * config["num_stages"])
