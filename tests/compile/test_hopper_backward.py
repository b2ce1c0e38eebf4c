"""Hopper's own backward: asynchronous products that nothing serialises, TMA, sums of dq by 16 bytes at once, no local
memory."""

from __future__ import annotations

import pytest
from compile import nvrtc, resources
from compile.test_images import compiled_cleanly

from xattn import jit, wgmma_backward
from xattn.images import ImageSpec

DIMS = [(64, 64), (96, 96), (96, 64), (128, 96), (128, 128)]
PLAIN = (("softcap", False), ("alibi", False), ("attn_mask", "none"))
MODIFIED = (("softcap", True), ("alibi", True), ("attn_mask", "none"))


def spec(part: str, dims, switches=PLAIN, element: str = "bf16") -> ImageSpec:
    fields = (("element", element), *wgmma_backward.tile(*dims), *(() if part else switches))
    return ImageSpec(f"arch/sm90/backward{part}.cu", fields, "sm_90a")


@pytest.mark.parametrize("element, major", [("bf16", 12), ("bf16", 13), ("fp16", 13)])
@pytest.mark.parametrize("switches", [PLAIN, MODIFIED], ids=["plain", "softcap alibi"])
@pytest.mark.parametrize("dims", DIMS, ids=lambda x: "x".join(map(str, x)))
def test_products(dims, switches, element, major):
    wanted = spec("", dims, switches, element)
    image = nvrtc.library(major).build(wanted)
    used = resources.of_nvidia(image)
    assert jit.serialised(image) == "" and used.spilled == 0 and used.stack == 0
    # S is issued ahead of the loop and in it, dQ in it and behind it; dP, dV and dK in it, dP ahead of it too where
    # registers suffice.
    c = dict(wanted.config)
    d, dv, m = (int(c[n]) // 16 for n in ("head_dim", "head_dim_v", "tile_m"))
    early = dv if m == 4 and switches == PLAIN else 0
    assert resources.count(used, "HGMMA") == 2 * d + dv + early + 2 * m + 2 * (128 // 16)
    assert resources.count(used, "REDG.E.ADD.F32x4") == 2 * 8
    assert resources.count(used, "UTMALDG") > 0 and resources.count(used, "LDL") == 0
    assert wgmma_backward.shared_bytes(wanted.config) <= 227 * 1024


@pytest.mark.parametrize("part", ["_rows", "_queries"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_rows(dims, part):
    image = nvrtc.library(13).build(spec(part, dims))
    used = resources.of_nvidia(image)
    compiled_cleanly(image)
    assert used.registers <= 64 and used.spilled == used.stack == 0, used[:4]
    assert resources.count(used, "LDG.E.128") > 0 and resources.count(used, "STG.E.128") > 0
