"""Append images: they compile without a warning for every architecture, spill nothing, and move 16 bytes at once."""

from __future__ import annotations

import re

import pytest
from compile import nvrtc, resources
from compile.gates import ARCHS
from compile.test_images import compiled_cleanly

from xattn.backends import cdna, sm80
from xattn.images import Image, ImageSpec


def name(spec: ImageSpec) -> str:
    return f"{spec.arch}-{'-'.join(str(v) for _, v in spec.config)}"


# At most so many registers a lane: as many as let eight blocks onto a multiprocessor, or eight waves onto a SIMD.
NVIDIA_REGISTERS, AMD_REGISTERS = 128, 64
NVIDIA = [spec for arch in ARCHS if arch.startswith("sm_") for spec in sm80.APPEND.images(arch)]
AMD = [spec for arch in ARCHS if arch.startswith("gfx") for spec in cdna.APPEND.images(arch)]


@pytest.mark.parametrize(
    "spec, major",
    [pytest.param(s, n, id=f"{name(s)}-{n}") for s in NVIDIA for n in nvrtc.PACKAGES if n == 13 or s.arch == "sm_80"],
)
def test_nvidia(spec, major):
    image = nvrtc.library(major).build(spec)
    used = resources.of_nvidia(image)
    compiled_cleanly(image)
    assert used.registers <= NVIDIA_REGISTERS and used.spilled == used.stack == used.shared == 0, used[:4]
    assert resources.count(used, "LDG.E.128") > 0 and resources.count(used, "STG.E.128") > 0


@pytest.mark.parametrize("spec", list(sm80.APPEND.images("compute_80")), ids=name)
def test_ptx_for_later_architectures(spec):
    image = nvrtc.library(12).build(spec)
    text = image.code.decode()
    assert image.kind == "ptx" and ".target sm_80" in text and re.search(r"^\.version 8\.[0-8]$", text, re.MULTILINE)
    assert "ld.global.v4" in text and "st.global.v4" in text and "__local_depot" not in text


@pytest.mark.parametrize("spec", AMD, ids=name)
def test_amd(spec, amd_compiler):
    code, kind, log = resources.amd_compiler().compile(spec)
    used = resources.of_amd(Image("", spec.arch, kind, spec.name(), "", code))
    assert kind == "hsaco" and log == ""
    assert used.registers <= AMD_REGISTERS and used.spilled == used.stack == used.shared == 0, used[:4]
    assert resources.count(used, "scratch_") == 0
    assert resources.count(used, "global_load_dwordx4") > 0 and resources.count(used, "global_store_dwordx4") > 0
