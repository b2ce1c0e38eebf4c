"""Hopper's images: asynchronous products that nothing serialises, TMA, and no local memory where a call is plain."""

from __future__ import annotations

import pytest
from compile import nvrtc, resources

from xattn import forward_call, jit
from xattn.backends import sm90
from xattn.images import ImageSpec

DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
ROWS = [(dims, row) for dims in DIMS for row in sm90.rows(*dims)]
NARROW_ROWS = [(dims, row) for dims in DIMS for row in sm90.rows(*dims, narrow=True)]
PLAIN = forward_call._switches()
# Bytes that a configuration may store and load again: what is not plain spills some; they may only become fewer.
SPILLS = {
    "any_scale": (forward_call._switches(any_scale=True), 64),
    "softcap alibi": (forward_call._switches(softcap=True, alibi=True), 384),
    "boolean": (forward_call._switches(attn_mask="boolean"), 256),
    "added16": (forward_call._switches(attn_mask="added16"), 384),
    "added32": (forward_call._switches(attn_mask="added32"), 384),
}
DROPOUT = forward_call._switches(dropout=True)


def spec(dims, row: sm90.Tile, switches: forward_call.Fields, element: str = "bf16", paged: bool = False) -> ImageSpec:
    fields = sm90._fields(("element", element), row.sizes(*dims), paged, switches)
    return ImageSpec("arch/sm90/forward.cu", fields, "sm_90a")


# NVRTC 12 makes what is shipped, NVRTC 13 what is compiled at first use.
@pytest.mark.parametrize("element, major, paged", [("bf16", 12, False), ("fp16", 13, False), ("bf16", 13, True)])
@pytest.mark.parametrize("dims, row", ROWS, ids=lambda x: "x".join(map(str, x[:3])))
def test_plain(dims, row, element, major, paged):
    if paged and row.plain:
        return  # it reads no pages
    wanted = spec(dims, row, PLAIN, element, paged)
    image = nvrtc.library(major).build(wanted)
    used = resources.of_nvidia(image)
    assert jit.serialised(image) == "" and used.spilled == 0 and used.stack == 0
    # Q K^T is issued in three places (the first block of all, one that rows see whole, every other one), P V in three
    # (with each of the last two, and the last block of all).
    padded = dict(row.sizes(*dims))
    assert resources.count(used, "HGMMA") == 3 * (padded["head_dim"] // 16 + row.tile_n // 16)
    assert resources.count(used, "UTMALDG") > 0 and resources.count(used, "LDL") == 0
    assert sm90.shared_bytes(wanted.config) <= 227 * 1024


@pytest.mark.parametrize("major", [12, 13])
@pytest.mark.parametrize("dims, row", NARROW_ROWS, ids=lambda x: "x".join(map(str, x[:3])))
def test_plain_of_8_bits(dims, row, major):
    """Products of 32 elements, and V turned by matrices of shared memory: 16 keys and 32 channels at a time."""
    wanted = spec(dims, row, PLAIN, "e4m3")
    image = nvrtc.library(major).build(wanted)
    used = resources.of_nvidia(image)
    # Where there are three warpgroups the others have 32 registers.
    assert jit.serialised(image) == "" and used.spilled <= (40 if row.num_warpgroups == 3 else 0)
    padded = dict(row.sizes(*dims))
    assert resources.count(used, "QGMMA") == 3 * (padded["head_dim"] // 32 + row.tile_n // 32)
    assert resources.count(used, "HGMMA") == 0
    turns = resources.count(used, "LDSM.16.MT88")
    assert turns > 0 and resources.count(used, "PRMT") >= 4 * turns
    assert sm90.shared_bytes(wanted.config) <= 227 * 1024


@pytest.mark.parametrize("name", SPILLS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_variants_of_8_bits(dims, name):
    switches, most = SPILLS[name]
    image = nvrtc.library(13).build(spec(dims, sm90.rows(*dims, narrow=True)[-1], switches, "e4m3"))
    assert jit.serialised(image) == ""
    assert jit.spilled_bytes(image) <= most


@pytest.mark.parametrize("name", SPILLS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_variants(dims, name):
    switches, most = SPILLS[name]
    image = nvrtc.library(13).build(spec(dims, sm90.rows(*dims)[-1], switches))
    assert jit.serialised(image) == ""
    assert jit.spilled_bytes(image) <= most


@pytest.mark.parametrize("element, major, paged", [("bf16", 12, False), ("fp16", 13, True), ("e4m3", 13, False)])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dropout(dims, element, major, paged):
    """Its numbers find registers; one evaluation of 14 products serves eight weights, less what evaluations share."""
    row = sm90.rows(*dims, narrow=element == "e4m3")[-1].dropping()
    images = [nvrtc.library(major).build(spec(dims, row, s, element, paged)) for s in (PLAIN, DROPOUT)]
    plain, used = map(resources.of_nvidia, images)
    assert jit.serialised(images[1]) == "" and used.spilled == used.stack == 0
    evaluations = 3 * row.tile_n * 64 // (8 * 128)  # in three places, of a lane
    more = resources.count(used, "IMAD.WIDE") - resources.count(plain, "IMAD.WIDE")
    assert row.tile_n % 64 == 0 and 0 < more <= 14 * evaluations
