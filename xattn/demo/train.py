"""Fine-tunes a language model with attention by xattn or eager, from the same weights, with the same batches.

The first step of a run is the careful one: it counts what is kept for the backward and compares the gradients with
exact ones. Steps per second are those of the others.
"""

from __future__ import annotations

import contextlib
import copy
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat.transformers import register
from ..device import of
from . import DemoError
from .model import LanguageModel
from .steps import Phase, Progress, noted, wait

TEXT = "attention.txt"
SEED = 0
_CLIP = 1.0  # the largest norm of the gradient that is not scaled down

# Of each kind of weight, over all layers: what a name is without the layer's number.
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """``batch_size`` sequences of ``seqlen`` tokens a step; the model is computed in ``dtype`` from float32 weights."""

    steps: int
    batch_size: int
    seqlen: int
    learning_rate: float
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch_size * self.seqlen

    @property
    def wider(self) -> torch.dtype:
        """What the gradients of ``dtype`` are compared with."""
        return torch.float64 if self.dtype == torch.float32 else torch.float32


@dataclass
class Run:
    """One training: for each step the loss, the norm of the gradient and the seconds.

    ``errors``: of the first step's gradients, relative to the exact ones' norm, for each kind of weight.
    ``kept_bytes``: what the first step kept for its backward beside the weights. ``peak_bytes``: the most that torch
    had allocated on a GPU; None elsewhere.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    forward: Phase = field(default_factory=Phase)
    backward: Phase = field(default_factory=Phase)
    errors: dict[str, float] = field(default_factory=dict)
    kept_bytes: int = 0
    peak_bytes: int | None = None

    @property
    def steps_per_second(self) -> float:
        """Of all steps but the first; of that where it is the only one."""
        timed = self.seconds[1:] or self.seconds
        return len(timed) / sum(timed)


def read_text() -> str:
    return files(__package__).joinpath(TEXT).read_text(encoding="utf-8")


class Trainer:
    """Runs the trainings of one model, each from the weights that it has now."""

    def __init__(self, language_model: LanguageModel, text: str, settings: Settings, backend: str | None):
        self.model, self.settings, self.backend = language_model.model, settings, backend
        self.device = self.model.device
        self.tokens = language_model.tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
        self._check()
        self.weights = {name: w.detach().clone() for name, w in self.model.state_dict().items()}
        self.exact: Gradients = {}

    def _check(self) -> None:
        """DemoError where the text, the model or the memory is too small for what is asked."""
        s, config = self.settings, self.model.config.get_text_config(decoder=True)
        longest = len(self.tokens) - 1  # the last token is only ever predicted
        known = getattr(config, "max_position_embeddings", None) or longest
        for most, of_what in ((longest, "of the text"), (known, "that the model has positions for")):
            if s.seqlen > most:
                raise DemoError(f"--seqlen: got {s.seqlen}; allowed: at most the {most} tokens {of_what}")
        logits, memory = 4 * s.tokens * config.vocab_size, of(self.device).memory
        if memory and logits > memory:
            need, has = (f"{n / 2**30:.1f} GiB" for n in (logits, memory))
            raise DemoError(
                f"--batch-size, --seqlen: got a batch whose logits need {need}; allowed: what fits in {has}"
            )

    # ---------------------------------------------------------------- the runs
    def compute_exact(self, progress: Progress) -> None:
        """The gradients of the first step with eager attention in the next wider dtype."""
        self._restore()
        self.model.set_attn_implementation("eager")
        wider = copy.deepcopy(self.model).to(self.settings.wider)
        with progress("exact", 1) as advance:
            self._loss(wider, *next(self._batches())).backward()
            advance()
        self.exact = {name: w.grad.cpu() for name, w in wider.named_parameters() if w.grad is not None}

    def run(self, eager: bool, progress: Progress) -> Run:
        """A training; the weights are as before when it is done."""
        register("xattn", backend=self.backend)
        self._restore()
        self.model.set_attn_implementation("eager" if eager else "xattn")
        weights = list(self.model.parameters())
        optimizer = torch.optim.AdamW(weights, lr=self.settings.learning_rate, fused=True)
        found, batches = Run(), self._batches()
        torch.manual_seed(SEED)
        _forget_peak(self.device)
        with progress("eager" if eager else "xattn", self.settings.steps) as advance:
            for step in range(self.settings.steps):
                wait(self.device)
                start = time.perf_counter()
                optimizer.zero_grad(set_to_none=False)
                with noted(found.forward), _counted(found, weights) if step == 0 else contextlib.nullcontext():
                    loss = self._loss(self.model, *next(batches))
                with noted(found.backward):
                    loss.backward()
                    wait(self.device)
                aside = time.perf_counter()
                if step == 0:
                    found.errors = self._errors()
                aside = time.perf_counter() - aside
                norm = torch.nn.utils.clip_grad_norm_(weights, _CLIP)
                optimizer.step()
                found.losses.append(float(loss.detach()))
                found.norms.append(float(norm))
                wait(self.device)
                found.seconds.append(time.perf_counter() - start - aside)
                advance()
                if not (eager or found.forward.served):
                    raise DemoError(
                        f"{type(self.model).__name__} called no attention of xattn, so there is none to train"
                    )
        found.peak_bytes = _peak(self.device)
        del optimizer
        self._restore()
        return found

    def _restore(self) -> None:
        self.model.load_state_dict(self.weights)
        self.model.zero_grad(set_to_none=True)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and those that follow them, both (batch_size, seqlen), from places drawn anew for each batch."""
        s, generator = self.settings, torch.Generator().manual_seed(SEED)
        while True:
            starts = torch.randint(len(self.tokens) - s.seqlen, (s.batch_size, 1), generator=generator)
            drawn = self.tokens[starts + torch.arange(s.seqlen + 1)].to(self.device)
            yield drawn[:, :-1], drawn[:, 1:]

    def _loss(self, model: Any, tokens: Tensor, following: Tensor) -> Tensor:
        low = model is self.model and self.settings.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.settings.dtype) if low else contextlib.nullcontext():
            logits = model(tokens, use_cache=False).logits
        logits = logits.flatten(0, 1)
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), following.flatten())

    def _errors(self) -> dict[str, float]:
        """|gradient - exact| / |exact| for each kind of weight."""
        squares: dict[str, list[float]] = {}
        for name, w in self.model.named_parameters():
            exact = self.exact.get(name)
            if exact is None:
                continue
            got = torch.zeros_like(exact) if w.grad is None else w.grad.to(exact)
            sums = squares.setdefault(re.sub(r"\.\d+\.", ".*.", name), [0.0, 0.0])
            sums[0] += float((got - exact).double().square().sum())
            sums[1] += float(exact.double().square().sum())
        return {kind: (off / size) ** 0.5 if size else off**0.5 for kind, (off, size) in squares.items()}


# ---------------------------------------------------------------- memory
def is_out_of_memory(error: RuntimeError) -> bool:
    """Also of a CPU, where torch has no class of errors for it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextlib.contextmanager
def _counted(run: Run, weights: list[Tensor]) -> Iterator[None]:
    """Counts the bytes of all storages that are kept for the backward meanwhile, those of ``weights`` left out."""
    own = {w.untyped_storage().data_ptr() for w in weights}
    kept: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        yield
    run.kept_bytes = sum(kept.values())


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
