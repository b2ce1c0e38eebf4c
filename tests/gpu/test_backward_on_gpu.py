"""What only a GPU can show of the native backward, by the compiled launcher and by the vendor's Python bindings: real
matrix units at every tile, repeated launches, graphs, streams, memory. The cases of tests/unit run there too."""

from __future__ import annotations

import math

import pytest
import torch
from gpu.native import CUDA, captured

import xattn
from xattn import backward_call


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=CUDA, dtype=dtype)


def qkv(b=2, sq=65, sk=97, h=4, hk=2, d=64, dv=None, dtype=torch.bfloat16):
    shapes = (b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv or d)
    return tuple(randn(*s, dtype=dtype) for s in shapes)


def gradients(args, kwargs, backend, call, seeds=None):
    """(gradients of q, k, v and of sinks, the seeds of out and lse)."""
    leaves = [t.detach().requires_grad_() for t in args[:3]]
    kwargs = dict(kwargs)
    if "sinks" in kwargs:
        kwargs["sinks"] = kwargs["sinks"].detach().requires_grad_()
    out, lse = call(*leaves, *args[3:], **kwargs, return_lse=True, backend=backend)
    if seeds is None:
        seeds = torch.randn_like(out), torch.randn_like(lse)
    wanted = [*leaves, *([kwargs["sinks"]] if "sinks" in kwargs else [])]
    return torch.autograd.grad((out, lse), wanted, (seeds[0].to(out.dtype), seeds[1])), seeds


def agree(args, kwargs, backend, call=xattn.attention):
    """With the reference in float32, time after time; where it is asked for, bit for bit with itself, and dk and dv
    always."""
    wide = lambda x: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    exact, seeds = {n: wide(x) for n, x in kwargs.items()}, None
    for options in (kwargs, kwargs | {"deterministic": True}):
        found, seeds = gradients(args, options, backend, call, seeds)
        truth, _ = gradients([wide(x) for x in args], exact, "reference", call, seeds)
        close(found, truth)
        for _ in range(2):  # the second time without preparing anything
            again, _ = gradients(args, options, backend, call, seeds)
            close(again, truth)
            same = [0, 1, 2, 3] if "deterministic" in options else [1, 2]
            assert all(torch.equal(again[n], found[n]) for n in same if n < len(found))


def close(found, truth):
    largest = max(t.norm() for t in truth)
    for got, want in zip(found, truth, strict=True):
        assert not got.isnan().any()
        assert ((got.float() - want).norm() <= 1.5e-2 * want.norm() + 1e-3 * largest + 1e-6).item()


