"""Images for every architecture: they compile without a warning, use tensor instructions, and stay within the gates."""

from __future__ import annotations

import re

import pytest
from compile import nvrtc, report, resources
from compile.expected import of_config
from compile.gates import ARCHS, FP8_VARIANTS, GATES, PAGED_VARIANTS, VARIANTS, spec

from xattn import jit
from xattn.backends import sm80
from xattn.images import Image, ImageSpec


def compiled_cleanly(image: Image) -> None:
    """ptxas reports what it does; warnings and advice are more than that."""
    told = [
        line
        for line in image.log.splitlines()
        if not re.match(r"ptxas info|ptxas  +\. +\d+ bytes stack frame|\s*$", line)
    ]
    assert told == [], image.log


def within(name: str, arch: str, used: resources.Resources) -> None:
    gate = GATES[name, arch]
    assert used.registers <= gate.registers and used.spilled <= gate.spilled, f"{name} on {arch}: {used[:4]}, {gate}"


NVIDIA = [cell for cell in GATES if cell[1].startswith("sm_")]
AMD = [cell for cell in GATES if cell[1].startswith("gfx")]
SHIPPED = [name for name, arch in GATES if arch == "sm_80"]


# Instructions that make 16-bit elements of a word of 8-bit floats; none: bits and a product (kernels/fp8.h).
CONVERSIONS = {
    **dict.fromkeys(("sm_80", "sm_86", "gfx90a"), ""),
    **dict.fromkeys(("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"), "F2FP.F16.E4M3"),
    **dict.fromkeys(("gfx942", "gfx950"), "v_cvt_pk_f32_fp8"),
}


def widened_by_instructions(name: str, s: ImageSpec, used: resources.Resources, lanes: int) -> None:
    """8-bit floats become elements by instructions where there are any: all keys and values of a block, by pairs."""
    c = dict(s.config)
    pairs = int(c["tile_n"]) * (int(c["head_dim"]) + int(c["head_dim_v"])) // (2 * lanes)
    found = {name: resources.count(used, name) for name in ("F2FP.F16.E4M3", "v_cvt_pk_f32_fp8")}
    narrow = name.startswith("decode-fp8")
    assert found == {name: pairs if narrow and name == CONVERSIONS[s.arch] else 0 for name in found}


@pytest.mark.parametrize(
    "name, arch, major", [(*cell, 13) for cell in NVIDIA] + [(name, "sm_80", 12) for name in SHIPPED]
)
def test_nvidia(name, arch, major):
    s = spec(name, arch)
    image = nvrtc.library(major).build(s)
    used, wanted = resources.of_nvidia(image), of_config(s, 32)
    compiled_cleanly(image)
    within(name, arch, used)
    assert resources.count(used, "HMMA.16816.F32") == 2 * wanted["products"]
    assert resources.count(used, "LDSM") == wanted["fragments"]
    assert resources.count(used, "LDGSTS") > 0
    widened_by_instructions(name, s, used, 32)
    # Nothing is in local memory but what ptxas says it spilled: no array that is indexed at run time.
    local = resources.count(used, "LDL") + resources.count(used, "STL")
    assert 4 * local <= used.spilled and (used.stack > 0) == (used.spilled > 0)
    assert used.shared <= 1024 and wanted["shared"] <= ARCHS[arch].shared


@pytest.mark.parametrize("name", SHIPPED)
def test_ptx_for_later_architectures(name):
    """By NVRTC 12, whose PTX drivers of CUDA 12.9 and later take."""
    s = spec(name, "compute_80")
    image = nvrtc.library(12).build(s)
    text, wanted = image.code.decode(), of_config(s, 32)
    assert image.kind == "ptx" and ".target sm_80" in text and re.search(r"^\.version 8\.[0-8]$", text, re.MULTILINE)
    assert text.count("mma.sync.aligned.m16n8k16") == 2 * wanted["products"]
    assert text.count("ldmatrix.sync.aligned") == wanted["fragments"] and "cp.async.cg.shared.global" in text
    assert "__local_depot" not in text


