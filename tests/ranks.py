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
        context = multiprocessing.get_context("forkserver")  # imports once, and forks what has no threads yet
        context.set_forkserver_preload(["torch", "xattn"])
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
    torch.manual_seed(SEED + rank)
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

SEED = 5


def shard_and_back(rank: int, world: int, x: torch.Tensor, sharding: str) -> tuple:
    import xattn

    own = xattn.context_parallel_shard(x, sharding=sharding)
    leaf = own.clone().requires_grad_()
    back = xattn.context_parallel_unshard(leaf, sharding=sharding)
    back.square().sum().backward()
    turned = xattn.context_parallel_shard(x.movedim(1, -1), dim=-1, sharding=sharding)
    last = xattn.context_parallel_unshard(turned, dim=-1, sharding=sharding).movedim(-1, 1)
    return own, back.detach(), leaf.grad, last


def shard_of(rank: int, world: int, x: torch.Tensor, sharding: str) -> torch.Tensor:
    import xattn

    return xattn.context_parallel_shard(x, sharding=sharding)


def _call(**given: Any) -> Any:
    """A call that is right but for what is given."""
    import xattn

    q = given.pop("q", None)
    q = torch.ones(1, 4, 2, 8) if q is None else q
    k, v = given.pop("k", q), given.pop("v", q)
    return xattn.context_parallel(q, k, v, **given)


def wrong_call(rank: int, world: int, wrong: dict, only: int | None) -> None:
    _call(**(wrong if only in (None, rank) else {}))


def refused_call(rank: int, world: int, name: str, method: str) -> tuple[str, str, list[str]]:
    """(class, text, what was sent)."""
    import xattn

    values = {"attn_mask": torch.ones(4, 4, dtype=torch.bool), "seqused_k": torch.tensor([3])}
    values |= {"epilogue": xattn.Epilogue(lambda o, b, h, i, d: o), "out": torch.zeros(1, 4, 2, 8)}
    sent: list[str] = []
    with _watched(sent):
        try:
            _call(method=method, **{name: values[name]})
        except Exception as error:
            return type(error).__name__, str(error), sent
    raise AssertionError("it was not refused")


