"""What is read from machine code, the rates that bounds are made of, and that gates are missed by what misses them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from compile import cdna, gates, machine_code, nvrtc, report, resources
from compile.expected import has_products

import xattn
from xattn import jit, shipped
from xattn.images import Store, publish

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "ci" / "isa_report"

# A loop whose step may skip a mask (s_cbranch_vccz) and a copy (s_cbranch_scc1, uniform; s_cbranch_execz, by lanes),
# with a loop of one instruction within it, and another loop behind it.
AMD = """
0000000000001000 <xattn_forward>:
	s_mov_b32 s0, 0                         // 000000001000: 00000000
	v_mfma_f32_16x16x16_f16 v[0:3], v[4:5]  // 000000001004: 00000000 00000000
	v_mfma_f32_16x16x16_f16 v[0:3], v[4:5]  // 00000000100C: 00000000 00000000
	s_cbranch_vccz 3                        // 000000001014: 00000000 <xattn_forward+0x24>
	v_cndmask_b32_e32 v0, v1, v2            // 000000001018: 00000000
	v_cndmask_b32_e32 v0, v1, v2            // 00000000101C: 00000000
	s_nop 0                                 // 000000001020: 00000000
	v_exp_f32_e32 v0, v1                    // 000000001024: 00000000
	s_cbranch_scc1 4                        // 000000001028: 00000000 <xattn_forward+0x3c>
	s_and_saveexec_b64 s[0:1], vcc          // 00000000102C: 00000000
	s_cbranch_execz 1                       // 000000001030: 00000000 <xattn_forward+0x38>
	global_load_dwordx4 v[0:3], v[4:5], off // 000000001034: 00000000
	ds_write_b128 v0, v[0:3]                // 000000001038: 00000000
	s_add_i32 s0, s0, 1                     // 00000000103C: 00000000
	s_cbranch_scc0 65535                    // 000000001040: 00000000 <xattn_forward+0x3c>
	s_cbranch_vccnz 65500                   // 000000001044: 00000000 <xattn_forward+0x4>
	v_add_f32_e32 v0, v1, v2                // 000000001048: 00000000
	s_cbranch_scc0 65535                    // 00000000104C: 00000000 <xattn_forward+0x48>
	s_endpgm                                // 000000001050: 00000000
"""


def test_the_usual_step_of_the_main_loop():
    """Masks are skipped, copies are made, the loop within is passed once, the loop behind is another."""
    step = machine_code.main_step(machine_code.of_amd(AMD), cdna.value)
    assert step == {
        "v_mfma_f32_16x16x16_f16": 2,
        "s_cbranch_vccz": 1,
        "v_exp_f32_e32": 1,
        "s_cbranch_scc1": 1,
        "s_and_saveexec_b64": 1,
        "s_cbranch_execz": 1,
        "global_load_dwordx4": 1,
        "ds_write_b128": 1,
        "s_add_i32": 1,
        "s_cbranch_scc0": 1,
        "s_cbranch_vccnz": 1,
    }


def test_code_without_a_loop():
    code = machine_code.of_amd(AMD)[:9]
    assert machine_code.main_step([i._replace(targets=()) for i in code], cdna.value) == Counter()


NVIDIA = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P0 BRA `(.L_x_2) ;
        /*0020*/                   FADD R0, R1, R2 ;
.L_x_2:
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0040*/               @P1 LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
.L_x_3:
        /*0070*/                   BRA `(.L_x_3) ;
"""


def test_loops_of_nvidia():
    code = machine_code.of_nvidia(NVIDIA)
    assert [i.name for i in code][4] == "LDGSTS.E.BYPASS.128" and code[1].targets == (0x30,) and code[1].falls
    step = machine_code.main_step(code, report._nvidia_value)
    assert step == {"BRA": 2, "HMMA.16816.F32.BF16": 1, "LDGSTS.E.BYPASS.128": 1}


