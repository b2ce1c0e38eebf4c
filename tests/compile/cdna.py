"""What CDNA's compute unit can do at best: cycles of instructions, waves that fit, and the bound of a loop.

Nothing here was measured; not run on AMD hardware. Where the numbers come from:

- Matrix products: execution cycles of AMD's Matrix Instruction Calculator, 32 of 16x16x16 and 64 of 32x32x8 on CDNA2,
  16 and 32 on CDNA3, which are 1024 and 2048 FLOP a cycle on a compute unit of four SIMDs ("AMD matrix cores", AMD lab
  notes, says 1024 of MI250X too). It does not know CDNA4: gfx950's are LLVM's (SISchedule.td), 4096 FLOP with twice
  the k (16x16x32, 32x32x16), the older shapes as on gfx942; MI355X's published peak agrees. A test holds all of them
  to LLVM's model, whose unit is four cycles.
- A SIMD is 16 lanes wide ("Pipeline descriptions", AMD's ROCm Compute Profiler): an instruction over 64 takes 4 cycles.
  A transcendental one is taken for a quarter of that rate, as LLVM's model has its latency; AMD's documents at hand
  give no number. A matrix product holds the others up for 4 cycles (the calculator: "VALU co-execution cycles" are its
  execution cycles less 4).
- LDS: 32 banks of 4 bytes a cycle, 64 on gfx950, for the four SIMDs together (CDNA3 and CDNA4 ISA).
- Registers: 512 of a lane in units of 8, at most 8 waves on a SIMD (AMDGPU usage guide of LLVM).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from compile.machine_code import Instruction

SIMDS, LANES = 4, 64
_VECTOR, _TRANSCENDENTAL, _ISSUE = 4, 16, 4
_MOST_WAVES, _REGISTERS, _UNIT = 8, 512, 8


class Arch(NamedTuple):
    """``multiply_adds``: of 16-bit operands, in a cycle of one SIMD; ``lds``: bytes; ``banks``: of 4 bytes a cycle."""

    multiply_adds: int
    lds: int
    banks: int


ARCHS = {
    "gfx90a": Arch(128, 64 * 1024, 32),
    "gfx942": Arch(256, 64 * 1024, 32),
    "gfx950": Arch(512, 160 * 1024, 64),
}

# "v_mfma_f32_16x16x16_bf16", "v_mfma_f32_32x32x8f16", "v_mfma_f32_16x16x16bf16_1k"
_PRODUCT = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_?(b?f16)")


def products(name: str) -> int:
    """Multiply-adds of an instruction on 16-bit operands; 0 for others."""
    found = _PRODUCT.match(name)
    return int(found[1]) * int(found[2]) * int(found[3]) if found else 0


def matrix_cycles(name: str, arch: str) -> int:
    """Cycles that the matrix unit of a SIMD is busy with an instruction on 16-bit operands."""
    found = _PRODUCT.match(name)
    assert found, f"{name}: its cycles are not known"
    rows, k = int(found[1]), int(found[3])
    full = k * rows >= 512  # 16x16x32 and 32x32x16
    rate = ARCHS[arch].multiply_adds if full or arch != "gfx950" else ARCHS["gfx942"].multiply_adds
    return products(name) // rate


_TRANSCENDENTALS = tuple(f"v_{name}_" for name in ("exp", "log", "rcp", "rsq", "sqrt", "sin", "cos"))
_LDS_BYTES = (("b128", 16), ("b96", 12), ("b64", 8), ("2_b32", 8), ("2st64_b32", 8))


def lds_bytes(name: str) -> int:
    """Bytes a lane of an LDS instruction; at least a bank's 4."""
    size = next((n for word, n in _LDS_BYTES if word in name), 4)
    return 2 * size if re.search(r"(2|2st64)_b64", name) else size


def unit(name: str) -> str:
    """Whose work an instruction is: "matrix", "vector", "transcendental", "shared" (LDS), "memory" or "scalar"."""
    if name.startswith("v_mfma"):
        return "matrix"
    if name.startswith(_TRANSCENDENTALS):
        return "transcendental"
    if name.startswith(("global_", "buffer_", "flat_", "scratch_")):
        return "memory"
    return {"v": "vector", "ds": "shared"}.get(name.partition("_")[0], "scalar")


def value(block: Iterable[Instruction]) -> tuple[float, ...]:
    """What makes the usual step of the main loop: most products, then most copies, then the fewest vector cycles."""
    units = Counter(unit(i.name) for i in block)
    multiply_adds = sum(products(i.name) for i in block)
    return multiply_adds, units["memory"], -_vector_cycles(units)


def _vector_cycles(units: Counter[str]) -> int:
    return _VECTOR * units["vector"] + _TRANSCENDENTAL * units["transcendental"] + _ISSUE * units["matrix"]


@dataclass(frozen=True)
class Loop:
    """One step of a wave through the main loop: its multiply-adds, and the cycles of a SIMD that each unit is busy; the
    LDS with the steps of all four SIMDs."""

    multiply_adds: int
    matrix_cycles: int
    least_matrix_cycles: int  # the same products at the unit's peak rate
    vector_cycles: int
    lds_cycles: int
    num_products: int

    @property
    def cycles(self) -> int:
        """The bound: the busiest unit, the others behind it."""
        return max(self.matrix_cycles, self.vector_cycles, self.lds_cycles)

    @property
    def bound(self) -> str:
        """The unit that is the bound."""
        units = {"matrix": self.matrix_cycles, "vector": self.vector_cycles, "LDS": self.lds_cycles}
        return max(units, key=lambda name: units[name])

    @property
    def busy(self) -> float:
        """The share of the loop that the matrix unit is busy, at best."""
        return self.matrix_cycles / self.cycles

    @property
    def busy_in_turn(self) -> float:
        """The same where no vector instruction runs beside a matrix product, as in a single wave without interleaving;
        LDS still at best."""
        in_turn = self.matrix_cycles + self.vector_cycles - _ISSUE * self.num_products
        return self.matrix_cycles / max(in_turn, self.lds_cycles)

    @property
    def of_peak(self) -> float:
        """The share of the device's peak rate that the loop reaches, at best."""
        return self.least_matrix_cycles / self.cycles


def loop(step: Counter[str], arch: str) -> Loop:
    """The loop of which ``step`` holds the instructions of one step, by name and number."""
    units: Counter[str] = Counter()
    for name, times in step.items():
        units[unit(name)] += times
    multiply_adds = sum(times * products(name) for name, times in step.items())
    lane_bytes = sum(times * lds_bytes(name) for name, times in step.items() if unit(name) == "shared")
    return Loop(
        multiply_adds=multiply_adds,
        matrix_cycles=sum(n * matrix_cycles(name, arch) for name, n in step.items() if unit(name) == "matrix"),
        least_matrix_cycles=multiply_adds // ARCHS[arch].multiply_adds,
        vector_cycles=_vector_cycles(units),
        lds_cycles=SIMDS * LANES * lane_bytes // (4 * ARCHS[arch].banks),
        num_products=units["matrix"],
    )


def waves(arch: str, registers: int, lds: int, num_warps: int) -> tuple[int, int]:
    """Waves on a compute unit that registers admit, and that LDS does, with thread blocks of ``num_warps`` waves and
    ``lds`` bytes. ``registers``: vector and accumulation registers of a lane together."""
    used = max(_UNIT, -(-registers // _UNIT) * _UNIT)
    blocks = ARCHS[arch].lds // max(1, lds)
    return SIMDS * min(_MOST_WAVES, _REGISTERS // used), min(SIMDS * _MOST_WAVES, blocks * num_warps)
