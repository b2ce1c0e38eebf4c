"""Processes that are the ranks of a gloo group on the CPU, and what tests let each of them do.

They live as long as their tests, since starting them takes seconds; a job that takes too long ends them.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 60.0  # seconds for a job


class Ranks:
    """``world`` processes. ``run(job, *args)`` calls ``job(rank, world, *args)`` in each, and gives the list of what
    they return; ``failures`` that of what they raise, as (class name, text)."""

    def __init__(self, world: int):
        self.world = world
        self.processes: list[Any] = []
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.meeting = tempfile.TemporaryDirectory()
        pairs = [context.Pipe() for _ in range(self.world)]
        self.pipes = [ours for ours, _ in pairs]
        address = f"file://{self.meeting.name}/store"
        self.processes = [
            context.Process(target=_serve, args=(rank, self.world, address, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []
        self.meeting.cleanup()

    def answers(self, job: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[tuple[str, Any]]:
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((job, args))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(limit):
                self.stop()
                raise TimeoutError(f"rank {rank} did not end {job.__name__} within {limit} s")
            answers.append(pipe.recv())
        return answers

    def run(self, job: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
        answers = self.answers(job, *args, limit=limit)
        for rank, (kind, content) in enumerate(answers):
            if kind != "done":
                raise AssertionError(f"rank {rank} of {self.world}: {content[2]}")
        return [content for _, content in answers]

    def failures(self, job: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
        return [content[:2] if kind == "raised" else ("", "") for kind, content in self.answers(job, *args)]


def _serve(rank: int, world: int, address: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=LIMIT / 2)
    )
    with contextlib.suppress(EOFError):
        while True:
            job, args = pipe.recv()
            try:
                pipe.send(("done", job(rank, world, *args)))
            except Exception as error:
                pipe.send(("raised", (type(error).__name__, str(error), traceback.format_exc())))


def shard(x: torch.Tensor, rank: int, world: int, sharding: str = "zigzag", dim: int = 1) -> torch.Tensor:
    """By the definition: of twice as many parts as ranks the rank-th and the one as far from the end."""
    if sharding == "contiguous":
        return x.chunk(world, dim)[rank]
    parts = x.chunk(2 * world, dim)
    return torch.cat([parts[rank], parts[-1 - rank]], dim)


def unshard(shards: list[torch.Tensor], sharding: str = "zigzag", dim: int = 1) -> torch.Tensor:
    if sharding == "contiguous":
        return torch.cat(shards, dim)
    halves = [s.chunk(2, dim) for s in shards]
    return torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))], dim)


# ---------------------------------------------------------------- jobs
def nothing(rank: int, world: int) -> None:
    """Once it has run, everything is imported."""
    import xattn  # noqa: F401


def attend(rank: int, world: int, tensors: dict, options: dict, wants: tuple, how: dict, mods: tuple = ()) -> dict:
    """context_parallel of whole tensors: this rank's out, lse and gradients of out.sin().sum() + lse.cos().sum().

    ``mods``: names of the user functions in MODS that are given; each captures tensors[name]."""
    import xattn

    sharding = how.get("sharding", "zigzag")
    local = {n: shard(t, rank, world, sharding) if n in ("q", "k", "v") else t for n, t in tensors.items()}
    local = {n: t.clone().requires_grad_(n in wants) for n, t in local.items()}
    functions = {n: MODS[n](local[n]) for n in mods}
    q, k, v = (local[n] for n in "qkv")
    rest = {n: t for n, t in local.items() if n not in ("q", "k", "v", *mods)}
    result = xattn.context_parallel(q, k, v, **how, **rest, **options, **functions)
    out, lse = result if options.get("return_lse") else (result, None)
    loss = out.sin().sum()
    if lse is not None:
        loss = loss + torch.where(lse.isfinite(), lse, 0).cos().sum()
    grads = torch.autograd.grad(loss, [local[n] for n in wants]) if wants else ()
    found = {"out": out.detach()} | dict(zip(wants, grads, strict=True))
    return found if lse is None else found | {"lse": lse.detach()}


MODS = {
    "score_mod": lambda t: lambda s, b, h, q_idx, kv_idx: s + t[h] * (q_idx - 2 * kv_idx),
    "mask_mod": lambda t: lambda b, h, q_idx, kv_idx: (q_idx + 2 * kv_idx + t[h]) % 3 != 0,
}
