"""DecodeGraph: the forward pass of one token, captured once in a graph of the device and replayed for each token that
follows, so that nothing of the model's Python runs between them. Use it through compat.transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .transformers_cache import PagedCache

# Of a function and the device of its work: what replays that work, and what the function returned.
Capture = Callable[[Callable[[], Tensor], torch.device], tuple[Callable[[], None], Tensor]]


class DecodeGraph:
    """Steps of one token of every sequence in a ``PagedCache`` that holds their prompts:

        cache = PagedCache(model.config, num_pages)
        logits = model(prompt, past_key_values=cache).logits        # as without graphs
        graph = DecodeGraph(model, cache, max_length=2048)
        while ...:
            logits = graph(tokens)

    The model, its weights and its attention implementation stay as they are from the capture on. Between steps the
    cache may be cropped or its rows reordered; where the batch changes, the next step is captured anew. Models that
    read values of the device in their forward pass cannot be captured: RuntimeError, from torch.

    Args:
        model: in eval mode, switched to ``attn_implementation="xattn"``.
        cache: after a forward pass; without padding, which is UnsupportedError.
        max_length: tokens of the longest sequence that there will be; ValueError beyond.
        capture: see ``Capture``; default: a CUDA graph (ROCm's on AMD).
    """

    def __init__(self, model: Any, cache: PagedCache, max_length: int, capture: Capture | None = None):
        self._model, self._cache, self._max_length = model, cache, max_length
        self._capture = _cuda_graph if capture is None else capture
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._shown: tuple[Any, ...] = ()  # what the graph was captured with

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (batch, vocabulary) behind ``tokens`` (batch,), one more token of each sequence; the next call writes
        over them."""
        self.capture()
        if tokens.shape != self._tokens.shape[:1]:
            raise ValueError(f"tokens: got shape {tuple(tokens.shape)}; allowed: ({self._tokens.shape[0]},)")
        self._tokens.copy_(tokens[:, None])
        self._replay()
        self._cache.replayed()
        return self._logits[:, -1]

    @torch.no_grad()
    def capture(self) -> None:
        """Gets the next step ready, and captures it where it has not been: the first call else does."""
        held = self._cache.get_seq_length()
        if held >= self._max_length:
            raise ValueError(f"max_length: got {self._max_length}; allowed: above the {held} tokens that there are")
        shown = self._cache.stage(self._max_length)
        if shown != self._shown:
            device, batch = self._cache.device, self._cache.batch_size
            self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self._positions = torch.full((batch, 1), held, device=device)
            self._replay, self._logits = self._capture(self._forward, device)
            self._shown = shown
            self._cache.captured()
        self._positions.fill_(held)

    def _forward(self) -> Tensor:
        given = {self._cache_name: self._cache, "position_ids": self._positions}
        return self._model(self._tokens, **given, use_cache=True, logits_to_keep=1).logits


def _cuda_graph(forward: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    if device.type != "cuda":
        raise UnsupportedError(f"capture: got a model on {device}; allowed: a GPU, which has graphs")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        logits = forward()
    return graph.replay, logits
