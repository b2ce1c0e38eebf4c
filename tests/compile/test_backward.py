"""Backward images: they compile without a warning for every architecture, hold the matrix products that their tiles
take, and stay within bounds of registers and spills, which may only fall."""

from __future__ import annotations

import re

import pytest
from compile import nvrtc, resources
from compile.expected import of_backward
from compile.gates import ARCHS, VARIANTS
from compile.test_images import compiled_cleanly

from xattn import backward_call
from xattn.backends import cdna, sm80
from xattn.images import ConfigValue, Image, ImageSpec

_PLAIN: dict[str, ConfigValue] = {"softcap": False, "alibi": False, "attn_mask": "none"}
DIMS = (64, 128, 256)
KERNELS = ("keys", "queries")
# Every mask once at head_dim 128, and the others plain; both compilers for the plain ones of 128.
CELLS = [(kernel, 128, variant, 12) for kernel in KERNELS for variant in VARIANTS if variant != "fp16"]
CELLS += [(kernel, d, variant, 12) for kernel in KERNELS for d in (64, 256) for variant in ("", "dropout")] + [
    (kernel, 128, "", 13) for kernel in KERNELS
]
# Bytes that sm_80's images store and load again, by NVRTC 12.9 and 13 alike, with dropout by 12.9; the wanted number
# is 0, as elsewhere.
SPILLS: dict[tuple[str, int, str], int] = {
    ("keys", 64, ""): 44,
    ("keys", 128, ""): 64,
    ("keys", 128, "softcap alibi"): 184,
    ("keys", 128, "boolean"): 60,
    ("keys", 128, "added16"): 144,
    ("keys", 128, "added32"): 132,
    ("keys", 256, ""): 112,
    ("keys", 64, "dropout"): 92,
    ("keys", 128, "dropout"): 64,
    ("keys", 256, "dropout"): 24,
}
# Of images for later architectures; Hopper has dropout by these kernels alone.
LATER = {("keys", 128, ""): 64, ("keys", 128, "dropout"): 24}
# Vector and accumulation registers of a lane together, and scalar ones spilled into them; nothing goes to memory.
AMD = {
    ("keys", 64): (128, 33),
    ("keys", 128): (176, 33),
    ("keys", 256): (152, 85),
    ("queries", 64): (84, 0),
    ("queries", 128): (120, 0),
    ("queries", 256): (160, 0),
}
AMD_DROPOUT = {("keys", 128): (192, 52), ("queries", 128): (136, 4)}


def spec(body: backward_call.BackwardBody, kernel: str, d: int, arch: str, variant: str = "") -> ImageSpec:
    changed = VARIANTS[variant]
    element = ("element", str(changed.get("element", "bf16")))
    if kernel == "rows":
        return next(s for s in body.images(arch) if s.entry == body.entry("rows") and s.config[0] == element)
    switches = tuple((name, changed.get(name, value)) for name, value in _PLAIN.items())
    switches += (("dropout", True),) if changed.get("dropout") else ()
    return ImageSpec(body.entry(kernel), (element, *body.tile(kernel, d, d), *switches), arch)


def checked_nvidia(s: ImageSpec, major: int, most: int) -> None:
    image = nvrtc.library(major).build(s)
    used = resources.of_nvidia(image)
    compiled_cleanly(image)
    assert used.registers <= 255 and used.spilled <= most, f"{used[:4]}, {most}"
    assert resources.count(used, "HMMA.16816.F32") == 2 * of_backward(s)["products"]
    assert resources.count(used, "LDSM") > 0 and resources.count(used, "LDGSTS") > 0
    local = resources.count(used, "LDL") + resources.count(used, "STL")
    assert 4 * local <= used.spilled and (used.stack > 0) == (used.spilled > 0)
    assert used.shared <= 1024 and of_backward(s)["shared"] <= 99 * 1024


@pytest.mark.parametrize("kernel, d, variant, major", CELLS)
def test_sm_80(kernel, d, variant, major):
    checked_nvidia(spec(sm80.BACKWARD, kernel, d, "sm_80", variant), major, SPILLS.get((kernel, d, variant), 0))


@pytest.mark.parametrize("arch, variant", [("sm_90a", ""), ("sm_90a", "dropout"), ("sm_100", ""), ("sm_120", "")])
@pytest.mark.parametrize("kernel", KERNELS)
def test_later_architectures(kernel, arch, variant):
    checked_nvidia(spec(sm80.BACKWARD, kernel, 128, arch, variant), 13, LATER.get((kernel, 128, variant), 0))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("variant", ["", "fp16"])
def test_rows_on_nvidia(arch, variant):
    image = nvrtc.library(13).build(spec(sm80.BACKWARD, "rows", 0, arch, variant))
    used = resources.of_nvidia(image)
    compiled_cleanly(image)
    assert used.registers <= 64 and used.spilled == used.stack == used.shared == 0, used[:4]
    assert resources.count(used, "LDG.E.128") > 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_ptx_for_later_architectures(kernel):
    s = spec(sm80.BACKWARD, kernel, 128, "compute_80")
    image = nvrtc.library(12).build(s)
    text = image.code.decode()
    assert image.kind == "ptx" and ".target sm_80" in text and re.search(r"^\.version 8\.[0-8]$", text, re.MULTILINE)
    assert text.count("mma.sync.aligned.m16n8k16") == 2 * of_backward(s)["products"]
    assert "cp.async.cg.shared.global" in text and "__local_depot" not in text


@pytest.mark.parametrize("arch", [a for a in ARCHS if a.startswith("gfx")])
@pytest.mark.parametrize("kernel, d", [("rows", 0), *((kernel, d) for kernel in KERNELS for d in DIMS)])
def test_amd(kernel, d, arch, amd_compiler):
    checked_amd(spec(cdna.BACKWARD, kernel, d, arch), kernel, *AMD.get((kernel, d), (64, 0)))


@pytest.mark.parametrize("arch", [a for a in ARCHS if a.startswith("gfx")])
@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout_on_amd(kernel, arch, amd_compiler):
    checked_amd(spec(cdna.BACKWARD, kernel, 128, arch, "dropout"), kernel, *AMD_DROPOUT[kernel, 128])


def checked_amd(s: ImageSpec, kernel: str, registers: int, spilled: int) -> None:
    code, kind, log = resources.amd_compiler().compile(s)
    used = resources.of_amd(Image("", s.arch, kind, s.name(), "", code))
    assert kind == "hsaco" and log == ""
    assert used.registers <= registers and used.spilled <= spilled, used[:4]
    # Nothing is in scratch memory; tiles are copied by 16 bytes.
    assert used.stack == used.shared == 0 and resources.count(used, "scratch_") == 0
    assert resources.count(used, "global_load_dwordx4") > 0
    if kernel != "rows":
        assert resources.count(used, "v_mfma_f32_16x16x16") == of_backward(s)["products"]
        assert of_backward(s)["shared"] <= 64 * 1024
