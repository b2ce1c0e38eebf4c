"""The drop-in for FlashAttention 2 against its documentation: signatures, and results by the definition in float64."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import assert_close
from torch import Tensor

import xattn
from xattn.compat import flash_attn as fa
from xattn.compat import flash_attn_padding as padding

NAN, INF = math.nan, math.inf


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---------------------------------------------------------------- the definition
def softmax_rows(q, k, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """The weights (heads, seqlen_q, seqlen_k) and the logsumexp (heads, seqlen_q) of q (seqlen_q, heads, d) over k
    (seqlen_k, heads_kv, d), one row after the other."""
    (sq, heads, d), (sk, heads_kv, _) = q.shape, k.shape
    weights, lses = [], []
    for h in range(heads):
        keys = k[:, h // (heads // heads_kv)]
        for i in range(sq):
            at = i + sk - sq
            seen = [
                j
                for j in range(sk)
                if (not causal or j <= at)
                and (window[0] == -1 or j >= at - window[0])
                and (window[1] == -1 or j <= at + window[1])
            ]
            row = q.new_zeros(sk)
            if not seen:
                weights.append(row)
                lses.append(q.new_tensor(-INF))
                continue
            s = keys[seen] @ q[i, h] * (d**-0.5 if scale is None else scale)
            if softcap > 0:
                s = softcap * torch.tanh(s / softcap)
            if slopes is not None:
                s = s - slopes[h].to(q.dtype) * torch.tensor([abs(at - j) for j in seen], dtype=q.dtype)
            lse = torch.logsumexp(s, 0)
            weights.append(row.index_put((torch.tensor(seen),), torch.exp(s - lse)))
            lses.append(lse)
    if not weights:
        return q.new_zeros(heads, sq, sk), q.new_zeros(heads, sq)
    return torch.stack(weights).view(heads, sq, sk), torch.stack(lses).view(heads, sq)


def one(q, k, v, b=0, keep=None, slopes=None, **options):
    """out (seqlen_q, heads, d_v) and the logsumexp of one sequence; ``keep``: the weights, scaled, that stay."""
    slopes = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
    p, lse = softmax_rows(q, k, slopes=slopes, **options)
    p = p if keep is None else p * keep
    return torch.einsum("hij,jhd->ihd", p, v.repeat_interleave(q.shape[1] // v.shape[1], 1)), lse


def dense(q, k, v, keep=None, **options):
    found = [one(q[b], k[b], v[b], b, None if keep is None else keep[b], **options) for b in range(len(q))]
    return torch.stack([o for o, _ in found]), torch.stack([lse for _, lse in found])


def close(names: str, got, wanted) -> None:
    """``wanted(dtype)``: what the definition gives in that dtype."""
    dtype = got[0].dtype
    truth, plain = wanted(torch.float64), wanted(dtype)
    for name, *of_it in zip(names.split(), got, truth, plain, strict=True):
        assert_close(name, *of_it)


def fa2_options(scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None) -> dict:
    """What the definition is told, as FlashAttention 2 is."""
    given = {"softmax_scale": scale, "causal": causal, "window_size": window, "softcap": softcap}
    return {**given, "alibi_slopes": slopes}


def options_of(name: str, heads: int, batch: int) -> dict:
    return {
        "plain": {},
        "scale": {"scale": 0.3},
        "causal": {"causal": True},
        "left": {"window": (2, -1)},
        "right": {"window": (-1, 1)},
        "window": {"window": (3, 0)},
        "narrow": {"window": (0, 0)},
        "wide": {"window": (100, 100)},
        "causal window": {"causal": True, "window": (1, -1)},
        "causal, right": {"causal": True, "window": (2, 3)},
        "softcap": {"softcap": 0.7},
        "alibi": {"slopes": randn(heads, seed=5).abs()},
        "alibi of each": {"slopes": randn(batch, heads, seed=5).abs(), "causal": True},
        "all": {"scale": 0.4, "causal": True, "window": (4, -1), "softcap": 1.5, "slopes": randn(heads, seed=6).abs()},
    }[name]


OPTIONS = (
    "plain scale causal left right window narrow wide causal_window causal,_right softcap alibi alibi_of_each all"
).split()
OPTIONS = [name.replace("_", " ") for name in OPTIONS]

# ---------------------------------------------------------------- signatures
TAIL = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES = {
    "flash_attn_func": (("q", "k", "v"), TAIL),
    "flash_attn_kvpacked_func": (("q", "kv"), TAIL),
    "flash_attn_qkvpacked_func": (("qkv",), TAIL),
    "flash_attn_varlen_func": (("q", "k", "v", *LENGTHS), {**TAIL, "block_table": None}),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *LENGTHS), TAIL),
    "flash_attn_varlen_qkvpacked_func": (("qkv", "cu_seqlens", "max_seqlen"), TAIL),
    "flash_attn_with_kvcache": (
        ("q", "k_cache", "v_cache"),
        {
            "k": None,
            "v": None,
            "rotary_cos": None,
            "rotary_sin": None,
            "cache_seqlens": None,
            "cache_batch_idx": None,
            "cache_leftpad": None,
            "block_table": None,
            "softmax_scale": None,
            "causal": False,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "rotary_interleaved": True,
            "alibi_slopes": None,
            "num_splits": 0,
            "return_softmax_lse": False,
        },
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    needed, defaults = SIGNATURES[name]
    found = inspect.signature(getattr(fa, name)).parameters
    assert list(found) == [*needed, *defaults]
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in found.values())
    empty = inspect.Parameter.empty
    assert {n: p.default for n, p in found.items() if p.default is not empty} == defaults


# ---------------------------------------------------------------- dense
SHAPES = {  # batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim
    "square": (2, 7, 7, 4, 4, 16),
    "more keys": (2, 5, 9, 6, 2, 8),
    "fewer keys": (1, 9, 4, 3, 1, 24),
    "one query": (3, 1, 6, 8, 2, 16),
    "one of each": (1, 1, 1, 1, 1, 8),
    "odd": (2, 3, 5, 2, 2, 7),
}


def qkv(batch, seqlen_q, seqlen_k, heads, heads_kv, dim, dtype=torch.float32):
    q = randn(batch, seqlen_q, heads, dim, seed=1, dtype=dtype)
    k, v = (randn(batch, seqlen_k, heads_kv, dim, seed=n, dtype=dtype) for n in (2, 3))
    return q, k, v


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dense(shape, name):
    q, k, v = qkv(*SHAPES[shape])
    options = options_of(name, q.shape[2], len(q))
    out, lse, probs = fa.flash_attn_func(q, k, v, return_attn_probs=True, **fa2_options(**options))
    assert lse.dtype == torch.float32 and lse.shape == (len(q), q.shape[2], q.shape[1])
    assert probs.shape == (0,) and probs.dtype == q.dtype
    close("out lse", (out, lse), lambda dtype: dense(q.to(dtype), k.to(dtype), v.to(dtype), **options))
    alone = fa.flash_attn_func(q, k, v, **fa2_options(**options))
    close("out", (alone,), lambda dtype: dense(q.to(dtype), k.to(dtype), v.to(dtype), **options)[:1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_dtypes(name, dtype):
    q, k, v = qkv(*SHAPES["more keys"], dtype=dtype)
    options = options_of(name, q.shape[2], len(q))
    out = fa.flash_attn_func(q, k, v, **fa2_options(**options))
    assert out.dtype == dtype
    close("out", (out,), lambda of: dense(q.to(of), k.to(of), v.to(of), **options)[:1])


def test_rows_without_a_key():
    q, k, v = qkv(*SHAPES["fewer keys"])
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert not out[:, :5].any() and (lse[..., :5] == -INF).all() and lse[..., 5:].isfinite().all()
    out, lse, _ = fa.flash_attn_func(q, k[:, :0], v[:, :0], return_attn_probs=True)
    assert not out.any() and (lse == -INF).all()


@pytest.mark.parametrize("name", ["plain", "causal", "window", "all"])
def test_packed(name):
    q, k, v = qkv(2, 6, 6, 4, 4, 16)
    options = fa2_options(**options_of(name, 4, 2))
    wanted = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    for got in (
        fa.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), return_attn_probs=True, **options),
        fa.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), return_attn_probs=True, **options),
    ):
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x, y)
    q, k, v = qkv(*SHAPES["more keys"])
    options = fa2_options(**options_of(name, 6, 2))
    got = fa.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options)
    torch.testing.assert_close(got, fa.flash_attn_func(q, k, v, **options))


def test_every_argument_by_position():
    q, k, v = qkv(2, 6, 6, 4, 4, 16)
    slopes = randn(4, seed=5).abs()
    tail = (0.0, 0.4, True, (3, -1), 2.0, slopes, True, True)
    options = {"scale": 0.4, "causal": True, "window": (3, -1), "softcap": 2.0, "slopes": slopes}
    wanted = dense(q.double(), k.double(), v.double(), **options)
    cu = ints(0, 6, 12)
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    for got in (
        fa.flash_attn_func(q, k, v, *tail),
        fa.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), *tail),
        fa.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), *tail),
    ):
        torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-5, atol=1e-5)
    for got in (
        fa.flash_attn_varlen_func(*packed, cu, cu, 6, 6, *tail),
        fa.flash_attn_varlen_kvpacked_func(packed[0], torch.stack(packed[1:], 1), cu, cu, 6, 6, *tail),
        fa.flash_attn_varlen_qkvpacked_func(torch.stack(packed, 1), cu, 6, *tail),
    ):
        torch.testing.assert_close(got[0].double(), wanted[0].flatten(0, 1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1].double(), wanted[1].transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)
    cache = fa.flash_attn_with_kvcache(
        q, k, v, None, None, None, None, 6, ints(0, 1), None, None, 0.4, True, (3, -1), 2.0, True, slopes, 2, True
    )
    torch.testing.assert_close(cache[0].double(), wanted[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [[2, -1], torch.tensor([2, -1]), (torch.tensor(2), -1), (np.int64(2), np.int32(-1))])
def test_forms_of_a_window(window):
    q, k, v = qkv(*SHAPES["square"])
    wanted = fa.flash_attn_func(q, k, v, window_size=(2, -1))
    assert torch.equal(fa.flash_attn_func(q, k, v, window_size=window), wanted)
    torch.testing.assert_close(fa.flash_attn_with_kvcache(q, k, v, window_size=window), wanted)
    assert (fa.flash_attn_func(q, k, v) - wanted).abs().max() > 0.01


@pytest.mark.parametrize("softcap", [0, -1.0, -0.0])
def test_softcap_is_off_from_zero_downwards(softcap):
    q, k, v = qkv(*SHAPES["square"])
    wanted = fa.flash_attn_func(q, k, v)
    assert torch.equal(fa.flash_attn_func(q, k, v, softcap=softcap), wanted)
    assert torch.equal(fa.flash_attn_with_kvcache(q, k, v, softcap=softcap), fa.flash_attn_with_kvcache(q, k, v))


# ---------------------------------------------------------------- varlen
BATCHES = {  # lengths of queries, lengths of keys, tokens behind the last offset
    "usual": ([3, 5, 1], [4, 5, 7], 0),
    "empty": ([2, 0, 3, 4], [3, 2, 0, 2], 0),
    "tail": ([3, 2], [3, 4], 2),
    "single": ([4], [6], 0),
}


def packed_qkv(lengths_q, lengths_k, tail, heads=4, heads_kv=2, dim=16):
    q = randn(sum(lengths_q) + tail, heads, dim, seed=1)
    k, v = (randn(sum(lengths_k) + tail, heads_kv, dim, seed=n) for n in (2, 3))
    return q, k, v, *(ints(0, *np.cumsum(n).tolist()) for n in (lengths_q, lengths_k)), max(lengths_q), max(lengths_k)


def varlen(q, k, v, cu_q, cu_k, **options):
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), -INF)
    for b in range(len(cu_q) - 1):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_q, cu_k))
        out[rows], lse[:, rows] = one(q[rows], k[keys], v[keys], b, **options)
    return out, lse


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("batch", BATCHES)
def test_varlen(batch, name):
    q, k, v, cu_q, cu_k, max_q, max_k = packed_qkv(*BATCHES[batch])
    options = options_of(name, 4, len(cu_q) - 1)
    got = fa.flash_attn_varlen_func(
        *(q, k, v, cu_q, cu_k, max_q, max_k), return_attn_probs=True, **fa2_options(**options)
    )
    assert got[1].shape == (4, len(q)) and got[1].dtype == torch.float32 and got[2].shape == (0,)
    close("out lse", got[:2], lambda of: varlen(q.to(of), k.to(of), v.to(of), cu_q, cu_k, **options))
    kv = torch.stack([k, v], 1)
    lengths = (cu_q, cu_k, max_q, max_k)
    again = fa.flash_attn_varlen_kvpacked_func(q, kv, *lengths, **fa2_options(**options))
    torch.testing.assert_close(again, got[0])


@pytest.mark.parametrize("name", ["plain", "causal", "all"])
def test_varlen_of_one_tensor(name):
    cu = ints(0, 3, 3, 8)
    qkv = randn(8, 3, 4, 16)
    options = options_of(name, 4, 3)
    got = fa.flash_attn_varlen_qkvpacked_func(qkv, cu, 5, return_attn_probs=True, **fa2_options(**options))
    close("out lse", got[:2], lambda of: varlen(*qkv.to(of).unbind(1), cu, cu, **options))


def in_pages(k, v, cu_k, page_size, spare=2):
    """Packed keys and values in pages in a random order; NaN where no token is, and page ids that are none."""
    lengths = cu_k.diff().tolist()
    columns = [-(-n // page_size) for n in lengths]
    total = sum(columns) + spare
    order = torch.randperm(total, generator=torch.Generator().manual_seed(3))
    table = torch.full((len(lengths), max([*columns, 1])), -7, dtype=torch.int32)
    caches = [torch.full((total, page_size, *t.shape[1:]), NAN) for t in (k, v)]
    next_page = 0
    for b, n in enumerate(lengths):
        for j in range(n):
            if j % page_size == 0:
                table[b, j // page_size] = order[next_page]
                next_page += 1
            for cache, t in zip(caches, (k, v), strict=True):
                cache[table[b, j // page_size], j % page_size] = t[int(cu_k[b]) + j]
    return *caches, table


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "alibi of each", "all"])
@pytest.mark.parametrize("batch", BATCHES)
def test_varlen_in_pages(batch, name, page_size):
    q, k, v, cu_q, cu_k, max_q, max_k = packed_qkv(*BATCHES[batch])
    options = options_of(name, 4, len(cu_q) - 1)
    k_pages, v_pages, table = in_pages(k, v, cu_k, page_size)
    arguments = (q, k_pages, v_pages, cu_q, cu_k, max_q, max_k)
    call = {**fa2_options(**options), "block_table": table}
    got = fa.flash_attn_varlen_func(*arguments, return_attn_probs=True, **call)
    assert got[2].shape == (0,)
    close("out lse", got[:2], lambda of: varlen(q.to(of), k.to(of), v.to(of), cu_q, cu_k, **options))
    torch.testing.assert_close(fa.flash_attn_varlen_func(*arguments, **call), got[0])


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", ["square", "more keys", "fewer keys"])
def test_gradients(shape, name):
    q, k, v = qkv(*SHAPES[shape])
    options = options_of(name, q.shape[2], len(q))
    seed = randn(*q.shape, seed=9)

    def wanted(of):
        inputs = [t.to(of).requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(dense(*inputs, **options)[0], inputs, seed.to(of))

    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    out = fa.flash_attn_func(*inputs, **fa2_options(**options))
    got = torch.autograd.grad(out, inputs, seed)
    for n, (x, truth, plain) in enumerate(zip(got, wanted(torch.float64), wanted(torch.float32), strict=True)):
        assert_close(f"gradient {n}", x, truth, plain, among=wanted(torch.float64))


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_packed_tensors(deterministic):
    q, k, v = qkv(2, 6, 6, 4, 4, 16)
    seed, cu = randn(*q.shape, seed=9), ints(0, 6, 12)

    def gradients(fn, *inputs):
        inputs = [t.clone().requires_grad_() for t in inputs]
        out = fn(*inputs)
        return torch.autograd.grad(out, inputs, seed.view(out.shape))

    options = {"causal": True, "window_size": (3, -1), "deterministic": deterministic}
    dq, dk, dv = gradients(lambda *x: fa.flash_attn_func(*x, **options), q, k, v)
    truth = [t.double().requires_grad_() for t in (q, k, v)]
    by_definition = torch.autograd.grad(dense(*truth, causal=True, window=(3, -1))[0], truth, seed.double())
    for got, wanted in zip((dq, dk, dv), by_definition, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    kv, three = torch.stack([dk, dv], 2), torch.stack([dq, dk, dv], 2)
    pairs = [
        (lambda *x: fa.flash_attn_kvpacked_func(*x, **options), (q, torch.stack([k, v], 2)), (dq, kv)),
        (lambda x: fa.flash_attn_qkvpacked_func(x, **options), (torch.stack([q, k, v], 2),), (three,)),
        (lambda *x: fa.flash_attn_varlen_func(*x, cu, cu, 6, 6, **options), flat, (dq, dk, dv)),
        (
            lambda *x: fa.flash_attn_varlen_kvpacked_func(*x, cu, cu, 6, 6, **options),
            (flat[0], torch.stack(flat[1:], 1)),
            (dq, kv),
        ),
        (lambda x: fa.flash_attn_varlen_qkvpacked_func(x, cu, 6, **options), (torch.stack(flat, 1),), (three,)),
    ]
    for fn, inputs, wanted in pairs:
        for x, y in zip(gradients(fn, *inputs), wanted, strict=True):
            torch.testing.assert_close(x, y.view(x.shape), rtol=1e-4, atol=1e-5)


def test_gradient_of_softmax_lse():
    q, k, v = qkv(*SHAPES["more keys"])
    inputs = [t.requires_grad_() for t in (q, k)]
    _, lse, _ = fa.flash_attn_func(*inputs, v, causal=True, return_attn_probs=True)
    doubles = [t.detach().double().requires_grad_() for t in (q, k)]
    wanted = torch.autograd.grad(dense(*doubles, v.double(), causal=True)[1].sum(), doubles)
    for x, y in zip(torch.autograd.grad(lse.sum(), inputs), wanted, strict=True):
        assert y.abs().max() > 0.01
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- dropout
@pytest.mark.parametrize("name", ["plain", "causal", "all"])
@pytest.mark.parametrize("dropout_p", [0.25, 0.6, 1.0])
def test_dropout_and_s_dmask(name, dropout_p):
    """S_dmask is the softmax, negative where the weight was dropped, and says exactly which out is made of."""
    q, k, v = (t.requires_grad_() for t in qkv(2, 9, 12, 4, 2, 16))
    options = options_of(name, 4, 2)
    out, lse, s_dmask = fa.flash_attn_func(q, k, v, dropout_p, return_attn_probs=True, **fa2_options(**options))
    assert s_dmask.shape == (2, 4, 9, 12) and not s_dmask.requires_grad
    detached = [t.detach().double() for t in (q, k, v)]
    weights = torch.stack([softmax_rows(a, b, **options)[0] for a, b in zip(*detached[:2], strict=True)])
    torch.testing.assert_close(s_dmask.abs().double(), weights, rtol=1e-5, atol=1e-6)
    kept = ~s_dmask.signbit()
    shown = kept[weights > 0].double().mean()
    assert shown == pytest.approx(1 - dropout_p, abs=0.1 if dropout_p < 1 else 0)
    keep = kept.double() / (1 - dropout_p) if dropout_p < 1 else 0.0 * kept
    doubles = [t.requires_grad_() for t in detached]
    wanted, wanted_lse = dense(*doubles, keep, **options)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    seed = randn(*out.shape, seed=9)
    grads = torch.autograd.grad(out, (q, k, v), seed)
    for x, y in zip(grads, torch.autograd.grad(wanted, doubles, seed.double()), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", BATCHES)
def test_dropout_and_s_dmask_of_varlen(batch):
    q, k, v, cu_q, cu_k, max_q, max_k = packed_qkv(*BATCHES[batch])
    lengths = (cu_q, cu_k, max_q, max_k)
    out, _, s_dmask = fa.flash_attn_varlen_func(q, k, v, *lengths, 0.4, causal=True, return_attn_probs=True)
    assert s_dmask.shape == (len(cu_q) - 1, 4, max_q, max_k)
    wanted = torch.zeros_like(out, dtype=torch.float64)
    for b in range(len(cu_q) - 1):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_q, cu_k))
        n, m = int(cu_q[b + 1] - cu_q[b]), int(cu_k[b + 1] - cu_k[b])
        mine = s_dmask[b, :, :n, :m]
        weights, _ = softmax_rows(q[rows].double(), k[keys].double(), causal=True)
        torch.testing.assert_close(mine.abs().double(), weights, rtol=1e-5, atol=1e-6)
        assert s_dmask[b].count_nonzero() == mine.count_nonzero()
        keep = (~mine.signbit()).double() / 0.6
        wanted[rows] = one(q[rows].double(), k[keys].double(), v[keys].double(), keep=keep, causal=True)[0]
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


def test_dropout_follows_torchs_seed():
    q, k, v = qkv(1, 16, 16, 2, 2, 16)
    found = []
    for probs in (False, True, True):
        torch.manual_seed(3)
        result = fa.flash_attn_func(q, k, v, 0.5, return_attn_probs=probs)
        found.append(result[0] if probs else result)
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
    assert not torch.equal(fa.flash_attn_func(q, k, v, 0.5), found[0])


def test_dropout_in_pages():
    q, k, v, cu_q, cu_k, max_q, max_k = packed_qkv([40], [40], 0)
    v = torch.ones_like(v)
    k_pages, v_pages, table = in_pages(k, v, cu_k, 8)
    arguments = (q, k_pages, v_pages, cu_q, cu_k, max_q, max_k)
    out = fa.flash_attn_varlen_func(*arguments, dropout_p=0.5, block_table=table)
    assert out.std() > 0.01 and out.mean() == pytest.approx(1, abs=0.1)
    with pytest.raises(xattn.UnsupportedError, match="return_attn_probs: got True with dropout_p and block_table"):
        fa.flash_attn_varlen_func(*arguments, dropout_p=0.5, return_attn_probs=True, block_table=table)


# ---------------------------------------------------------------- with a cache
class Sequences:
    """A cache in one of the layouts, and what FlashAttention 2 would find in it, as lists of tokens."""

    LAYOUTS = ("dense", "larger", "rows", "pages of 4", "pages of 1", "slice", "heads first", "packed")

    def __init__(self, layout, lengths, room, leftpad=None, heads_kv=2, dim=16, dtype=torch.float32):
        batch = len(lengths)
        self.lengths, self.leftpad = lengths, leftpad or [0] * batch
        self.call: dict = {}
        shape = (room, heads_kv, dim)
        if layout.startswith("pages of"):
            size = int(layout.split()[-1])
            columns = -(-room // size)
            ids = torch.randperm(batch * columns + 2, generator=torch.Generator().manual_seed(8))
            table = ids[: batch * columns].view(batch, columns).int()
            caches = [torch.full((len(ids), size, *shape[1:]), NAN, dtype=dtype) for _ in "kv"]
            self.call["block_table"] = table
            self.place = lambda b, j: (int(table[b, j // size]), j % size)
        else:
            rows = list(range(batch))
            count = batch
            if layout == "larger":
                count = batch + 2
            if layout == "rows":
                count, rows = batch + 2, [batch + 1, *range(batch - 1)]
                self.call["cache_batch_idx"] = ints(*rows)
            if layout == "slice":
                caches = [torch.full((count, room + 3, *shape[1:]), NAN, dtype=dtype)[:, 2 : room + 2] for _ in "kv"]
            elif layout == "heads first":
                full = (count, heads_kv, room, dim)
                caches = [torch.full(full, NAN, dtype=dtype).transpose(1, 2) for _ in "kv"]
            elif layout == "packed":
                both = torch.full((count, room, 2, *shape[1:]), NAN, dtype=dtype)
                caches = list(both.unbind(2))
            else:
                caches = [torch.full((count, *shape), NAN, dtype=dtype) for _ in "kv"]
            self.place = lambda b, j: (rows[b], j)
        self.k_cache, self.v_cache = caches
        self.k, self.v = (randn(batch, room, heads_kv, dim, seed=n, dtype=dtype) for n in (11, 12))
        for b, n in enumerate(lengths):
            for j in range(self.leftpad[b], n):
                self.k_cache[self.place(b, j)], self.v_cache[self.place(b, j)] = self.k[b, j], self.v[b, j]
        if leftpad is not None:
            self.call["cache_leftpad"] = ints(*leftpad)

    def expected(self, q, k, v, dtype, rotary=None, each=False, **options):
        """out, lse, and the keys and values of each sequence, new ones included."""
        outs, lses, keys, values = [], [], [], []
        for b, n in enumerate(self.lengths):
            mine = self.k[b, self.leftpad[b] : n].to(dtype), self.v[b, self.leftpad[b] : n].to(dtype)
            turned = q[b].to(dtype)
            if rotary is not None:
                turned = rotate(turned, [n + (i if each else 0) for i in range(q.shape[1])], *rotary).to(q.dtype)
            if k is not None:
                new = k[b].to(dtype)
                if rotary is not None:
                    new = rotate(new, [n + i for i in range(k.shape[1])], *rotary)
                mine = torch.cat([mine[0], new.to(k.dtype).to(dtype)]), torch.cat([mine[1], v[b].to(dtype)])
            out, lse = one(turned.to(dtype), *mine, b, **options)
            outs.append(out)
            lses.append(lse)
            keys.append(mine[0])
            values.append(mine[1])
        return torch.stack(outs), torch.stack(lses), keys, values

    def check_caches(self, before, k, keys, values):
        """The new tokens stand where they belong, and nothing else was touched."""
        for cache, old, wanted in zip((self.k_cache, self.v_cache), before, (keys, values), strict=True):
            for b, n in enumerate(self.lengths):
                for i in range(0 if k is None else k.shape[1]):
                    at = self.place(b, n + i)
                    new = wanted[b][n - self.leftpad[b] + i].to(cache.dtype)
                    torch.testing.assert_close(cache[at], new, rtol=1e-6, atol=1e-6)
                    old[at] = cache[at]
            assert torch.equal(cache.nan_to_num(nan=12345.0), old.nan_to_num(nan=12345.0))


def rotate(x, positions, cos, sin, interleaved):
    """x (tokens, heads, d), channel by channel."""
    out, width = x.clone(), cos.shape[1]
    for t, position in enumerate(positions):
        for n in range(width):
            a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + width)
            c, s = cos[position, n].to(x.dtype), sin[position, n].to(x.dtype)
            out[t, :, a], out[t, :, b] = x[t, :, a] * c - x[t, :, b] * s, x[t, :, a] * s + x[t, :, b] * c
    return out


def angles(positions, width, dtype=torch.float32):
    at = torch.arange(positions)[:, None] * 0.7 ** torch.arange(width) + 0.2
    return at.cos().to(dtype), at.sin().to(dtype)


def check_cache(sequences, q, k, v, rotary=None, seqlens=None, num_splits=0, name="plain"):
    options = options_of(name, q.shape[2], len(q))
    call = {**sequences.call, **fa2_options(**options), "num_splits": num_splits}
    if rotary is not None:
        call |= {"rotary_cos": rotary[0], "rotary_sin": rotary[1], "rotary_interleaved": rotary[2]}
    each = options.get("causal", False) or options.get("window", (-1, -1)) != (-1, -1)
    before = [c.clone() for c in (sequences.k_cache, sequences.v_cache)]
    caches = (sequences.k_cache, sequences.v_cache)
    seqlens = ints(*sequences.lengths) if seqlens is None else seqlens
    found = fa.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=seqlens, return_softmax_lse=True, **call)
    kept = seqlens.tolist() if isinstance(seqlens, Tensor) else None
    assert kept is None or kept == sequences.lengths

    def wanted(dtype):
        return sequences.expected(q, k, v, dtype, rotary, each, **options)

    assert found[1].dtype == torch.float32 and found[1].shape == (len(q), q.shape[2], q.shape[1])
    assert not found[0].requires_grad
    close("out lse", found, lambda dtype: wanted(dtype)[:2])
    sequences.check_caches(before, k, *wanted(torch.float64)[2:])


def new_tokens(batch, seqlen_q, seqlen_new, heads=4, heads_kv=2, dim=16, dtype=torch.float32):
    q = randn(batch, seqlen_q, heads, dim, seed=1, dtype=dtype)
    if seqlen_new is None:
        return q, None, None
    return q, *(randn(batch, seqlen_new, heads_kv, dim, seed=n, dtype=dtype) for n in (2, 3))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("new", [None, 1, 3])
@pytest.mark.parametrize("layout", ["dense", "rows", "pages of 4"])
def test_cache(layout, new, name):
    sequences = Sequences(layout, [5, 0, 9], 12)
    check_cache(sequences, *new_tokens(3, new or 2, new), name=name)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("width", [8, 3, 1])
@pytest.mark.parametrize("name", ["plain", "causal", "left", "right", "all"])
@pytest.mark.parametrize("seqlen_q, new", [(1, 1), (3, 3), (4, 2), (2, 5)])
def test_rotary(seqlen_q, new, name, width, interleaved):
    """Queries stand each at its own position with causal or a window, else all at the first new one."""
    sequences = Sequences("pages of 4", [5, 0, 7], 12)
    check_cache(sequences, *new_tokens(3, seqlen_q, new), rotary=(*angles(12, width), interleaved), name=name)


@pytest.mark.parametrize("layout", [n for n in Sequences.LAYOUTS if n != "heads first"])
@pytest.mark.parametrize("new", [None, 3])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "alibi of each", "all"])
def test_leftpad(layout, new, name):
    sequences = Sequences(layout, [5, 6, 9], 12, leftpad=[2, 0, 9])
    check_cache(sequences, *new_tokens(3, 3, new), name=name)


@pytest.mark.parametrize("layout", ["dense", "rows", "pages of 4"])
@pytest.mark.parametrize("name", ["plain", "causal"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_leftpad_with_rotary(layout, name, interleaved):
    """Positions are those in the cache, the padding included."""
    sequences = Sequences(layout, [5, 6, 9], 12, leftpad=[2, 0, 9])
    check_cache(sequences, *new_tokens(3, 3, 3), rotary=(*angles(12, 4), interleaved), name=name)


@pytest.mark.parametrize("layout", Sequences.LAYOUTS)
@pytest.mark.parametrize("new", [None, 4])
def test_layouts(layout, new):
    check_cache(Sequences(layout, [5, 0, 8], 12), *new_tokens(3, 4, new), name="causal")


def test_leftpad_of_heads_that_lie_apart():
    check_cache(Sequences("heads first", [5, 6], 12, leftpad=[2, 0]), *new_tokens(2, 2, None), name="causal")
    sequences = Sequences("heads first", [5, 6], 12, leftpad=[2, 0])
    q, k, v = new_tokens(2, 2, 2)
    before = sequences.k_cache.clone()
    with pytest.raises(xattn.UnsupportedError, match="cache_leftpad: got a cache of shape"):
        fa.flash_attn_with_kvcache(
            q, sequences.k_cache, sequences.v_cache, k, v, cache_seqlens=ints(5, 6), **sequences.call
        )
    assert torch.equal(before.nan_to_num(), sequences.k_cache.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cache_dtypes(dtype):
    sequences = Sequences("pages of 4", [5, 2], 12, dtype=dtype)
    q, k, v = new_tokens(2, 3, 3, dtype=dtype)
    found = fa.flash_attn_with_kvcache(
        q, sequences.k_cache, sequences.v_cache, k, v, cache_seqlens=ints(5, 2), causal=True, **sequences.call
    )
    close("out", (found,), lambda of: sequences.expected(q, k, v, of, causal=True)[:1])


@pytest.mark.parametrize("heads, heads_kv, dim", [(6, 2, 24), (8, 1, 8), (3, 3, 7)])
def test_cache_heads(heads, heads_kv, dim):
    sequences = Sequences("rows", [5, 0, 9], 12, heads_kv=heads_kv, dim=dim)
    check_cache(sequences, *new_tokens(3, 2, 2, heads, heads_kv, dim), name="causal")


@pytest.mark.parametrize("new", [None, 2])
@pytest.mark.parametrize("seqlens", [5, np.int64(5), torch.tensor([5, 5]), ints(5, 5)], ids=repr)
def test_forms_of_cache_seqlens(seqlens, new):
    check_cache(Sequences("dense", [5, 5], 8), *new_tokens(2, 2, new), seqlens=seqlens, name="causal")


@pytest.mark.parametrize("layout", ["dense", "pages of 4"])
@pytest.mark.parametrize("leftpad", [None, [3, 1]])
def test_without_cache_seqlens_the_cache_is_full(layout, leftpad):
    sequences = Sequences(layout, [8, 8], 8, leftpad=leftpad)
    q, _, _ = new_tokens(2, 3, None)
    found = fa.flash_attn_with_kvcache(q, sequences.k_cache, sequences.v_cache, causal=True, **sequences.call)
    close("out", (found,), lambda of: sequences.expected(q, None, None, of, causal=True)[:1])


@pytest.mark.parametrize("num_splits", [0, 1, 3, 128])
def test_num_splits(num_splits):
    check_cache(Sequences("dense", [5, 9], 12), *new_tokens(2, 2, 2), num_splits=num_splits)


def test_empty_cache_rows():
    sequences = Sequences("dense", [0, 4], 8)
    q, _, _ = new_tokens(2, 2, None)
    out, lse = fa.flash_attn_with_kvcache(
        q, sequences.k_cache, sequences.v_cache, cache_seqlens=ints(0, 4), return_softmax_lse=True
    )
    assert not out[0].any() and (lse[0] == -INF).all() and lse[1].isfinite().all()


def test_parameters_may_require_gradients():
    """As in FlashAttention 2, whose cache function has no backward either."""
    sequences = Sequences("dense", [4, 2], 8)
    q, k, v = (t.requires_grad_() for t in new_tokens(2, 2, 2))
    out = fa.flash_attn_with_kvcache(q, sequences.k_cache, sequences.v_cache, k, v, cache_seqlens=ints(4, 2))
    assert not out.requires_grad and not sequences.k_cache.requires_grad
    assert torch.equal(sequences.k_cache[0, 4:6], k[0])


# ---------------------------------------------------------------- torch.compile
def test_compiled():
    q, k, v = qkv(*SHAPES["more keys"])
    compiled = torch.compile(fa.flash_attn_func, backend="eager", fullgraph=True)
    options = {"causal": True, "window_size": (2, -1), "softcap": 3.0}
    torch.testing.assert_close(compiled(q, k, v, **options), fa.flash_attn_func(q, k, v, **options))


def test_compiled_with_a_cache():
    compiled = torch.compile(fa.flash_attn_with_kvcache, backend="eager", fullgraph=True)
    q, k, v = new_tokens(2, 2, 2)
    found = []
    for fn in (compiled, fa.flash_attn_with_kvcache):
        sequences = Sequences("rows", [5, 3], 8, leftpad=[1, 2])
        cos, sin = angles(8, 4)
        caches = (sequences.k_cache, sequences.v_cache)
        call = {"cache_seqlens": ints(5, 3), "rotary_cos": cos, "rotary_sin": sin, "causal": True, **sequences.call}
        found.append((fn(q, *caches, k, v, **call), *(c.nan_to_num() for c in caches)))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


# ---------------------------------------------------------------- errors
Q, K, V = qkv(2, 4, 6, 4, 2, 16)
PACKED = packed_qkv([3, 5], [4, 5], 0)
SELF = randn(2, 4, 3, 4, 16)


def refuse(fn, args, changed, error, words):
    bound = inspect.signature(fn).bind(*args)
    with pytest.raises(error, match=words):
        fn(**{**bound.arguments, **changed})


@pytest.mark.parametrize(
    "changed, error, words",
    [
        ({"q": None}, TypeError, "^q: got NoneType"),
        ({"q": Q[0]}, ValueError, "^q: got shape"),
        ({"k": K[:, :, :1]}, ValueError, "^v: got shape"),
        ({"k": K[..., :8]}, ValueError, "^k: got shape"),
        ({"v": V.double()}, TypeError, "^v: got fp64"),
        ({"dropout_p": 1.5}, ValueError, "^dropout_p: got 1.5"),
        ({"dropout_p": "no"}, TypeError, "^dropout_p: got str"),
        ({"softmax_scale": NAN}, ValueError, "^softmax_scale: got nan"),
        ({"causal": 1}, TypeError, "^causal: got int"),
        ({"window_size": (7, -8)}, ValueError, "^window_size: got -8; allowed: a whole number from -1"),
        ({"window_size": torch.ones(2, device="meta")}, TypeError, r"^window_size: got tensor\("),
        ({"window_size": (torch.ones(2), 0)}, TypeError, r"^window_size: got \(tensor\("),
        ({"window_size": (1, 2, 3)}, TypeError, r"^window_size: got \(1, 2, 3\)"),
        ({"window_size": None}, TypeError, "^window_size: got None"),
        ({"window_size": (1.5, 0)}, TypeError, "^window_size: got float"),
        ({"softcap": NAN}, ValueError, "^softcap: got nan"),
        ({"softcap": None}, TypeError, "^softcap: got NoneType"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, "^alibi_slopes: got shape"),
        ({"alibi_slopes": torch.ones(4, dtype=torch.int32)}, TypeError, "^alibi_slopes: got torch.int32"),
        ({"deterministic": None}, TypeError, "^deterministic: got NoneType"),
        ({"return_attn_probs": 1}, TypeError, "^return_attn_probs: got int"),
    ],
)
def test_refuses(changed, error, words):
    refuse(fa.flash_attn_func, (Q, K, V), changed, error, words)


@pytest.mark.parametrize(
    "name, args, changed, error, words",
    [
        ("kvpacked_func", (Q, torch.stack([K, V], 2)), {"kv": K}, ValueError, "^kv: got shape"),
        ("kvpacked_func", (Q, torch.stack([K, V], 2)), {"kv": None}, TypeError, "^kv: got NoneType"),
        ("kvpacked_func", (Q, torch.stack([K, V], 2)), {"kv": torch.stack([K] * 3, 2)}, ValueError, "^kv: got shape"),
        ("kvpacked_func", (Q, torch.stack([K, V], 2)), {"q": Q[..., :8]}, ValueError, "^kv: got shape"),
        ("kvpacked_func", (Q, torch.stack([K, V], 2)), {"q": Q.double()}, TypeError, "^kv: got fp32"),
        ("qkvpacked_func", (SELF,), {"qkv": SELF[:, :, :2]}, ValueError, "^qkv: got shape"),
        ("qkvpacked_func", (SELF,), {"qkv": SELF.int()}, TypeError, "^qkv: got int32"),
        ("varlen_func", PACKED, {"q": None}, TypeError, "^q: got NoneType"),
        ("varlen_func", PACKED, {"cu_seqlens_q": ints(0, 3)}, ValueError, "^cu_seqlens_k: got shape"),
        ("varlen_func", PACKED, {"cu_seqlens_k": ints(0, 4, 3)}, ValueError, "^cu_seqlens_k: got"),
        ("varlen_func", PACKED, {"cu_seqlens_k": None}, TypeError, "^cu_seqlens_k: got NoneType"),
        ("varlen_func", PACKED, {"max_seqlen_q": 4}, ValueError, "^max_seqlen_q: got 4"),
        ("varlen_func", PACKED, {"max_seqlen_k": -1}, ValueError, "^max_seqlen_k: got -1"),
        ("varlen_func", PACKED, {"window_size": (0, -2)}, ValueError, "^window_size: got -2"),
        ("varlen_qkvpacked_func", (SELF[0], ints(0, 4), 4), {"max_seqlen": 3}, ValueError, "^max_seqlen: got 3"),
        ("varlen_qkvpacked_func", (SELF[0], ints(0, 4), 4), {"cu_seqlens": ints(0, 5)}, ValueError, "^cu_seqlens: got"),
        ("varlen_qkvpacked_func", (SELF[0], ints(0, 4), 4), {"qkv": SELF}, ValueError, "^qkv: got shape"),
        ("varlen_kvpacked_func", (PACKED[0], torch.stack(PACKED[1:3], 1), *PACKED[3:]), {"kv": K}, ValueError, "^kv:"),
    ],
)  # fmt: skip
def test_refuses_by_the_name_of_what_was_given(name, args, changed, error, words):
    refuse(getattr(fa, f"flash_attn_{name}"), args, changed, error, words)


@pytest.mark.parametrize(
    "changed, error, words",
    [
        ({"block_table": ints(0, 1)}, ValueError, "^block_table: got shape"),
        ({"block_table": "pages"}, TypeError, "^block_table: got str"),
        ({"block_table": torch.full((2, 3), 99)}, ValueError, "^block_table: got 99"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, ValueError, "^cu_seqlens_k: got"),
        ({"cu_seqlens_k": ints(0, 4, 2)}, ValueError, "^cu_seqlens_k: got"),
        ({"cu_seqlens_k": ints(0)[:0]}, ValueError, "^cu_seqlens_k: got shape"),
        ({"cu_seqlens_q": ints(0, 3, 9)}, ValueError, "^cu_seqlens_q: got"),
        ({"k": K[0]}, ValueError, "^k: got shape"),
        ({"max_seqlen_k": 2}, ValueError, "^max_seqlen_k: got 2"),
        ({"q": PACKED[0].clone().requires_grad_()}, ValueError, "^q: got a tensor that requires a gradient"),
        ({"k": "pages", "v": "pages"}, TypeError, "^k: got str"),
    ],
)
def test_refuses_pages_of_varlen(changed, error, words):
    k_pages, v_pages, table = in_pages(*PACKED[1:3], PACKED[4], 2)
    args = (PACKED[0], k_pages, v_pages, *PACKED[3:])
    refuse(fa.flash_attn_varlen_func, args, {"block_table": table, **changed}, error, words)


COS, SIN = angles(12, 4)
WIDE = torch.ones(12, 9)
ROTARY = {"rotary_cos": COS, "rotary_sin": SIN}
NEW = new_tokens(2, 3, 3)
REFUSED_OF_A_CACHE = {
    "q": ({"q": None}, TypeError, "^q: got NoneType"),
    "q, dimensions": ({"q": NEW[0][0]}, ValueError, "^q: got shape"),
    "q, heads": ({"q": NEW[0][:, :, :3]}, ValueError, "^q: got 3 heads"),
    "k_cache": ({"k_cache": "cache"}, TypeError, "^k_cache: got str"),
    "k_cache, dtype": ({"k_cache": torch.zeros(2, 12, 2, 16).half()}, TypeError, "^(v_cache|k_cache|k): got"),
    "k_cache, width": ({"k_cache": torch.zeros(2, 12, 2, 8), "v_cache": torch.zeros(2, 12, 2, 8)}, ValueError, "^k"),
    "k_cache, batch": ({"q": torch.cat([NEW[0]] * 2), "k": None, "v": None, "cache_seqlens": 4}, ValueError, "^k_ca"),
    "k_cache, expanded": ({"k_cache": torch.zeros(1, 12, 2, 16).expand(2, -1, -1, -1)}, ValueError, "^k_cache: got s"),
    "v_cache": ({"v_cache": torch.zeros(2, 11, 2, 16)}, ValueError, "^v_cache: got shape"),
    "k": ({"k": None}, TypeError, "^k: got NoneType"),
    "k, batch": ({"k": NEW[1][:1]}, ValueError, "^k: got shape"),
    "k, heads": ({"k": NEW[1][:, :, :1]}, ValueError, "^k: got shape"),
    "k, dtype": ({"k": NEW[1].double()}, TypeError, "^k: got torch.float64"),
    "v": ({"v": None}, TypeError, "^v: got NoneType"),
    "v, length": ({"v": NEW[2][:, :2]}, ValueError, "^v: got shape"),
    "rotary_cos": ({"rotary_sin": SIN}, TypeError, "^rotary_cos: got NoneType"),
    "rotary_sin": ({"rotary_cos": COS}, TypeError, "^rotary_sin: got NoneType"),
    "rotary_sin, shape": ({"rotary_cos": COS, "rotary_sin": SIN[:, :2]}, ValueError, "^rotary_sin: got shape"),
    "rotary, too wide": ({"rotary_cos": WIDE, "rotary_sin": WIDE}, ValueError, "^rotary_cos: got rotary_dim 18"),
    "rotary, too short": ({"rotary_cos": COS[:6], "rotary_sin": SIN[:6]}, ValueError, "^rotary_cos: got 6"),
    "rotary, nothing new": ({**ROTARY, "k": None, "v": None}, ValueError, "^k: got None; allowed: a tensor, where"),
    "rotary_interleaved": ({**ROTARY, "rotary_interleaved": 1}, TypeError, "^rotary_interleaved: got int"),
    "cache_seqlens": ({"cache_seqlens": None}, ValueError, "^cache_seqlens: got None; allowed: an int or a tensor"),
    "cache_seqlens, float": ({"cache_seqlens": 1.5}, TypeError, "^cache_seqlens: got float"),
    "cache_seqlens, dtype": ({"cache_seqlens": torch.ones(2)}, TypeError, "^cache_seqlens: got torch.float32"),
    "cache_seqlens, shape": ({"cache_seqlens": ints(1, 2, 3)}, ValueError, "^cache_seqlens: got shape"),
    "cache_seqlens, negative": ({"cache_seqlens": ints(-1, 2)}, ValueError, "^cache_seqlens: got -1"),
    "cache_seqlens, int negative": ({"cache_seqlens": -1}, ValueError, "^cache_seqlens: got -1"),
    "no room": ({"cache_seqlens": ints(4, 10)}, ValueError, "^(k|cache_seqlens): got"),
    "no room, leftpad": (
        {"cache_seqlens": ints(4, 10), "cache_leftpad": ints(0, 4)}, ValueError, "^cache_seqlens: got 10"),
    "too long": ({"cache_seqlens": 13, "k": None, "v": None}, ValueError, "^cache_seqlens: got 13"),
    "cache_batch_idx": ({"cache_batch_idx": ints(0, 2)}, ValueError, "^cache_batch_idx: got 2"),
    "cache_batch_idx, leftpad": (
        {"cache_batch_idx": ints(0, 2), "cache_leftpad": ints(0, 1)}, ValueError, "^cache_batch_idx: got 2"),
    "cache_batch_idx, shape": ({"cache_batch_idx": ints(0)}, ValueError, "^cache_batch_idx: got shape"),
    "cache_batch_idx, dtype": ({"cache_batch_idx": torch.ones(2)}, TypeError, "^cache_batch_idx: got torch.float32"),
    "cache_batch_idx, list": ({"cache_batch_idx": [0, 1]}, TypeError, "^cache_batch_idx: got list"),
    "cache_batch_idx, pages": (
        {"cache_batch_idx": ints(0, 1), "block_table": ints(0, 1)[:, None]}, ValueError, "^cache_batch_idx: got a"),
    "cache_leftpad": ({"cache_leftpad": ints(0, 5)}, ValueError, "^cache_leftpad: got 5"),
    "cache_leftpad, negative": ({"cache_leftpad": ints(-1, 2)}, ValueError, "^cache_leftpad: got -1"),
    "cache_leftpad, shape": ({"cache_leftpad": ints(1)}, ValueError, "^cache_leftpad: got shape"),
    "cache_leftpad, strides": (
        {"v_cache": torch.zeros(2, 15, 2, 16)[:, :12], "cache_leftpad": ints(1, 2)},
        xattn.UnsupportedError, "^cache_leftpad: got strides"),
    "block_table": ({"block_table": ints(0, 1)}, ValueError, "^block_table: got shape"),
    "block_table, page": ({"block_table": ints(0, 2)[:, None]}, ValueError, "^block_table: got 2"),
    "block_table, leftpad": (
        {"block_table": ints(0, -1)[:, None], "cache_leftpad": ints(0, 1)}, ValueError, "^block_table: got -1"),
    "softmax_scale": ({"softmax_scale": "no"}, TypeError, "^softmax_scale: got str"),
    "causal": ({"causal": None}, TypeError, "^causal: got NoneType"),
    "window_size": ({"window_size": (-3, 0)}, ValueError, "^window_size: got -3"),
    "softcap": ({"softcap": "no"}, TypeError, "^softcap: got str"),
    "alibi_slopes": ({"alibi_slopes": torch.ones(5)}, ValueError, "^alibi_slopes: got shape"),
    "num_splits": ({"num_splits": -1}, ValueError, "^num_splits: got -1"),
    "return_softmax_lse": ({"return_softmax_lse": 1}, TypeError, "^return_softmax_lse: got int"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_OF_A_CACHE)
def test_refuses_of_a_cache_before_anything_is_written(name):
    changed, error, words = REFUSED_OF_A_CACHE[name]
    caches = {"k_cache": torch.zeros(2, 12, 2, 16), "v_cache": torch.zeros(2, 12, 2, 16)}
    given = {"q": NEW[0], **caches, "k": NEW[1], "v": NEW[2], "cache_seqlens": ints(4, 4), **changed}
    with pytest.raises(error, match=words):
        fa.flash_attn_with_kvcache(**given)
    for t in (given["k_cache"], given["v_cache"]):
        assert not isinstance(t, Tensor) or not t.any()


# ---------------------------------------------------------------- bert_padding
def test_padding_there_and_back():
    x = randn(3, 5, 2, 4).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]])
    packed, indices, cu_seqlens, longest, used = padding.unpad_input(x, mask)
    assert indices.tolist() == [0, 1, 11, 12, 14] and cu_seqlens.tolist() == [0, 2, 2, 5]
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert longest == 3 and type(longest) is int and used.tolist() == [2, 0, 3]
    assert torch.equal(packed, x[mask.bool()])
    again = padding.pad_input(packed, indices, 3, 5)
    assert torch.equal(again, x * mask[..., None, None])
    (gradient,) = torch.autograd.grad(again.sum(), x)
    assert torch.equal(gradient, mask[..., None, None].expand(x.shape).float())


def test_padding_that_is_not_used():
    x = randn(2, 4, 3)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0]])
    unused = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]])
    for as_given in (lambda t: t, lambda t: t.bool()):
        packed, indices, cu_seqlens, longest, used = padding.unpad_input(x, as_given(mask), as_given(unused))
        assert indices.tolist() == [0, 1, 4, 5, 7] and cu_seqlens.tolist() == [0, 2, 5]
        assert longest == 3 and used.tolist() == [1, 2] and torch.equal(packed, x.flatten(0, 1)[indices])


# ---------------------------------------------------------------- install
@pytest.fixture
def installed():
    fa.install()
    yield
    fa.uninstall()


def test_install(installed):
    flash_attn = importlib.import_module("flash_attn")
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    bert_padding = importlib.import_module("flash_attn.bert_padding")
    assert flash_attn.flash_attn_interface is interface and flash_attn.bert_padding is bert_padding
    for name in SIGNATURES:
        assert getattr(flash_attn, name) is getattr(interface, name) is getattr(fa, name)
    assert bert_padding.unpad_input is padding.unpad_input and bert_padding.pad_input is padding.pad_input
    assert [int(n) for n in flash_attn.__version__.split(".")[:2]] == [2, 8]
    assert (
        importlib.metadata.version("flash-attn") == importlib.metadata.version("flash_attn") == flash_attn.__version__
    )
    assert importlib.util.find_spec("flash_attn") is flash_attn.__spec__
    assert "flash-attn" in importlib.metadata.packages_distributions()["flash_attn"]


@pytest.mark.parametrize("code", [
    "import flash_attn.layers",
    "from flash_attn.layers.rotary import apply_rotary_emb",
    "from flash_attn.ops.triton.rotary import apply_rotary",
    "from flash_attn import flash_attn_nosuch",
    "from flash_attn.flash_attn_interface import _flash_attn_forward",
    "from flash_attn.bert_padding import unpad_input_for_concatenated_sequences",
])  # fmt: skip
def test_what_is_not_offered_is_an_import_error(installed, code):
    with pytest.raises(ImportError, match=r"flash_attn\.(layers|ops)'|cannot import name '\w+' from 'flash_attn"):
        exec(code)
    with pytest.raises(AttributeError, match="nosuch"):
        _ = sys.modules["flash_attn"].nosuch


def test_install_twice_and_undo():
    before = list(sys.meta_path)
    fa.uninstall()  # without install: nothing to undo
    fa.install()
    first = sys.modules["flash_attn"]
    fa.install()
    assert sys.modules["flash_attn"] is first
    fa.uninstall()
    assert not [n for n in sys.modules if n.split(".")[0] == "flash_attn"] and sys.meta_path == before
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


def test_in_place_of_an_installed_library(tmp_path, monkeypatch):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("from .layers import here\n__version__ = '1.0'\n")
    (package / "layers.py").write_text("here = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = importlib.import_module("flash_attn")
    try:
        layers = sys.modules["flash_attn.layers"]
        fa.install()
        assert importlib.import_module("flash_attn").flash_attn_func is fa.flash_attn_func
        with pytest.raises(ImportError):
            importlib.import_module("flash_attn.layers")
        fa.uninstall()
        assert importlib.import_module("flash_attn") is theirs and theirs.__version__ == "1.0"
        assert importlib.import_module("flash_attn.layers") is layers
    finally:
        fa.uninstall()
        for name in ("flash_attn", "flash_attn.layers"):
            sys.modules.pop(name, None)


def test_transformers_takes_it():
    code = """
import xattn
xattn.compat.flash_attn.install()
from transformers.utils import import_utils
assert import_utils._is_package_available("flash_attn", return_version=True) == (True, "2.8.4+xattn")
import_utils.is_torch_cuda_available = lambda: True
assert import_utils.is_flash_attn_2_available()
import transformers.modeling_flash_attention_utils as utils
from xattn.compat import flash_attn as fa
found = utils._lazy_imports("flash_attention_2")
assert found[0] is fa.flash_attn_func and found[1] is fa.flash_attn_varlen_func
"""
    env = {**os.environ, "PYTHONPATH": str(Path(xattn.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
