"""Times of calls beside each other: in random order, as a slow neighbour cools or warms the device for the next."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

_FLUSHED_BYTES = 256 << 20  # more than any L2 cache holds
_REPEATS = 10


def medians(calls: Mapping[str, Callable[[], Any]], place: torch.device, rounds: int) -> dict[str, float]:
    """Microseconds of one call of each. On a GPU each is replayed from a graph, where it can be captured, behind a
    flush of the L2 cache; on a CPU it is called."""
    if place.type == "cuda":
        with torch.cuda.device(place):
            return _medians({name: _graphed(call) for name, call in calls.items()}, _on_gpu(place), rounds)
    return _medians(calls, _on_cpu, rounds)


def _medians(calls: Mapping[str, Callable[[], Any]], measure: Callable[..., float], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in random.sample(list(calls.items()), len(calls)):
            times[name].append(measure(call))
    return {name: statistics.median(found) for name, found in times.items()}


def _on_cpu(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _on_gpu(place: torch.device) -> Callable[[Callable[[], Any]], float]:
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=place)

    def measure(call: Callable[[], Any]) -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS)]
        for before, after in events:
            flushed.zero_()
            before.record()
            call()
            after.record()
        torch.cuda.synchronize()
        return statistics.median(before.elapsed_time(after) for before, after in events) * 1e3

    return measure


def _graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """Replays the call from a graph; the call itself where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return graph.replay
