"""What an image uses and what its main loop costs, and whether the gates hold: rows of ci/isa_report, checks of CI."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from compile import cdna, gates, machine_code, resources
from compile.expected import of_config

from xattn.images import Image, ImageSpec

_NVIDIA_UNITS = (
    ("matrix", ("HMMA", "HGMMA", "QGMMA", "IGMMA")),
    ("transcendental", ("MUFU",)),
    ("shared", ("LDSM", "LDS", "STSM", "STS", "ATOMS")),
    ("memory", ("LDGSTS", "LDGDEPBAR", "LDG", "STG", "LDL", "STL", "ATOM", "RED", "UTMALDG", "UBLKCP")),
    ("scalar", ("U", "R2UR", "S2", "BRA", "BAR", "BS", "DEPBAR", "WARP", "NOP", "EXIT", "CALL", "RET", "SYNCS")),
)


@dataclass(frozen=True)
class Report:
    """Of one image. ``registers``: of a lane, accumulation registers included; ``scratch``: bytes of local memory a
    lane; ``shared``: bytes of a thread block; ``waves``: on a compute unit, those that registers and shared memory
    admit (AMD); ``units``: instructions of a step of the main loop by unit; ``expected``: its multiply-adds by
    arithmetic."""

    name: str
    arch: str
    image: str
    registers: int
    accumulation: int
    spilled: int
    scratch: int
    shared: int
    instructions: int
    units: dict[str, int]
    expected: int
    waves: tuple[int, int] | None = None
    loop: cdna.Loop | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with what follows from the numbers."""
        found = asdict(self)
        if self.loop:
            names = ("cycles", "bound", "busy", "busy_in_turn", "of_peak")
            found["loop"] |= {name: getattr(self.loop, name) for name in names}
        if (self.name, self.arch) in gates.GATES and self.loop:
            found |= {"missed": missed(self), "behind": behind(self)}
        return found


def of_image(name: str, spec: ImageSpec, image: Image) -> Report:
    amd = image.kind == "hsaco"
    used = (resources.of_amd if amd else resources.of_nvidia)(image)
    expected = of_config(spec, cdna.LANES)
    num_warps = expected["threads"] // cdna.LANES
    shared = expected["shared"] + used.shared
    unit = cdna.unit if amd else _nvidia_unit
    step = machine_code.main_step(used.code, cdna.value if amd else _nvidia_value)
    units: Counter[str] = Counter()
    for instruction, times in step.items():
        units[unit(instruction)] += times
    return Report(
        name=name,
        arch=spec.arch,
        image=image.words(),
        registers=used.registers,
        accumulation=used.accumulation,
        spilled=used.spilled,
        scratch=used.stack,
        shared=shared,
        instructions=len(used.code),
        units=dict(units),
        expected=4096 * expected["products"],
        waves=cdna.waves(spec.arch, used.registers, shared, num_warps) if amd else None,
        loop=cdna.loop(step, spec.arch) if amd else None,
    )


def _nvidia_unit(name: str) -> str:
    return next((unit for unit, starts in _NVIDIA_UNITS if name.startswith(starts)), "vector")


def _nvidia_value(block: Any) -> tuple[float, ...]:
    units = Counter(_nvidia_unit(i.name) for i in block)
    return units["matrix"], units["memory"], -units["vector"]


# ---------------------------------------------------------------- gates of AMD's images
def missed(report: Report) -> list[str]:
    """The gates that an image of gates.GATES does not hold, in words."""
    gate, loop, arch = gates.GATES[report.name, report.arch], report.loop, cdna.ARCHS[report.arch]
    assert loop is not None and report.waves is not None
    most_cycles = gates.MATRIX_CYCLES[report.arch] * loop.least_matrix_cycles
    bounds = (
        ("registers", report.registers, gate.registers),
        ("spilled registers", report.spilled, gate.spilled),
        ("bytes of scratch", report.scratch, 0),
        ("bytes of LDS", report.shared, arch.lds),
        ("matrix cycles", loop.matrix_cycles, most_cycles),
    )
    found = [f"{got} {what}, allowed {most}" for what, got, most in bounds if got > most]
    if loop.multiply_adds != report.expected:
        found.append(f"{loop.multiply_adds} multiply-adds in the main loop, its tile has {report.expected}")
    least = gates.FEWER_WAVES.get((report.name, report.arch), gates.WAVES)
    if min(report.waves) < least:
        found.append(f"{min(report.waves)} waves on a compute unit, wanted {least}")
    return found


def behind(report: Report) -> list[str]:
    """Where a gate holds what is there today, and not yet what is wanted, in words."""
    loop = report.loop
    assert loop is not None and report.waves is not None
    found = []
    if report.spilled:
        found.append(f"spills {report.spilled}")
    if min(report.waves) < gates.WAVES:
        found.append(f"waves {min(report.waves)} of {gates.WAVES}")
    if loop.matrix_cycles > loop.least_matrix_cycles:
        found.append(f"matrix cycles {loop.matrix_cycles} of {loop.least_matrix_cycles}")
    return found
