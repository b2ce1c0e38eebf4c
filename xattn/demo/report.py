"""What the demo prints: text and a progress bar, or the same as data for JSON."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .check import Verdict
    from .model import LanguageModel
    from .steps import Answer, Phase

_BAR = 40


class Report:
    """Prints as it goes, and keeps everything in ``data``. ``quiet``: prints nothing."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.data: dict[str, Any] = {"notes": []}

    def note(self, text: str) -> None:
        self.data["notes"].append(text)
        self._say("note", text)

    def device(self, device: torch.device) -> None:
        from ..device import of

        found = of(device)
        self.data["device"] = {"torch": str(device), "vendor": found.vendor, "arch": found.arch, "name": found.name}
        self._say("device", str(found))

    def model(self, m: LanguageModel) -> None:
        config = m.model.config.get_text_config(decoder=True)
        dtype, parameters = str(m.model.dtype).removeprefix("torch."), m.model.num_parameters()
        self.data["model"] = {"name": m.name, "dtype": dtype, "parameters": parameters, "load_seconds": m.seconds}
        heads = f"{config.num_attention_heads} query heads, {config.num_key_value_heads} kv heads"
        size = f"{config.num_hidden_layers} layers, {heads}, {parameters / 1e6:.1f} M parameters"
        self._say("model", f"{m.name}: {size}, {dtype}; loaded in {m.seconds:.1f} s")

    def prompt(self, text: str, tokens: int) -> None:
        self.data["prompt"] = {"text": text, "tokens": tokens}
        self._say("prompt", text)

    def answer(self, text: str) -> None:
        self.data["answer"] = text
        self._say("answer", text)

    def steps(self, answer: Answer) -> None:
        for name, phase in (("prefill", answer.prefill), ("decode", answer.decode)):
            self.data[name] = self._phase(name, phase)
        self.fallbacks(answer.prefill, answer.decode)

    def fallbacks(self, *phases: Phase) -> None:
        """Says why, where a fallback answered on a GPU."""
        fallbacks = [s.plan for p in phases for s in p.served if not s.plan.native]
        told = next((plan for plan in fallbacks if plan.device.vendor != "cpu"), None)
        if told is not None:
            reasons = "; ".join(f"{name}: {refusal}" for name, refusals in told.rejected for refusal in refusals)
            self.note(f"no native kernel answered on this GPU ({reasons})")

    def eager(self, answer: Answer) -> None:
        phases = {"prefill": answer.prefill, "decode": answer.decode}
        rates = {name: p.tokens / p.seconds for name, p in phases.items() if p.seconds}
        self.data["eager"] = {"tokens_per_second": rates}
        self._say("eager", "for comparison: " + ", ".join(f"{n} {rate:.1f} tokens/s" for n, rate in rates.items()))

    def graphs(self, answer: Answer, without: Phase, v: Verdict) -> None:
        """Decoding with a captured step beside decoding ``without``, and whether it chose the same tokens."""
        data = self._phase("graphs", answer.decode)
        rate = without.tokens / without.seconds if without.seconds else 0.0
        data["times_without"] = data["tokens_per_second"] / rate if rate else 0.0
        data["check"] = asdict(v) | {"passed": v.passed}
        self.data["graphs"] = data
        text = f"{v.agreeing} of {v.total} tokens the same"
        text = text if v.passed else f"FAILED: {text}, the first wrong one is number {v.where}"
        self._say("graphs", f"{data['times_without']:.2f} times the tokens/s of decode without graphs; {text}")

    def _phase(self, name: str, phase: Phase) -> dict[str, Any]:
        rate = phase.tokens / phase.seconds if phase.seconds else 0.0
        served = ", ".join(f"{s}, {s.calls} calls" for s in phase.served)
        if phase.tokens:
            self._say(name, f"{phase.tokens} tokens in {phase.seconds:.3f} s, {rate:.1f} tokens/s, served by {served}")
        plans = [s.plan.as_dict() | {"calls": s.calls} for s in phase.served]
        return {"tokens": phase.tokens, "seconds": phase.seconds, "tokens_per_second": rate, "plans": plans}

    def verdict(self, v: Verdict) -> None:
        self.data["check"] = asdict(v) | {"passed": v.passed}
        text = f"{v.agreeing} of {v.total} tokens equal to eager attention ({v.method})"
        if v.tolerance is not None:
            text += f"; {v.close} more where eager's two best logits are closer than {v.tolerance:.3g}"
        self._say("check", text if v.passed else f"FAILED: {text}; the first wrong one is number {v.where}")

    def _say(self, label: str, text: str) -> None:
        if not self.quiet:
            print(f"{label:<8} {text}", flush=True)

    # ---------------------------------------------------------------- progress
    @contextlib.contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar of ``total`` steps; what it gives is called after each."""
        if self.quiet:
            yield lambda: None
            return
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            drawn = False
        else:
            drawn = sys.stdout.isatty()
        if not drawn:
            with _plain(label, total) as advance:
                yield advance
            return
        columns = (TextColumn("{task.description:<8}"), BarColumn(_BAR), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns) as bars:
            task = bars.add_task(label, total=total)
            yield lambda: bars.advance(task)
            bars.update(task, total=bars.tasks[0].completed)  # an answer may end early


@contextlib.contextmanager
def _plain(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar that only ever appends, so that it reads well in a log too."""
    done = drawn = 0

    def advance() -> None:
        nonlocal done, drawn
        done += 1
        more = done * _BAR // total - drawn
        drawn += more
        print("#" * more, end="", flush=True)

    print(f"{label:<8} [", end="", flush=True)
    try:
        yield advance
    finally:
        print("." * (_BAR - drawn) + f"] {done} of {total}", flush=True)
