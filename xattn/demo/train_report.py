"""What the demo prints of trainings, or gives as data for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import Report

if TYPE_CHECKING:
    from .curves import Agreement
    from .train import Run, Settings


class TrainReport(Report):
    """A report of two trainings."""

    def settings(self, s: Settings, text: str, tokens: int) -> None:
        dtype = str(s.dtype).removeprefix("torch.")
        self.data["settings"] = {
            "steps": s.steps,
            "batch_size": s.batch_size,
            "seqlen": s.seqlen,
            "learning_rate": s.learning_rate,
            "dtype": dtype,
            "text": {"name": text, "tokens": tokens},
        }
        batches = f"{s.steps} steps of {s.batch_size} x {s.seqlen} of {tokens} tokens"
        self._say("train", f"on {text}: {batches}, learning rate {s.learning_rate:g}, in {dtype}")

    def run(self, name: str, run: Run, tokens_per_step: int) -> None:
        rate = run.steps_per_second
        peak = {} if run.peak_bytes is None else {"peak_bytes": run.peak_bytes}
        self.data[name] = {
            "losses": _finite(run.losses),
            "gradient_norms": _finite(run.norms),
            "gradient_errors": dict(zip(run.errors, _finite(run.errors.values()), strict=True)),
            "seconds": run.seconds,
            "steps_per_second": rate,
            "tokens_per_second": rate * tokens_per_step,
            "kept_for_backward_bytes": run.kept_bytes,
            **peak,
        }
        speed = f"{rate:.2f} steps/s, {rate * tokens_per_step:.1f} tokens/s"
        memory = f"{run.kept_bytes / 2**20:.1f} MiB kept for the backward"
        most = "" if run.peak_bytes is None else f", {run.peak_bytes / 2**20:.1f} MiB at most"
        self._say(name, f"loss {run.losses[0]:.4f} to {run.losses[-1]:.4f}, {speed}, {memory}{most}")

    def served(self, run: Run) -> None:
        """Who answered the attention calls of a run through xattn."""
        for name, phase in (("forward", run.forward), ("backward", run.backward)):
            self.data["xattn"][name] = {"plans": [s.plan.as_dict() | {"calls": s.calls} for s in phase.served]}
            self._say(name, "served by " + ", ".join(f"{s}, {s.calls} calls" for s in phase.served))
        self.fallbacks(run.forward, run.backward)

    def agreement(self, a: Agreement) -> None:
        data = a.as_dict()
        self.data["check"] = data | dict(zip(("farthest", "error"), _finite((a.farthest, a.error)), strict=True))
        losses = f"losses of {a.steps} steps within {a.farthest:.2g} of eager attention's (allowed: {a.tolerance:g})"
        if math.isinf(a.farthest):
            losses = f"a loss of step {a.where + 1} is no finite number"
        elif not a.losses_agree:
            losses += f", farthest at step {a.where + 1}"
        gradients = f"gradients of step 1 off by {a.error:.2g} (allowed: {a.allowed:.2g}) for {a.worst}"
        self._say("check", f"{'' if a.passed else 'FAILED: '}{losses}; {gradients}")

    def drawn(self, file: Path) -> None:
        self.data["drawn"] = str(file)
        self._say("drawn", str(file))

    def title(self) -> str:
        """Of the picture."""
        model, device, s = self.data["model"], self.data["device"], self.data["settings"]
        plans: list[dict[str, Any]] = self.data["xattn"]["backward"]["plans"]
        backends = ", ".join(dict.fromkeys(str(p["backend"]) for p in plans))
        batch = f"{s['batch_size']} x {s['seqlen']} tokens a step, {s['dtype']}"
        return f"{model['name']} on {device['name']}\n{batch}; xattn: backward by {backends}"


def _finite(numbers: Iterable[float]) -> list[float | None]:
    """For JSON, which has no others: None in their place."""
    return [x if math.isfinite(x) else None for x in numbers]