@pytest.mark.parametrize("name, arch", AMD)
def test_amd(name, arch, amd_compiler):
    s = spec(name, arch)
    code, kind, log = resources.amd_compiler().compile(s)
    image = Image("", arch, kind, s.name(), "", code)
    used, wanted = resources.of_amd(image), of_config(s, 64)
    assert kind == "hsaco" and log == ""
    assert report.missed(report.of_image(name, s, image)) == []
    element = "f16" if "fp16" in name else "bf16"
    products = [n for n in used.instructions if n.startswith("v_mfma_f32_16x16x16")]
    assert len(products) == 1 and products[0].removesuffix("_1k").endswith(element)
    assert used.instructions[products[0]] == wanted["products"]
    widened_by_instructions(name, s, used, 64)
    # Nothing is in scratch memory; tiles are copied by 16 bytes.
    assert used.stack == 0 and resources.count(used, "scratch_") == 0
    fences = (
        resources.count(used, "buffer_wb") + resources.count(used, "buffer_inv") + resources.count(used, "buffer_gl")
    )
    assert resources.count(used, "buffer_") == fences and (fences > 0) == name.startswith("decode")
    assert resources.count(used, "ds_write_b128") > 0 and resources.count(used, "global_load_dwordx4") > 0
    assert used.shared == 0 and wanted["shared"] <= ARCHS[arch].shared


def test_every_tile_and_variant_has_a_gate():
    tiles = {f"d{row[0]}" for row in sm80.BODY.tiles}
    for arch in ARCHS:
        names = {name for name, a in GATES if a == arch}
        assert arch == "compute_80" or tiles <= names
    variants = {name.partition(" ")[2] for name in SHIPPED if name.startswith("d") and not name.startswith("decode")}
    assert variants == set(VARIANTS)
    assert {arch for name, arch in GATES if name == "decode-fp8 d128"} == set(CONVERSIONS)
    for kind, known in (("paged", PAGED_VARIANTS), ("decode", PAGED_VARIANTS), ("decode-fp8", FP8_VARIANTS)):
        found = {" ".join(name.split(" ")[2:]) for name in SHIPPED if name.startswith(f"{kind} ")}
        assert found == set(known)


# ---------------------------------------------------------------- the gates themselves
FAULTS = {
    "a spill": "float x[64]; for (int i = 0; i < 64; ++i) x[i] = p[i]; for (int j = 0; j < 9; ++j) "
    "for (int i = 0; i < 64; ++i) x[i] = x[i] * x[(i + 7) & 63] + float(j); "
    "for (int i = 0; i < 64; ++i) p[i] = x[i];",
    "an array that is indexed at run time": "float x[512]; for (int i = 0; i < 512; ++i) x[i] = p[i]; "
    "for (int i = 0; i < 99; ++i) x[int(p[i])] += 1.0f; p[0] = x[int(p[9])];",
}


def faulty(monkeypatch, fault: str, arch: str) -> ImageSpec:
    """An image whose kernel has that fault, and may use 32 registers."""
    launch_bounds = "__launch_bounds__(1024, 2)"
    head = '#include "arch/cdna/language.h"\n' if arch.startswith("gfx") else ""
    if head:
        launch_bounds = "__launch_bounds__(1024) __attribute__((amdgpu_num_vgpr(24)))"
    main = f'{head}extern "C" __global__ void {launch_bounds} xattn_forward(float* p) {{ {FAULTS[fault]} }}\n'
    real = jit.sources
    s = spec("d64", arch)

    def sources(entry: str, arch: str) -> dict[str, str]:
        return {**real(entry, arch), entry: main}

    monkeypatch.setattr(jit, "sources", sources)
    return s


@pytest.mark.parametrize("fault", FAULTS)
def test_local_memory_is_noticed_on_nvidia(monkeypatch, fault):
    used = resources.of_nvidia(nvrtc.library(13).build(faulty(monkeypatch, fault, "sm_80")))
    local = resources.count(used, "LDL") + resources.count(used, "STL")
    assert used.stack > 0 and local > 0
    assert (used.spilled > 0) == (fault == "a spill")


@pytest.mark.parametrize("fault", FAULTS)
def test_local_memory_is_noticed_on_amd(monkeypatch, fault, amd_compiler):
    code, kind, _ = resources.amd_compiler().compile(faulty(monkeypatch, fault, "gfx942"))
    used = resources.of_amd(Image("", "gfx942", kind, "", "", code))
    assert used.stack > 0 and resources.count(used, "scratch_") > 0
    assert (used.spilled > 0) == (fault == "a spill")


def test_warnings_are_noticed():
    image = Image("", "sm_80", "cubin", "", "", b"", "forward.cu(3): warning #177-D: variable was declared")
    with pytest.raises(AssertionError):
        compiled_cleanly(image)


# ---------------------------------------------------------------- the package's own way
def test_the_jit_gives_the_same_code_as_the_library_it_names():
    """What cuda-python loads is one of the two libraries; by any name its code is the same."""
    s = spec("d256", "sm_80")
    image = jit.Nvrtc().compile(s)[0], jit.Nvrtc().version()
    majors = [m for m in nvrtc.PACKAGES if nvrtc.library(m).version() == image[1]]
    assert len(majors) == 1
    assert nvrtc.library(majors[0]).build(s).code == image[0]