LENGTHS = [(a, b) for a in (0, 1, 63, 64, 129, 300) for b in (0, 1, 65, 128, 129, 500)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_lengths(launcher, backend, causal, d):
    for sq, sk in LENGTHS:
        agree(qkv(1, sq, sk, 2, 1, d), {"causal": causal}, backend)


@pytest.mark.parametrize("dims", [(8, 8), (40, 72), (96, 96), (112, 64), (160, 160), (192, 128), (224, 224), (64, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_head_dims(launcher, backend, dims, dtype):
    agree(qkv(2, 130, 201, 6, 2, *dims, dtype=dtype), {"causal": True}, backend)


def test_features(launcher, backend):
    x = qkv(2, 130, 201, 6, 2, 128)
    added = randn(1, 6, 130, 201, dtype=torch.float32)
    for options in (
        {"window": (30, 5)},
        {"softcap": 5.0, "causal": True},
        {"alibi_slopes": torch.rand(2, 6, device=CUDA)},
        {"sinks": randn(6, dtype=torch.float32), "causal": True},
        {"attn_mask": torch.rand(2, 1, 130, 201, device=CUDA) > 0.3},
        {"attn_mask": added},
        {"attn_mask": added.bfloat16(), "softcap": 9.0, "sinks": randn(6, dtype=torch.float32)},
        {"seqused_k": torch.tensor([150, 0], device=CUDA), "causal": True},
        {"softmax_scale": -0.2},
    ):
        agree(x, options, backend)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_varlen(launcher, backend, index):
    cu_q, cu_k = (torch.tensor(x, device=CUDA, dtype=index) for x in ([0, 5, 5, 140, 300], [0, 9, 30, 30, 340]))
    q, k, v = randn(305, 6, 128), randn(350, 3, 128), randn(350, 3, 128)
    for t, n in ((q, 300), (k, 340), (v, 340)):
        t[n:] = math.nan
    for options in ({}, {"causal": True}, {"window": (20, 3)}, {"sinks": randn(6, dtype=torch.float32)}):
        agree((q, k, v, cu_q, cu_k, 256, 400), options, backend, xattn.attention_varlen)


def test_zero_queries_among_long_keys(launcher, backend):
    cu_q = torch.tensor([0, 0, 1208, 2048, 2048], device=CUDA, dtype=torch.int32)
    cu_k = torch.tensor([0, 2538, 4280, 5120, 8192], device=CUDA, dtype=torch.int32)
    leaves = [randn(n, h, 256).requires_grad_() for n, h in ((2048, 4), (8192, 1), (8192, 1))]
    out = xattn.attention_varlen(*leaves, cu_q, cu_k, 1208, 3072, backend=backend)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    for g in grads[1:]:
        assert (g[:2538] == 0).all() and (g[5120:] == 0).all() and g[2538:5120].ne(0).any()


def test_strides_of_dout(launcher, backend):
    leaves = [t.requires_grad_() for t in qkv()]
    out = xattn.attention(*leaves, causal=True, backend=backend)
    flat = randn(out.numel() + 1)
    for dout in (torch.ones((), device=CUDA, dtype=out.dtype).expand(out.shape), flat[1:].view(out.shape)):
        found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        want = torch.autograd.grad(out, leaves, dout.contiguous().clone(), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found[1:], want[1:], strict=True))
        torch.testing.assert_close(found[0], want[0], rtol=2e-2, atol=1e-4)


def test_thirty_times_the_same_bits(launcher, backend):
    x = qkv(2, 1000, 1000, 8, 2, 128)
    first, seeds = gradients(x, {"causal": True, "deterministic": True}, backend, xattn.attention)
    for _ in range(30):
        again, _ = gradients(x, {"causal": True, "deterministic": True}, backend, xattn.attention, seeds)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_memory_is_linear_and_nothing_synchronises(launcher, backend, unsynchronised):
    """What a backward holds beside its inputs: the gradients, three numbers a row, and dq in float32."""
    leaves = [t.requires_grad_() for t in qkv(1, 8192, 8192, 2, 2, 64)]
    out = xattn.attention(*leaves, causal=True, backend=backend)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, leaves, dout, retain_graph=True)
    backward_call.forget()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with unsynchronised():
        grads = torch.autograd.grad(out, leaves, dout)
    held = sum(g.numel() * 2 for g in grads) + 4 * grads[0].numel() + 6 * 8192 * 4
    assert torch.cuda.max_memory_allocated() - before <= held + 8192


def test_a_graph_of_forward_and_backward(launcher, backend):
    leaves = [t.requires_grad_() for t in qkv(2, 300, 300, 4, 2, 128)]
    dout = randn(2, 300, 4, 128)

    def step():
        return torch.autograd.grad(xattn.attention(*leaves, causal=True, backend=backend), leaves, dout)

    graph, found = captured(step)
    for _ in range(3):
        with torch.no_grad():
            for t in leaves:
                t.copy_(torch.randn_like(t))
        graph.replay()
        want = step()
        assert all(torch.equal(a, b) for a, b in zip(found[1:], want[1:], strict=True))
        torch.testing.assert_close(found[0], want[0], rtol=2e-2, atol=1e-4)


def test_a_long_sequence(launcher, backend):
    """Gradients of the last queries' keys, against a reference over these alone."""
    leaves = [t.requires_grad_() for t in qkv(1, 131072, 131072, 1, 1, 64)]
    out = xattn.attention(*leaves, window=(255, 0), backend=backend)
    dout = torch.zeros_like(out)
    dout[:, -256:] = randn(1, 256, 1, 64)
    found = torch.autograd.grad(out, leaves, dout)
    ends = [t.detach()[:, -512:].float().requires_grad_() for t in leaves]
    truth = torch.autograd.grad(
        xattn.attention(*ends, window=(255, 0), backend="reference"), ends, dout[:, -512:].float()
    )
    for got, want in zip(found, truth, strict=True):
        assert (got[:, :-512] == 0).all()
        assert ((got[:, -512:].float() - want).norm() <= 1.5e-2 * want.norm()).item()


def test_compiled(launcher, backend):
    def step(q, k, v):
        return xattn.attention(q, k, v, causal=True, backend=backend).square().sum()

    x, found = qkv(), []
    for f in (step, torch.compile(step, fullgraph=True)):
        leaves = [t.detach().requires_grad_() for t in x]
        found.append(torch.autograd.grad(f(*leaves), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
