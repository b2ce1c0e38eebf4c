"""Which native backends and launchers the tests of this folder run on, and steps in graphs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import cases
import torch

from xattn import launch_library
from xattn.backends import REGISTRY

CUDA = torch.device("cuda")
TARGETS = [t for t in cases.targets() if t.device == "cuda" and next(b for b in REGISTRY if b.name == t.backend).native]
BACKENDS = [t.backend for t in TARGETS] or ["sm80"]  # without a GPU all of this is skipped
LAUNCHERS = [
    *(["library"] if launch_library.find() else []),
    *(["bindings"] if importlib.util.find_spec("cuda") or importlib.util.find_spec("hip") else []),
]


def captured(step: Callable[[], Any]) -> tuple[Any, Any]:
    """(graph, what its step gave)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


def replays_with(call: Callable[[], torch.Tensor], change: Callable[[], Any]) -> None:
    """A graph of the call gives what the call gives, also after a change of what it reads, which changes it."""
    before = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    assert torch.equal(out, before)
    change()
    graph.replay()
    assert torch.equal(out, call()) and not torch.equal(out, before)