# ---------------------------------------------------------------- rates
PRODUCTS = {
    "gfx90a": tuple(f"v_mfma_f32_{shape}{t}" for shape in ("16x16x16", "32x32x8") for t in ("f16", "bf16_1k")),
    "gfx942": tuple(f"v_mfma_f32_{shape}_{t}" for shape in ("16x16x16", "32x32x8") for t in ("f16", "bf16")),
}
PRODUCTS["gfx950"] = (
    *PRODUCTS["gfx942"],
    *(f"v_mfma_f32_{shape}_{t}" for shape in ("16x16x32", "32x32x16") for t in ("f16", "bf16")),
)


@pytest.mark.parametrize("arch", PRODUCTS)
def test_cycles_are_those_of_the_scheduling_model(arch, amd_compiler):
    """LLVM's, whose unit is four cycles."""
    lines = []
    for name in PRODUCTS[arch]:
        rows, _, k = (int(n) for n in re.findall(r"\d+", name.removeprefix("v_mfma_f32_"))[:3])
        operand, result = rows * k // 64 // 2, rows * rows // 64  # registers of a lane
        lines.append(f"{name} v[0:{result - 1}], v[20:{19 + operand}], v[24:{23 + operand}], v[0:{result - 1}]")
    command = [
        resources.llvm_tool("llvm-mca"),
        "-mtriple=amdgcn-amd-amdhsa",
        f"-mcpu={arch}",
        "-iterations=1",
        "--json",
    ]
    done = subprocess.run([*map(str, command)], input="\n".join(lines), capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)["CodeRegions"][0]
    model = [i["RThroughput"] for i in answer["InstructionInfoView"]["InstructionList"]]
    assert [cdna.matrix_cycles(name, arch) for name in PRODUCTS[arch]] == [4 * n for n in model]


@pytest.mark.parametrize(
    "arch, name, full", [("gfx90a", "32x32x8f16", 1), ("gfx942", "16x16x16_f16", 1), ("gfx950", "16x16x16_f16", 2)]
)
def test_bounds_of_a_loop(arch, name, full):
    step = Counter({f"v_mfma_f32_{name}": 8, "v_exp_f32_e32": 4, "v_add_f32_e32": 40, "ds_read_b64": 10, "s_nop": 99})
    loop = cdna.loop(step, arch)
    assert loop.matrix_cycles == full * loop.least_matrix_cycles
    assert loop.vector_cycles == 8 * 4 + 4 * 16 + 40 * 4 and loop.lds_cycles == 4 * 64 * 80 // (
        4 * cdna.ARCHS[arch].banks
    )
    assert loop.cycles == max(loop.matrix_cycles, loop.vector_cycles, loop.lds_cycles)
    assert loop.of_peak * full == pytest.approx(loop.busy) and 0 < loop.busy_in_turn < loop.busy <= 1


def test_an_instruction_without_a_known_rate():
    with pytest.raises(AssertionError, match="v_mfma_f64_16x16x4_f64: its cycles are not known"):
        cdna.loop(Counter({"v_mfma_f64_16x16x4_f64": 1}), "gfx942")


@pytest.mark.parametrize(
    "name, size",
    [("ds_read_u16", 4), ("ds_bpermute_b32", 4), ("ds_read2st64_b64", 16), ("ds_write_b128", 16), ("ds_read2_b32", 8)]
    + [("ds_read_b64_tr_b16", 8)],
)
def test_bytes_of_lds(name, size):
    assert cdna.lds_bytes(name) == size


@pytest.mark.parametrize(
    "arch, registers, lds, num_warps, waves",
    [
        ("gfx942", 128, 49152, 4, (16, 4)),
        ("gfx942", 129, 32768, 4, (12, 8)),
        ("gfx90a", 256, 65536, 8, (8, 8)),
        ("gfx950", 512, 65536, 4, (4, 8)),
        ("gfx950", 8, 1024, 4, (32, 32)),
        ("gfx942", 96, 40960, 2, (20, 2)),
    ],
)
def test_waves(arch, registers, lds, num_warps, waves):
    assert cdna.waves(arch, registers, lds, num_warps) == waves


# ---------------------------------------------------------------- gates
@pytest.fixture(scope="module")
def plain() -> report.Report:
    missing = resources.missing_amd_compiler()
    if missing:
        pytest.skip(f"no AMD compiler: {missing}")
    spec = gates.spec("d64", "gfx942")
    return report.of_image("d64", spec, jit.build(spec, resources.amd_compiler()))