@contextlib.contextmanager
def _watched(events: list[str]) -> Any:
    """Notes messages, waits and attention calls in ``events``."""
    from xattn import api
    from xattn import ranks as messages

    exchange, attend, collectives = dist.batch_isend_irecv, api.attention, (messages._all_gather, dist.broadcast)

    class Noted:
        def __init__(self, work: Any):
            self.work = work

        def wait(self) -> None:
            if events[-1] != "wait":  # a message that goes and one that comes
                events.append("wait")
            self.work.wait()

    def noted(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (events.append(name), fn(*args, **kwargs))[1]

    dist.batch_isend_irecv = lambda ops: [Noted(w) for w in noted("send", exchange)(ops)]
    api.attention = noted("attend", attend)
    messages._all_gather, dist.broadcast = noted("gather", collectives[0]), noted("broadcast", collectives[1])
    try:
        yield
    finally:
        dist.batch_isend_irecv, api.attention = exchange, attend
        messages._all_gather, dist.broadcast = collectives


def differing_call(rank: int, world: int, method: str, other: dict) -> None:
    """The last rank calls with something else."""
    shapes = dict.fromkeys("qkv", (1, 4, 2, 8))
    options: dict[str, Any] = {"method": method, "dropout_p": 0.5, "dropout_rng": torch.tensor([1, 1])}
    dtype, grad = torch.float32, False
    if rank == world - 1:
        other = dict(other)
        shapes |= {n: other.pop(n) for n in "qkv" if n in other}
        dtype, grad = other.pop("dtype", dtype), other.pop("grad", grad)
        if other.get("method") == "swap":
            other["method"] = "ring" if method == "all_gather" else "all_gather"
        options |= other
    _call(**{n: torch.ones(s, dtype=dtype, requires_grad=grad) for n, s in shapes.items()}, **options)


def absent(rank: int, world: int, who: int) -> None:
    from xattn import ranks as messages

    if rank != who:
        store = dist.group.WORLD.get_group_store()
        store.set_timeout(datetime.timedelta(seconds=1))
        assert messages.Ranks.of(None).world == world
        _call()


def in_halves(rank: int, world: int, tensors: dict) -> tuple[int, torch.Tensor]:
    import xattn

    half = world // 2
    members = [list(range(half)), list(range(half, world))]
    made = [dist.new_group(m) for m in members]
    own, other = (made[0], made[1]) if rank < half else (made[1], made[0])
    local = {n: shard(t, rank % half, half) for n, t in tensors.items()}
    outs = [xattn.context_parallel(**local, group=own, method=method, causal=True) for method in ("ring", "all_gather")]
    torch.testing.assert_close(*outs)
    try:
        xattn.context_parallel(**local, group=other)
    except ValueError as error:
        assert str(error).startswith("group: got a group that this rank is no member of")
    else:
        raise AssertionError("a group of others was taken")
    return rank % half, outs[0]


def _shards(rank: int, requires_grad: bool = True) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return [torch.randn(1, 8, 2, 8, generator=g).requires_grad_(requires_grad) for _ in range(3)]


def order_of_events(rank: int, world: int) -> tuple[list[str], list[str]]:
    import xattn

    forward: list[str] = []
    backward: list[str] = []
    with _watched(forward):
        out = xattn.context_parallel(*_shards(rank))
    with _watched(backward):
        out.sum().backward()
    return forward, backward


def kept_for_backward(rank: int, world: int) -> tuple[float, float]:
    """Elements saved for the backward, relative to q, k, v and out of a shard, for "ring" and "all_gather"."""
    import xattn

    found = []
    for method in ("ring", "all_gather"):
        kept: dict[int, int] = {}

        def note(t: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            if t.dim() == 4:  # lse is a row of numbers beside them
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            xattn.context_parallel(*_shards(rank), causal=True, method=method)
        found.append(sum(kept.values()) / (4 * 4 * 128))
    return found[0], found[1]


def modes(rank: int, world: int, method: str) -> str:
    """Autocast, activation checkpoints, no_grad, batch_invariant, generators."""
    import torch.utils.checkpoint

    import xattn

    x = _shards(rank)

    def call(*x: torch.Tensor, **options: Any) -> torch.Tensor:
        return xattn.context_parallel(*x, causal=True, method=method, **options)

    def gradients(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out.float().square().sum(), x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(*x)
        assert out.dtype == torch.bfloat16
        within = gradients(out)
    halves = [t.detach().bfloat16().requires_grad_() for t in x]
    wanted = torch.autograd.grad(call(*halves).float().square().sum(), halves)
    assert all(torch.equal(a, b.float()) for a, b in zip(within, wanted, strict=True))

    torch.manual_seed(SEED + rank)
    plain = call(*x, dropout_p=0.5)
    after = torch.rand(1)
    torch.manual_seed(SEED + rank)
    again = torch.utils.checkpoint.checkpoint(call, *x, dropout_p=0.5, use_reentrant=False)
    assert torch.equal(plain, again) and torch.equal(after, torch.rand(1))
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(again), strict=True))

    with torch.no_grad():
        assert not call(*x).requires_grad
    with xattn.batch_invariant():
        out = call(*x)
    assert len(gradients(out)) == 3
    unseen = xattn.context_parallel(*x, causal=True, method=method, return_lse=True)[1]
    assert all(g.ne(0).any() for g in torch.autograd.grad(unseen.sum(), x[:2]))
    return "done"


def compiled(rank: int, world: int) -> str:
    import xattn

    x = _shards(rank, requires_grad=False)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return xattn.context_parallel(q.sin(), k.sin(), v.sin(), causal=True).cos()

    torch.testing.assert_close(torch.compile(model, backend="eager")(*x), model(*x))
    torch.compiler.reset()
    try:
        torch.compile(model, backend="eager", fullgraph=True)(*x)
    except Exception as error:
        assert "context parallelism communicates" in str(error), error
    else:
        raise AssertionError("one graph of it was made")
    return "done"


def second_derivative(rank: int, world: int, method: str) -> None:
    """Of both methods' first derivatives, against those of the whole where there is one."""
    import xattn

    whole = [t.double() for t in _shards(99, requires_grad=False)]
    leaves = [t.clone().requires_grad_() for t in whole]
    own = [t.clone().requires_grad_() for t in (xattn.context_parallel_shard(t) for t in whole)]
    out = xattn.context_parallel(*own, causal=True, method=method, backend="reference")
    first = torch.autograd.grad(out.sin().sum(), own, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), own)
    out = xattn.attention(*leaves, causal=True, backend="reference")
    first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
    wanted = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    for got, w in zip(second, wanted, strict=True):
        torch.testing.assert_close(got, xattn.context_parallel_shard(w), rtol=1e-4, atol=1e-6)


def under_grad(rank: int, world: int) -> None:
    q, k, v = _shards(rank, requires_grad=False)
    torch.func.grad(lambda q: _call(q=q, k=k, v=v).sum())(q)


def alone(rank: int, world: int, tensors: dict) -> str:
    """A group of one rank: what attention itself gives."""
    import xattn

    group = [dist.new_group([r]) for r in range(world)][rank]
    leaves = [tensors[n].clone().requires_grad_() for n in "qkv"]
    options = {"causal": True, "return_lse": True}
    found = [xattn.attention(*leaves, **options)]
    for method in ("ring", "all_gather"):
        for sharding in ("zigzag", "contiguous"):
            found.append(xattn.context_parallel(*leaves, group, method, sharding, **options))
    grads = [torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves) for out, lse in found]
    for (out, lse), got in zip(found, grads, strict=True):
        for a, b in zip((out, lse, *got), (*found[0], *grads[0]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    return "done"
