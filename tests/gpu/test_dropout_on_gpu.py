"""Dropout in native kernels on a GPU: the reference's mask bit for bit, in forward and backward, at real tiles and
lengths; how much is kept; graphs, compiled and recomputed calls, memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu.native import BACKENDS, CUDA, captured
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import xattn

PAIR = (-(2**62) + 5, 2**63 - 1)


def pair(*numbers: int) -> Tensor:
    return torch.tensor(numbers or PAIR, device=CUDA)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(dtype)


def qkv(b=2, sq=300, sk=500, h=4, hk=2, d=64, dv=None, dtype=torch.bfloat16) -> list[Tensor]:
    shapes = (b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv or d)
    return [randn(*s, dtype=dtype, seed=n) for n, s in enumerate(shapes)]


def kept(p: float, b: int, h: int, rows: Tensor, keys: Tensor) -> Tensor:
    """Which weights the definition keeps, (batch, rows, heads, keys)."""
    at = (torch.arange(n, device=CUDA) for n in (b, h))
    batch, head = (x.view(s) for x, s in zip(at, ((-1, 1, 1, 1), (1, 1, -1, 1)), strict=True))
    return xattn.rng.keep(pair(), p, batch, head, rows.view(1, -1, 1, 1), keys)


def native(backend: str, *args: Any, kind: str = "attention", **given: Any) -> None:
    plan = xattn.explain(*args, kind=kind, backend=backend, **given)
    assert plan.native and plan.backend == backend, plan


def nearly(found: Tensor, truth: Tensor, bound: float, among: float = 0.0) -> None:
    assert not found.isnan().any()
    error, size = (found.float() - truth.float()).norm(), truth.float().norm()
    assert (error <= bound * size + 1e-3 * among + 1e-6).item(), (error, size)


# ---------------------------------------------------------------- the mask
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_mask_is_the_definitions(backend, launcher, d, dtype):
    """Values of 1 at one key for each channel show the weights of as many keys, here and there in a long row."""
    q, k, v = qkv(2, 600, 3000, 4, 2, d, dtype=dtype)
    q, k = q * 0.1, k * 0.1  # no weight is too small to be seen
    rows = torch.arange(600, device=CUDA)
    for key0 in (0, 1500, 3000 - d):
        v.zero_()
        keys = torch.arange(key0, key0 + d, device=CUDA)
        v[:, keys, :, keys - key0] = 1
        given = {"dropout_p": 0.3, "dropout_rng": pair()}
        native(backend, q, k, v, **given)
        out = xattn.attention(q, k, v, **given, backend=backend)
        assert torch.equal(out != 0, kept(0.3, 2, 4, rows, keys))
        assert torch.equal(out, xattn.attention(q, k, v, **given, backend=backend))


@pytest.mark.skipif(len(BACKENDS) < 2, reason="no hardware: one native backend answers here")
def test_backends_drop_the_same():
    q, k, v = qkv(1, 400, 400, 2, 2, 128)
    v = torch.eye(400, 128, device=CUDA, dtype=v.dtype)[:, None].expand(1, -1, 2, -1)
    found = [
        xattn.attention(q, k, v, causal=True, dropout_p=0.5, dropout_rng=pair(), backend=b) != 0
        for b in (*BACKENDS, "reference")
    ]
    assert all(torch.equal(x, found[0]) for x in found[1:])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_how_much_is_kept(backend, p):
    """Weights are all equal here, so that outputs count those that are kept: 2^25 of them, within five deviations; and
    rows, keys and heads each as many."""
    q, k = torch.zeros(2, 1024, 4, 64, device=CUDA).half(), torch.zeros(2, 4096, 4, 64, device=CUDA).half()
    v = torch.zeros_like(k)
    for c in range(64):
        v[:, c::64, :, c] = 1  # channel c counts 64 keys
    shares = xattn.attention(q, k, v, dropout_p=p, backend=backend).double() * 4096 * (1 - p)
    counts = shares.round()
    assert ((shares - counts).abs() <= 0.05).all()  # what rounding to 16 bits leaves
    for dims in ((0, 1, 2, 3), (1, 2, 3), (0, 1, 3), (0, 1, 2)):
        n = 64 * math.prod(counts.shape[i] for i in dims)
        rates = counts.sum(dims) / n
        assert ((rates - (1 - round(p * 65536) / 65536)).abs() <= 5 * math.sqrt(p * (1 - p) / n)).all()


def test_packed_sequences(backend):
    """The number of a sequence is its place, positions count from its own first token."""
    lens_q, lens_k = (300, 0, 5, 200), (400, 10, 0, 250)
    cu_q, cu_k = (torch.tensor([0, *n], device=CUDA).cumsum(0) for n in (lens_q, lens_k))
    q, k, v = randn(505, 4, 128), randn(660, 2, 128, seed=1), randn(660, 2, 128, seed=2)
    args = (q, k, v, cu_q, cu_k, 300, 400)
    given = {"dropout_p": 0.4, "dropout_rng": pair(), "causal": True}
    native(backend, *args, kind="varlen", **given)
    out = xattn.attention_varlen(*args, **given, backend=backend)
    wide = (*(t.float() for t in args[:3]), *args[3:])
    nearly(out, xattn.attention_varlen(*wide, **given, backend="reference"), 1e-2)


@pytest.mark.parametrize("queries", [1, 4, 300])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_paged_caches(backend, queries, cache):
    """Decoding, with splits; and the forward kernels."""
    q, k, v = randn(3, queries, 8, 128), randn(600, 16, 2, 128, seed=1), randn(600, 16, 2, 128, seed=2)
    table = torch.randperm(600, device=CUDA).view(3, 200).int()
    lengths = torch.tensor([3000, queries, 800], dtype=torch.int32, device=CUDA)
    given = {"dropout_p": 0.4, "dropout_rng": pair(), "causal": True}
    args = (q, k.to(cache), v.to(cache), table, lengths)
    native(backend, *args, kind="paged", **given)
    out = xattn.attention_paged(*args, **given, backend=backend)
    wide = (q.float(), *(t.float() for t in args[1:3]), *args[3:])
    nearly(out, xattn.attention_paged(*wide, **given, backend="reference"), 2e-2)


def test_eight_bits(backend):
    if backend != "sm90":
        pytest.skip("no hardware: q, k and v of 8 bits are Hopper's")
    q, k, v = (t.to(torch.float8_e4m3fn) for t in qkv(2, 600, 700, 4, 2, 128))
    given = {"dropout_p": 0.4, "dropout_rng": pair(), "causal": True}
    native(backend, q, k, v, **given)
    out = xattn.attention(q, k, v, **given, backend=backend)
    nearly(out, xattn.attention(q.float(), k.float(), v.float(), **given, backend="reference"), 5e-2)


# ---------------------------------------------------------------- gradients
def gradients(args: Any, backend: str, call: Any, given: dict[str, Any], dout: Tensor | None = None) -> Any:
    """(out, gradients of q, k and v), and the seed of out."""
    leaves = [t.detach().requires_grad_() for t in args[:3]]
    out = call(*leaves, *args[3:], **given, backend=backend)
    dout = randn(*out.shape, seed=9) if dout is None else dout
    return (out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))), dout


def agree(args: Any, given: dict[str, Any], backend: str, call: Any = xattn.attention) -> None:
    """With the reference in float32, and bit for bit with itself: nothing is added up in an order that changes."""
    given = {"dropout_p": 0.3, "dropout_rng": pair()} | given
    wide = [t.float() if t.is_floating_point() else t for t in args[:3]]
    found, dout = gradients(args, backend, call, given)
    truth, _ = gradients([*wide, *args[3:]], "reference", call, given, dout)
    largest = max(t.norm().item() for t in truth[1:])
    for got, want in zip(found, truth, strict=True):
        nearly(got, want, 1.5e-2, 3 * largest)  # where they cancel, the roundings of others are left
    again, _ = gradients(args, backend, call, given, dout)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize(
    "dims", [(64, 64), (96, 96), (128, 128), (40, 72), (192, 128), (192, 192), (256, 256)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients(backend, launcher, dims, dtype):
    for causal in (False, True):
        for p in (0.1, 0.5):
            agree(qkv(2, 300, 500, 4, 2, *dims, dtype=dtype), {"causal": causal, "dropout_p": p}, backend)


def test_gradients_by_lengths(backend):
    for sq in (1, 63, 64, 129, 300):
        for sk in (1, 63, 65, 128, 700):
            agree(qkv(2, sq, sk, 2, 1, 128), {"causal": sk > sq}, backend)


def test_gradients_beside_features(backend):
    for given in (
        {"window": (70, 5)},
        {"softcap": 5.0, "causal": True},
        {"alibi_slopes": torch.rand(2, 4, device=CUDA)},
        {"sinks": randn(4, dtype=torch.float32), "causal": True},
        {"attn_mask": torch.rand(2, 1, 300, 500, device=CUDA) > 0.3},
        {"attn_mask": randn(1, 4, 300, 500, dtype=torch.float32)},
        {"seqused_k": torch.tensor([350, 0], device=CUDA), "causal": True},
        {"dropout_p": 1.0},
        {"dropout_p": 2.0**-20},
    ):
        agree(qkv(d=128), given, backend)


def test_gradients_of_packed_sequences(backend):
    cu_q, cu_k = (torch.tensor(n, device=CUDA, dtype=torch.int32) for n in ([0, 5, 5, 140, 300], [0, 9, 30, 30, 340]))
    args = (randn(305, 6, 128), randn(350, 3, 128, seed=1), randn(350, 3, 128, seed=2), cu_q, cu_k, 256, 400)
    for given in ({}, {"causal": True}, {"window": (20, 3)}):
        agree(args, given, backend, xattn.attention_varlen)


def test_backward_drops_what_forward_dropped(backend):
    """Of a value's gradient, one query at a time: only where its weight was kept is there any."""
    q, k, _ = qkv(1, 300, 128, 2, 2, 128)
    v = torch.eye(128, device=CUDA, dtype=q.dtype)[:, None].expand(1, -1, 2, -1).contiguous().requires_grad_()
    out = xattn.attention(q * 0.1, k, v, dropout_p=0.5, backend=backend)
    for row in (0, 77, 299):
        dout = torch.zeros_like(out)
        dout[:, row] = 1
        (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
        assert torch.equal(dv[0, :, :, 0] != 0, (out[0, row] != 0).T)


# ---------------------------------------------------------------- graphs
def test_a_graph_reads_the_pair_that_is_there(backend, launcher):
    """The same pair gives the same bits at each replay, another pair those of an eager call with it."""
    leaves, numbers = [t.requires_grad_() for t in qkv(d=128)], pair(3, 4)
    dout = randn(2, 300, 4, 128, seed=9)

    def step(rng: Tensor = numbers) -> list[Tensor]:
        out = xattn.attention(*leaves, causal=True, dropout_p=0.5, dropout_rng=rng, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    graph, found = captured(step)
    seen = []
    for now in ((3, 4), (3, 5), (2**63 - 1, -7), (3, 4)):
        numbers.copy_(pair(*now))
        for _ in range(2):
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(found, step(pair(*now)), strict=True))
        seen.append(found[0].clone())
    assert torch.equal(seen[0], seen[3]) and not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_a_graph_draws_anew_at_each_replay(backend, launcher):
    """Without a pair: torch's generator gives each replay its own, which forward and backward share."""
    q, k, _ = qkv(1, 64, 128, 2, 2, 128)
    v = torch.eye(128, device=CUDA, dtype=q.dtype)[:, None].expand(1, -1, 2, -1).contiguous().requires_grad_()
    dout = torch.zeros(1, 64, 2, 128, device=CUDA, dtype=q.dtype)
    dout[:, 7] = 1

    def step() -> tuple[Tensor, Tensor]:
        out = xattn.attention(q * 0.1, k, v, dropout_p=0.5, backend=backend)
        return out.detach(), torch.autograd.grad(out, v, dout)[0]

    graph, (out, dv) = captured(step)
    masks = []
    for _ in range(4):
        graph.replay()
        masks.append(out != 0)
        assert torch.equal(dv[0, :, :, 0] != 0, masks[-1][0, 7].T)
    assert all(not torch.equal(a, b) for n, a in enumerate(masks) for b in masks[:n])
    torch.manual_seed(7)
    graph.replay()
    first = out.clone()
    torch.manual_seed(7)
    graph.replay()
    assert torch.equal(out, first)


# ---------------------------------------------------------------- how it is called
def test_compiled_and_recomputed(backend):
    x, given = qkv(d=128), {"causal": True, "dropout_p": 0.4, "backend": backend}

    def step(q: Tensor, k: Tensor, v: Tensor, rng: Tensor) -> Tensor:
        return xattn.attention(q, k, v, dropout_rng=rng, **given).float().square().sum()

    def drawing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return xattn.attention(q, k, v, **given).float().square().sum()

    def found(call: Any, *more: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in x]
        torch.manual_seed(11)
        return torch.autograd.grad(call(*leaves, *more), leaves)

    eager = found(step, pair())
    for a, b in zip(eager, found(torch.compile(step, fullgraph=True), pair()), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    again = found(lambda *leaves: checkpoint(drawing, *leaves, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(found(drawing), again, strict=True))


def test_a_pair_that_lies_apart(backend):
    x, far = qkv(), pair(3, 0, 4, 0)[::2]
    near = gradients(x, backend, xattn.attention, {"dropout_p": 0.5, "dropout_rng": pair(3, 4)})[0]
    for _ in range(2):
        found = gradients(x, backend, xattn.attention, {"dropout_p": 0.5, "dropout_rng": far})[0]
        assert all(torch.equal(a, b) for a, b in zip(near, found, strict=True))


def test_memory_is_linear_and_nothing_synchronises(backend, launcher, unsynchronised):
    """A step of 131072 tokens, whose mask would be 2 GiB: out, lse, gradients, and numbers of rows."""
    n = 131072
    leaves = [t.requires_grad_() for t in qkv(1, n, n, 1, 1, 64)]

    def step() -> None:
        out = xattn.attention(*leaves, window=(255, 0), dropout_p=0.1, backend=backend)
        torch.autograd.grad(out, leaves, out.detach())

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with unsynchronised():
        step()
    assert torch.cuda.max_memory_allocated() - before <= 4 * 2 * 64 * n + 8 * n * 4 + (1 << 16)
