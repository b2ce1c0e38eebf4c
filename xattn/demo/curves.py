"""Whether two trainings agree, and a picture of both."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .train import Run

# How far losses of the same step may be apart, relative to eager's.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Gradients may be off by this many times eager's error, and by this much more.
TIMES = 2.0
MORE = 1e-6


@dataclass
class Agreement:
    """Of ``steps`` losses the ``farthest`` apart, relative to eager's, at step ``where`` (from 0); ``tolerance`` is
    allowed. ``worst``: the kind of weight whose gradient is off by the most ``times`` of what is ``allowed`` for it.
    """

    steps: int
    farthest: float
    where: int
    tolerance: float
    worst: str
    error: float
    allowed: float

    @property
    def losses_agree(self) -> bool:
        return self.farthest <= self.tolerance

    @property
    def gradients_agree(self) -> bool:
        return self.error <= self.allowed

    @property
    def passed(self) -> bool:
        return self.losses_agree and self.gradients_agree

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        agree = {"losses_agree": self.losses_agree, "gradients_agree": self.gradients_agree, "passed": self.passed}
        return asdict(self) | agree


def compare(ours: Run, eager: Run, dtype: torch.dtype) -> Agreement:
    """What is not a number agrees with nothing."""
    apart = [_number(abs(a - b) / max(abs(b), 1e-12)) for a, b in zip(ours.losses, eager.losses, strict=True)]
    where = max(range(len(apart)), key=lambda i: apart[i])
    allowed = {kind: TIMES * _number(error, 0.0) + MORE for kind, error in eager.errors.items()}
    worst = max(allowed, key=lambda kind: _number(ours.errors[kind]) / allowed[kind])
    error = _number(ours.errors[worst])
    return Agreement(len(apart), apart[where], where, TOLERANCES[dtype], worst, error, allowed[worst])


def _number(x: float, otherwise: float = math.inf) -> float:
    return x if math.isfinite(x) else otherwise


def draw(file: Path, title: str, ours: Run, eager: Run, agreement: Agreement) -> None:
    """Writes a PNG: both losses over the steps, and how far they are apart below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, apart = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, agreement.steps + 1)
    losses.plot(steps, eager.losses, color="#e69f00", linewidth=5, alpha=0.6, label=_legend("eager", eager))
    losses.plot(steps, ours.losses, color="#0072b2", marker="o", markersize=4, label=_legend("xattn", ours))
    losses.set_title(title, fontsize="medium")
    losses.set_ylabel("loss")
    losses.legend()
    between = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours.losses, eager.losses, strict=True)]
    apart.plot(steps, between, color="#0072b2", marker="o", markersize=4)
    apart.axhline(agreement.tolerance, color="#d55e00", linestyle="--", label=f"allowed: {agreement.tolerance:g}")
    apart.set_yscale("symlog", linthresh=1e-8)
    apart.set_ylim(0, 10 * agreement.tolerance)
    apart.set_ylabel("|difference| / loss")
    apart.set_xlabel("step")
    apart.xaxis.set_major_locator(MaxNLocator(integer=True))
    apart.legend(loc="center right")
    for axes in (losses, apart):
        axes.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_png(file)


def _legend(name: str, run: Run) -> str:
    return f"{name}: {run.steps_per_second:.2f} steps/s, {run.kept_bytes / 2**20:.0f} MiB kept for the backward"
