"""Runs a language model step by step, with attention by xattn over a paged cache, or eager; records who served it."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..compat.transformers import DecodeGraph, PagedCache, register
from ..compat.transformers_graph import Capture
from ..errors import UnsupportedError
from . import NotCaptured
from .model import LanguageModel

# How a step is captured, by the type of a device that has graphs; None: DecodeGraph's own way.
CAPTURES: dict[str, Capture | None] = {"cuda": None}

Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


@dataclass
class Served:
    """Calls of one plan."""

    plan: dispatch.Plan
    calls: int = 0

    def __str__(self) -> str:
        kind = "native" if self.plan.native else "fallback"
        return f"{self.plan.backend} ({', '.join([kind, *(f'{n} {v}' for n, v in self.plan.config)])})"


@dataclass
class Phase:
    """Prefill or decode: tokens that went in, how long it took, and which plans served the attention calls."""

    tokens: int = 0
    seconds: float = 0.0
    served: list[Served] = field(default_factory=list)


@dataclass
class Answer:
    """Greedy ``tokens``. For each, the two best logits: values and ids, both (tokens, 2)."""

    tokens: list[int]
    best: Tensor
    best_ids: Tensor
    prefill: Phase
    decode: Phase


@dataclass
class Runner:
    """A model, the backend to ask (None: the best), and the page size of its cache."""

    language_model: LanguageModel
    backend: str | None
    page_size: int

    @cached_property
    def cache_name(self) -> str:
        """The model's argument for a cache, which was renamed within transformers 5."""
        parameters = inspect.signature(self.language_model.model.forward).parameters
        return "cache" if "cache" in parameters else "past_key_values"

    def warm_up(self, prompt: Tensor) -> None:
        """What is done once in a process (allocation, compilation) is not to be measured."""
        self.generate(prompt, 3)

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        eager: bool = False,
        forced: list[int] | None = None,
        progress: Progress | None = None,
        graphs: bool = False,
    ) -> Answer:
        """The most likely continuation of ``prompt`` (1, tokens), up to a token that ends it.

        ``forced``: tokens to go on with instead of the most likely ones; their number is the number of steps.
        ``graphs``: all tokens behind the first come from a captured step; NotCaptured where it cannot be.
        """
        model = self.language_model.model
        register("xattn", backend=self.backend)
        model.set_attn_implementation("eager" if eager else "xattn")
        length = prompt.shape[1] + max_new_tokens
        cache = None if eager else PagedCache(model.config, -(-length // self.page_size), self.page_size)
        ends = self.language_model.end_tokens if forced is None else set()
        prefill, decode = Phase(), Phase()
        tokens: list[int] = []
        best: list[Any] = []
        steps = max_new_tokens if forced is None else len(forced)
        label, graph = "eager" if eager else "graphs" if graphs else "xattn", None
        with progress(label, steps) if progress else contextlib.nullcontext() as advance:
            given, phase = prompt, prefill
            while len(tokens) < steps:
                if graphs and graph is None and phase is decode:
                    assert isinstance(cache, PagedCache)
                    graph = DecodeGraph(model, cache, length, capture=CAPTURES[prompt.device.type])
                    with noted(decode):
                        _captured(graph)
                with _measured(phase, prompt.device):
                    if graph is None:
                        logits, cache = self._step(given, cache)
                    else:
                        logits = graph(given[0])[0]
                    best.append(logits.float().topk(2))
                    tokens.append(int(best[-1].indices[0]))
                phase.tokens += given.shape[1]
                if advance:
                    advance()
                if tokens[-1] in ends:
                    break
                following = tokens[-1] if forced is None else forced[len(tokens) - 1]
                given, phase = prompt.new_tensor([[following]]), decode
        values, ids = (torch.stack([getattr(b, n) for b in best]) for n in ("values", "indices"))
        return Answer(tokens, values, ids, prefill, decode)

    def _step(self, given: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """(logits of the last token (vocabulary,), cache)."""
        out = self.language_model.model(given, **{self.cache_name: cache}, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1], out[self.cache_name]


@contextlib.contextmanager
def _measured(phase: Phase, device: torch.device) -> Iterator[None]:
    """Adds the time to ``phase``, and the plans of all attention calls."""
    with noted(phase):
        wait(device)
        start = time.perf_counter()
        try:
            yield
            wait(device)
        finally:
            phase.seconds += time.perf_counter() - start


def _captured(graph: DecodeGraph) -> None:
    try:
        graph.capture()
    except (RuntimeError, UnsupportedError) as error:
        raise NotCaptured(next(iter(str(error).splitlines()), type(error).__name__)) from error


@contextlib.contextmanager
def noted(phase: Phase) -> Iterator[None]:
    """Adds the plans of all attention calls to ``phase``."""
    plan_of = dispatch.cached_plan

    def planned(*args: Any, **kwargs: Any) -> dispatch.Plan:
        plan = plan_of(*args, **kwargs)
        same = next((s for s in phase.served if str(s) == str(Served(plan))), None)
        if same is None:
            phase.served.append(same := Served(plan))
        same.calls += 1
        return plan

    dispatch.cached_plan = planned
    try:
        yield
    finally:
        dispatch.cached_plan = plan_of


def wait(device: torch.device) -> None:
    """For all that ``device`` has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