def test_each_gate_is_missed_by_what_misses_it(plain):
    assert report.missed(plain) == []
    slow = replace(plain.loop, matrix_cycles=plain.loop.matrix_cycles + 1)
    fewer = replace(plain.loop, multiply_adds=plain.loop.multiply_adds - 4096)
    for change, word in (
        ({"registers": 129}, "129 registers, allowed 128"),
        ({"spilled": 1}, "1 spilled registers, allowed 0"),
        ({"scratch": 16}, "16 bytes of scratch, allowed 0"),
        ({"shared": 65537}, "65537 bytes of LDS"),
        ({"waves": (4, 8)}, "4 waves on a compute unit, wanted 8"),
        ({"waves": (16, 4)}, "4 waves on a compute unit, wanted 8"),
        ({"loop": slow}, "matrix cycles"),
        ({"loop": fewer}, "multiply-adds in the main loop"),
    ):
        found = report.missed(replace(plain, **change))
        assert len(found) == 1 and word in found[0], (change, found)


def test_what_is_behind_is_said(plain):
    half = replace(plain.loop, least_matrix_cycles=plain.loop.least_matrix_cycles // 2)
    behind = report.behind(replace(plain, spilled=2, waves=(16, 4), loop=half))
    assert behind == ["spills 2", "waves 4 of 8", "matrix cycles 512 of 256"] and report.behind(plain) == []


def test_bounds_name_cells():
    cells = {cell for cell in gates.GATES if cell[1].startswith("gfx")}
    assert set(gates.FEWER_WAVES) <= cells and {arch for _, arch in cells} == set(gates.MATRIX_CYCLES)
    assert {f"{n}" for n in gates._CDNA_SPILLS} <= {name for name, _ in cells}


# ---------------------------------------------------------------- the command
def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(xattn.__file__).parents[1])}
    return subprocess.run([sys.executable, str(TOOL), *arguments], env=env, capture_output=True, text=True)


def test_the_report(amd_compiler):
    done = run("d64", "--arch", "gfx942,gfx950", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "not run on AMD hardware" in answer["note"] and answer["missed"] == {} and "clang" in answer["compilers"][0]
    first, second = answer["images"]
    assert (first["arch"], second["arch"]) == ("gfx942", "gfx950")
    assert first["loop"]["multiply_adds"] == first["expected"] == 64 * 64 * 128 // 4
    assert first["behind"] == [] and 0 < first["loop"]["busy"] <= 1
    done = run("d64", "--arch", "gfx942")
    assert done.returncode == 0 and "not run on AMD hardware" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  d64 ")]
    assert line.endswith(" ok") and f" {first['loop']['vector_cycles']} " in line


def test_nvidia_without_cycles():
    done = run("d256", "--arch", "sm_80", "--json")
    assert done.returncode == 0, done.stderr
    (image,) = json.loads(done.stdout)["images"]
    assert image["loop"] is None and image["units"]["matrix"] == image["expected"] // 2048 and image["registers"] <= 255


def test_a_set_of_hopper(tmp_path):
    """Images of a folder are read, not compiled."""
    specs = list(filter(has_products, shipped.load(ROOT / "ci" / "images.toml").specs("sm_90a")))
    for entry in ("arch/sm90/forward.cu", "arch/sm80/decode.cu", "arch/sm80/backward_keys.cu"):
        spec = next(s for s in specs if s.entry == entry)
        publish(nvrtc.library(12).build(spec), tmp_path)
        found = report.of_image("hopper", spec, Store(shipped=(), cache=tmp_path).find(spec))
        assert found.units["matrix"] > 0 and found.loop is None and 0 < found.shared <= 227 * 1024


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--arch", "gfx1100"), "--arch: got 'gfx1100'; allowed: gfx90a"),
        (("d63", "--arch", "sm_80"), "got 'd63'; allowed: d64"),
        (("d64", "--set", "--arch", "sm_80"), "allowed: none beside --set"),
        (("--store", "/nowhere", "--arch", "sm_80"), "--store: /nowhere is no folder"),
        (("--jobs", "0"), "argument --jobs"),
    ],
)
def test_wrong_usage(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2 and words in done.stderr and done.stdout == ""
