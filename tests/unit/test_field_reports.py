"""Inputs on which attention libraries have failed in the field, each as a member of its kind."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import cases
import oracle
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import xattn

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
HALF = DTYPES[:2]
KINDS = list(cases.FUNCTIONS)
FALLBACKS = ("reference", "sdpa")
HEAD_DIMS = [8, 40, 72, 80, 96, 112, 160, 192, 224, 256]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_kind = pytest.mark.parametrize("kind", KINDS)


class Refused(Exception):
    """The target does not answer, and said why."""


def each_target(test):
    """The test on every target; where one refuses what ``ask`` asks, with reasons, nothing is left to see."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with contextlib.suppress(Refused):
            test(*args, **kwargs)

    return pytest.mark.parametrize("target", cases.targets(), ids=str)(run)


def ask(target, kind, *args, **kwargs):
    """The call with its tensors on the target's device, its results back on the CPU.

    Raises Refused where it refuses as its plan says.
    """
    args = [on(target, x) for x in args]
    kwargs = {n: on(target, x) for n, x in kwargs.items()} | {"backend": target.backend}
    function = cases.FUNCTIONS[kind]
    if not xattn.supported(*args, kind=kind, **kwargs):
        assert target.backend != "reference", "the reference answers everything"
        with pytest.raises(xattn.UnsupportedError, match=target.backend):
            function(*args, **kwargs)
        raise Refused
    result = function(*args, **kwargs)
    return tuple(x.cpu() for x in result) if isinstance(result, tuple) else result.cpu()


def on(target, x):
    return x.to(target.device) if isinstance(x, Tensor) else x


class Result(NamedTuple):
    out: Tensor
    lse: Tensor | None
    grads: dict[str, Tensor]


def measured(target, kind, tensors, wants=(), dout=None, cancel=0.0, **other) -> Result | None:
    """Runs the call, with lse where the backend gives one, and measures all of it against the oracle; sees to refusals.

    ``dout``: a number that fills the gradient of out; that of lse is 0 then. ``cancel``: how large the terms are that
    cancel in gradients of q and k, where the plain computation overflows and cannot tell. None where refused.
    """
    given = (target, kind, tensors, wants, dout, cancel)
    return _measured(*given, other | {"return_lse": True}) or _measured(*given, other | {"return_lse": False})


def _measured(target, kind, tensors, wants, dout, cancel, other) -> Result | None:
    call = cases.Call(kind, tensors, other, tuple(wants))
    leaves = {n: t.detach().requires_grad_(n in wants) for n, t in call.tensors.items()}
    args, kwargs = call.arguments(leaves)
    try:
        result = ask(target, kind, *args, **kwargs)
    except Refused:
        return None
    seeds = None
    if dout is not None and wants:
        seeds = cases.expected(call, torch.float64)[3]
        seeds = (torch.full_like(seeds[0], dout), torch.zeros_like(seeds[1]))
    truth, truth_lse, truth_grads, seeds = cases.expected(call, torch.float64, seeds)
    plain, plain_lse, plain_grads, _ = cases.expected(call, cases.plain_dtype(call), seeds)
    out, lse = result if kwargs["return_lse"] else (result, None)
    oracle.assert_close("out", out, truth, plain.to(out.dtype))
    if lse is not None:
        assert lse.dtype == torch.float32
        oracle.assert_close("lse", lse, truth_lse, plain_lse.float())
        bare = ask(target, kind, *args, **{**kwargs, "return_lse": False})
        assert torch.equal(bare, out), "out depends on return_lse"
    grads: dict[str, Tensor] = {}
    if wants:
        roots = [(x, s.to(x.dtype)) for x, s in zip((out, lse), seeds, strict=True) if x is not None]
        found = torch.autograd.grad([x for x, _ in roots], [leaves[n] for n in wants], [s for _, s in roots])
        grads = dict(zip(wants, found, strict=True))
        for name, grad in grads.items():
            assert grad.dtype == leaves[name].dtype
            among = tuple(truth_grads.values())
            if cancel:
                terms = cancel if name in "qk" else float(truth_grads[name].abs().max())
                plain_grads[name] = truth_grads[name] + terms * torch.finfo(grad.dtype).eps / 2
            oracle.assert_close(f"gradient of {name}", grad, truth_grads[name], plain_grads[name], among)
    return Result(out.detach(), None if lse is None else lse.detach(), grads)


def assert_empty(result: Result | None, *rows, grads_of_q=True) -> None:
    """Rows of the first sequence, dense or packed: out and the gradient of q exactly 0, lse -inf; if not refused."""
    if result is None:
        return
    for row in rows:
        at = (0, row) if result.out.dim() == 4 else (row,)
        assert (result.out[at] == 0).all()
        if "q" in result.grads and grads_of_q:
            assert (result.grads["q"][at] == 0).all()
        if result.lse is not None:
            assert (result.lse[0, :, row] if result.lse.dim() == 3 else result.lse[:, row]).eq(-torch.inf).all()


def random(shape, dtype=torch.float32, seed=0) -> Tensor:
    g = torch.Generator().manual_seed(seed + 1000 * sum(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def qkv(b, sq, sk, h, d, dtype=torch.float32, hk=None, dv=None):
    hk, dv = hk or h, dv or d
    return {
        "q": random((b, sq, h, d), dtype, 1),
        "k": random((b, sk, hk, d), dtype, 2),
        "v": random((b, sk, hk, dv), dtype, 3),
    }


def ints(*values, dtype=torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def packed(lens_q, lens_k, h, d, dtype=torch.float32, hk=None, index=torch.int32):
    """The tensors and bounds of a varlen call."""
    t = {n: x[0] for n, x in qkv(1, sum(lens_q), sum(lens_k), h, d, dtype, hk).items()}
    for side, lens in (("q", lens_q), ("k", lens_k)):
        t[f"cu_seqlens_{side}"] = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=index)
    return t, {"max_seqlen_q": max(lens_q), "max_seqlen_k": max(lens_k)}


def pages(q, k, v, lengths, page_size, layout="NHD", index=torch.int32, gap=torch.nan):
    """The tensors of a paged call that holds the first ``lengths`` rows of dense k and v, behind them ``gap``."""
    batch, columns = len(lengths), max(1, -(-max(lengths) // page_size))
    table = torch.randperm(batch * columns, generator=torch.Generator().manual_seed(5)).view(batch, columns)
    caches = []
    for x in (k, v):
        cache = torch.full((batch * columns, page_size, *x.shape[2:]), gap, dtype=torch.float64).to(x.dtype)
        for b, n in enumerate(lengths):
            for i in range(n):
                cache[table[b, i // page_size], i % page_size] = x[b, i]
        caches.append(cache if layout == "NHD" else cache.transpose(1, 2).contiguous())
    named = {"q": q, "k_cache": caches[0], "v_cache": caches[1]}
    return {**named, "page_table": table.to(index), "seqlens_k": torch.tensor(lengths, dtype=index)}


def as_kind(kind, t, lengths=None, **kw):
    """The same attention as another kind of call: (tensors, other arguments).

    Dense and varlen calls say ``lengths`` by seqused_k.
    """
    b, sk = t["k"].shape[:2]
    if kind == "paged":
        return pages(t["q"], t["k"], t["v"], lengths or [sk] * b, kw.pop("page_size", 16), **kw), {}
    extra = {} if lengths is None else {"seqused_k": torch.tensor(lengths, dtype=torch.int32)}
    if kind == "attention":
        return {**t, **extra}, {}
    flat = {n: x.flatten(0, 1) for n, x in t.items()}
    cu = {f"cu_seqlens_{s}": torch.arange(b + 1, dtype=torch.int32) * t[s].shape[1] for s in "qk"}
    return {**flat, **cu, **extra}, {"max_seqlen_q": t["q"].shape[1], "max_seqlen_k": sk}


def wants_of(kind):
    return () if kind == "paged" else ("q", "k", "v")


# ---------------------------------------------------------------- rows that see nothing
@each_target
@each_dtype
@pytest.mark.parametrize("d", [16, 72, (192, 128)], ids=str)
@pytest.mark.parametrize("form", ["bool", "float", "bool expanded", "window"])
@pytest.mark.parametrize("kind", ["attention", "varlen"])
def test_h1_masked_row(target, dtype, d, form, kind):
    d, dv = d if isinstance(d, tuple) else (d, d)
    t, other = as_kind(kind, qkv(1, 5, 7, 4, d, dtype, 2, dv))
    if form == "window":  # distances (None, 0) with more queries than keys: the first rows see nothing
        t, other = as_kind(kind, qkv(1, 5, 3, 4, d, dtype, 2, dv))
        result = measured(target, kind, t, ("q", "k", "v"), window=(None, 0), **other)
        return assert_empty(result, 0, 1)
    seen = torch.ones(1, 4, 5, 7, dtype=torch.bool)
    seen[:, :, 1] = False
    seen[:, :, 4, ::2] = False
    if form == "bool expanded":
        seen = seen[:1, :1].expand(1, 4, 5, 7)
    mask = seen if form != "float" else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
    result = measured(target, kind, {**t, "attn_mask": mask}, ("q", "k", "v"), **other)
    if result is None:
        return
    assert_empty(result, 1)
    assert (result.out[0, 0] if kind == "attention" else result.out[0]).ne(0).any()


@each_target
@each_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_h2_lse_of_a_sequence_without_keys(target, dtype, causal):
    t, other = packed((3, 2, 0), (0, 4, 5), 2, 16, dtype)
    result = measured(target, "varlen", t, ("q", "k", "v"), causal=causal, **other)
    if result is None:
        return
    assert_empty(result, 0, 1, 2)
    assert (result.grads["k"][4:] == 0).all() and (result.grads["v"][4:] == 0).all()
    for kind in KINDS:
        dense = qkv(2, 3, 4, 2, 16, dtype)
        t, other = as_kind(kind, dense, [0, 4])
        assert_empty(measured(target, kind, t, wants_of(kind), causal=causal, **other), 0, 1, 2)
    assert_empty(measured(target, "attention", qkv(1, 3, 0, 2, 16, dtype), ("q", "k", "v"), causal=causal), 0, 1, 2)


@each_dtype
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 5, 3, 8)])
def test_h3_merge_of_empty_states(dtype, parts, shape):
    lse_shape = (shape[1], shape[0]) if len(shape) == 3 else (shape[0], shape[2], shape[1])
    outs = [torch.zeros(shape, dtype=dtype, requires_grad=True) for _ in range(parts)]
    lses = [torch.full(lse_shape, -torch.inf, requires_grad=True) for _ in range(parts)]
    out, lse = xattn.merge_states(outs, lses)
    assert out.dtype == dtype and torch.equal(out, torch.zeros(shape, dtype=dtype))
    assert lse.dtype == torch.float32 and lse.eq(-torch.inf).all()
    for grad in torch.autograd.grad(out.sum(), outs + lses):
        assert torch.equal(grad, torch.zeros_like(grad))
    # one part has weight: the others count for nothing, whatever they hold
    full, some = random(shape, dtype), random(lse_shape)
    out, lse = xattn.merge_states([full, torch.full(shape, torch.nan, dtype=dtype)], [some, lses[0].detach()])
    assert torch.equal(out, full) and torch.equal(lse, some)


@each_target
@each_dtype
@each_kind
@pytest.mark.parametrize("tail", [torch.nan, torch.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_h4_cache_tail(target, dtype, kind, tail, causal):
    results = []
    for fill in (tail, 0.0):
        t = qkv(2, 1, 3, 1, 64, dtype)
        for n in ("k", "v"):
            t[n][0, 1:] = fill
        t, other = as_kind(kind, t, [1, 3], page_size=2, gap=fill) if kind == "paged" else as_kind(kind, t, [1, 3])
        results.append(measured(target, kind, t, wants_of(kind), causal=causal, **other))
    if None in results:
        return
    assert torch.equal(results[0].out, results[1].out)
    for name, grad in results[0].grads.items():
        assert torch.equal(grad, results[1].grads[name])
        rows = grad if kind == "attention" else grad.unflatten(0, (2, -1))
        assert name == "q" or (rows[0, 1:] == 0).all()


@each_target
@each_kind
@pytest.mark.parametrize("length", [3, 6])
def test_h7_causal_with_more_queries_than_keys(target, kind, length):
    for dtype in DTYPES:
        t, other = as_kind(kind, qkv(1, 5 * length, 2 * length, 2, 16, dtype))
        result = measured(target, kind, t, wants_of(kind), causal=True, **other)
        if result is None:
            continue
        assert_empty(result, *range(3 * length))
        row = result.out[0, 3 * length] if kind != "varlen" else result.out[3 * length]
        assert torch.equal(
            row, t["v"][0, 0] if kind == "attention" else qkv(1, 5 * length, 2 * length, 2, 16, dtype)["v"][0, 0]
        )


@each_target
def test_h7_five_queries_two_keys(target):
    result = measured(target, "attention", qkv(1, 5, 2, 1, 8), ("q", "k", "v"), causal=True)
    if result is None:
        return
    assert_empty(result, 0, 1, 2)
    assert torch.equal(result.out[0, 3], qkv(1, 5, 2, 1, 8)["v"][0, 0])


@each_target
@each_dtype
@each_kind
def test_h25_out_full_of_nan_and_a_sequence_without_keys(target, dtype, kind):
    t, other = as_kind(kind, qkv(2, 2, 5, 2, 16, dtype), [5, 0])
    args, kwargs = cases.Call(kind, t, other).arguments(t)
    want = ask(target, kind, *args, **kwargs)
    args, out = [on(target, x) for x in args], torch.full_like(want, torch.nan, device=target.device)
    kwargs = {n: on(target, x) for n, x in kwargs.items()}
    assert cases.FUNCTIONS[kind](*args, backend=target.backend, out=out, **kwargs) is out
    assert torch.equal(out.cpu(), want) and not want.isnan().any()
    empty = out[1] if kind != "varlen" else out[2:]
    assert (empty == 0).all() and (out.flatten()[0] != 0)


# ---------------------------------------------------------------- numbers
@each_target
@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", [-6.4e4, -4e5])
def test_h5_big_negative_logits(target, kind, dtype, level):
    t = {"q": torch.ones(1, 1, 16, 128), "k": torch.full((1, 64, 1, 128), level / 128), "v": random((1, 64, 1, 128))}
    t["k"][:, 0] = (level + 5000) / 128
    t, other = as_kind(kind, {n: x.to(dtype) for n, x in t.items()})
    result = measured(target, kind, t, wants_of(kind), dout=1.0, cancel=-level, **other)
    if result is None:
        return
    want = random((1, 64, 1, 128)).to(dtype)[0, 0, 0]
    assert torch.allclose(result.out.reshape(16, 128), want.expand(16, 128), rtol=1e-3)


@each_target
@each_dtype
@pytest.mark.parametrize("d", [16, 8, 72, 128])
@pytest.mark.parametrize("kind", ["attention", "varlen"])
def test_h6_gradients_of_one_key(target, dtype, d, kind):
    t = {n: 3 * x for n, x in qkv(1, 1, 1, 1, d, dtype).items()}
    t, other = as_kind(kind, t)
    result = measured(target, kind, t, ("q", "k", "v"), dout=1.0, cancel=9.0 * d, **other)
    if result is None:
        return
    assert torch.equal(result.out, t["v"]) and torch.equal(result.grads["v"], torch.ones_like(t["v"]))


@each_target
@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cap", [2.5, 50.0])
@pytest.mark.parametrize("raw", [4400.0, -1e4])
def test_h10_softcap(target, kind, dtype, cap, raw):
    t = {"q": torch.ones(1, 3, 2, 16), "k": torch.full((1, 1, 2, 16), raw / 16), "v": random((1, 1, 2, 16))}
    t, other = as_kind(kind, {n: x.to(dtype) for n, x in t.items()})
    result = measured(target, kind, t, wants_of(kind), softcap=cap, softmax_scale=1.0, **other)
    if result is None:
        return
    assert (result.lse == (cap if raw > 0 else -cap)).all()
    if result.grads:  # tanh is flat there
        assert (result.grads["q"] == 0).all() and (result.grads["k"] == 0).all()


@each_target
@each_kind
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_beyond_the_largest_fp16(target, kind, dtype, causal, sign):
    """Finite inputs whose product has no fp16: scores are held in more."""
    t = {n: x.float() for n, x in qkv(1, 4, 4, 2, 64, dtype).items()}
    t["q"], t["k"] = torch.full_like(t["q"], 33.0), torch.full_like(t["k"], sign * 33.0)
    t["k"][:, 2] = sign * 34.0
    t, other = as_kind(kind, {n: x.to(dtype) for n, x in t.items()})
    assert float(t["q"].float().flatten()[:64].square().sum()) > 65504
    result = measured(target, kind, t, wants_of(kind), cancel=1100.0, causal=causal, **other)
    if result is None:
        return
    assert result.out.isfinite().all()


@each_target
@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 255, 257])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_h26_padding_lanes_count_for_nothing(target, length, dtype):
    t = qkv(2, 1, length, 8, 128, dtype)
    t["q"].zero_()
    for kind in KINDS:
        tensors, other = as_kind(kind, t)
        result = measured(target, kind, tensors, **other)
        if result is None:
            continue
        mean = t["v"].double().mean(1, keepdim=True).view(result.out.shape)
        oracle.assert_close("mean", result.out, mean, mean.to(dtype))


# ---------------------------------------------------------------- arguments that must be refused
@each_target
@each_kind
@pytest.mark.parametrize("window", [(7, -8), (-8, 7), (-1, -1), (None, -1), (-1, None), (-1, 0)])
def test_h8_negative_window(target, kind, window):
    t, other = as_kind(kind, qkv(1, 3, 16, 2, 16))
    args, kwargs = cases.Call(kind, t, other).arguments(t)
    out = torch.full_like(t["q"], 7.0)
    with pytest.raises(ValueError, match=r"window: .*None"):
        cases.FUNCTIONS[kind](*args, window=window, out=out, backend=target.backend, **kwargs)
    assert (out == 7).all()
    with pytest.raises(ValueError, match=r"window: .*None"):
        xattn.explain(*args, kind=kind, window=window, **kwargs)
    op = {"attention": "attention", "varlen": "attention_varlen", "paged": "attention_paged"}[kind]
    with pytest.raises(ValueError, match=r"window: .*None"):
        getattr(torch.ops.xattn, op)(*args, window_left=window[0], window_right=window[1], **kwargs)


@each_target
@each_kind
@pytest.mark.parametrize("n", [1, 2, 5])
def test_h9_a_window_of_n_keys_is_n_minus_1(target, kind, n):
    t = qkv(1, 9, 9, 1, 16)
    t["q"].zero_()
    tensors, other = as_kind(kind, t)
    result = measured(target, kind, tensors, window=(n - 1, 0), causal=True, **other)
    if result is None:
        return
    last = result.out.reshape(9, 16)[-1]
    torch.testing.assert_close(last, t["v"][0, 9 - n :, 0].mean(0))


@each_target
@each_kind
@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (2, 3), (0, 2), (2, 0)])
def test_h18_heads_that_do_not_divide(target, kind, heads):
    hq, hk = heads
    t = {"q": torch.zeros(2, 4, hq, 16), "k": torch.zeros(2, 4, hk, 16), "v": torch.zeros(2, 4, hk, 16)}
    t, other = as_kind(kind, t)
    args, kwargs = cases.Call(kind, t, other).arguments(t)
    out = torch.full_like(t["q"], 7.0)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=rf"q: got {hq} heads.*multiple of the {hk}"):
            cases.FUNCTIONS[kind](*args, out=out, backend=target.backend, **kwargs)
    assert (out == 7).all()
    with pytest.raises(ValueError, match="heads"):
        xattn.supported(*args, kind=kind, **kwargs)


@each_target
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("pack", [False, True])
def test_h24_no_room_in_the_page_table(target, layout, page_size, pack):
    t = qkv(2, 2, 2 * page_size, 2, 16)
    tensors = pages(t["q"], t["k"], t["v"], [2 * page_size - 1, page_size], page_size, layout)
    caches = [tensors["k_cache"].clone(), tensors["v_cache"].clone()]
    new = random((2, 2, 2, 16))
    how = {"k_new": new, "v_new": new}
    if pack:
        how = {"k_new": new.flatten(0, 1), "v_new": new.flatten(0, 1), "cu_seqlens_new": ints(0, 2, 4)}
    with pytest.raises(xattn.DeviceValueError, match="room"):
        ask(target, "paged", *tensors.values(), **how, kv_layout=layout)
        xattn.check_errors()
    for cache, before in zip((tensors["k_cache"], tensors["v_cache"]), caches, strict=True):
        assert torch.equal(cache.nan_to_num(9.0), before.nan_to_num(9.0))
    tensors["seqlens_k"][0] = 2 * page_size + 1
    with pytest.raises(xattn.DeviceValueError, match="room"):
        ask(target, "paged", *tensors.values(), kv_layout=layout)
        xattn.check_errors()


# ---------------------------------------------------------------- shapes
@each_target
@each_dtype
@pytest.mark.parametrize("heads", [(9, 3), (9, 9), (6, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_h11_varlen_decode_with_an_empty_sequence(target, dtype, heads, causal):
    t, other = packed((1, 0, 1), (3, 0, 5), heads[0], 64, dtype, heads[1])
    result = measured(target, "varlen", t, ("q", "k", "v"), causal=causal, **other)
    if result is None:
        return
    assert result.out.shape == (2, heads[0], 64) and result.grads["k"].shape == (8, heads[1], 64)


@each_target
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_h12_backward_of_sequences_without_queries(target, dtype, causal):
    t, other = packed((0, 12, 8, 0), (25, 17, 9, 30), 4, 256, dtype, 1)
    result = measured(target, "varlen", t, ("q", "k", "v"), causal=causal, **other)
    if result is None:
        return
    for name in ("k", "v"):
        assert (result.grads[name][:25] == 0).all() and (result.grads[name][51:] == 0).all()
        assert result.grads[name][25:51].ne(0).any()


@each_target
@each_dtype
@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("which", [("q",), ("k", "v"), ("q", "k", "v")], ids=str)
def test_h13_alignment(target, dtype, offset, which):
    """BHSD views of flat storage that starts at an odd element."""
    t = qkv(2, 9, 9, 4, 64, dtype)
    for n in which:
        x = t[n].transpose(1, 2).contiguous()
        t[n] = torch.full((x.numel() + offset,), torch.nan, dtype=dtype)[offset:].view(x.shape).copy_(x).transpose(1, 2)
        assert t[n].storage_offset() == offset
    measured(target, "attention", t, ("q", "k", "v"), causal=True)
    for kind in ("varlen", "paged"):
        flat, other = as_kind(kind, t)
        flat = {n: cases.laid_out(x, f"offset {offset}") if x.dim() > 2 else x for n, x in flat.items()}
        measured(target, kind, flat, wants_of(kind), **other)


@each_target
def test_h13_as_reported(target):
    flat = random((6 * 4 * 64 * 64 + 3,))
    t = {n: flat[o : o + 6 * 4 * 64 * 64].view(6, 4, 64, 64).transpose(1, 2) for o, n in enumerate("qkv", 1)}
    measured(target, "attention", t, ("q", "k", "v"))


@each_target
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("keys", [43, 1])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("form", ["contiguous", "padded", "expanded", "transposed", "offset"])
@pytest.mark.parametrize("boolean", [False, True])
def test_h14_strides_of_a_mask(target, dtype, keys, rows, form, boolean):
    full = random((3, 16, rows, keys), dtype)
    if form == "padded":
        mask = torch.full((3, 16, rows, keys + 5), torch.nan, dtype=dtype)[..., 2 : keys + 2].copy_(full)
    elif form == "expanded":
        mask = full[:, :1, :1].expand(3, 16, rows, keys)
    elif form == "transposed":
        mask = full.transpose(2, 3).contiguous().transpose(2, 3)
    elif form == "offset":
        mask = torch.full((full.numel() + 1,), torch.nan, dtype=dtype)[1:].view(full.shape).copy_(full)
    else:
        mask = full
        assert mask.stride() == (16 * rows * keys, rows * keys, keys, 1)
    mask = mask > -0.5 if boolean and form not in ("padded", "offset") else mask
    measured(target, "attention", {**qkv(3, rows, keys, 16, 16, dtype), "attn_mask": mask}, ("q", "k", "v"))


@each_target
@each_dtype
@pytest.mark.parametrize("reduce", ["sum", "mean", "expanded rows"])
def test_h15_strides_of_dout(target, dtype, reduce):
    t = qkv(1, 5, 5, 2, 8, dtype)
    leaves = [x.clone().requires_grad_() for x in t.values()]
    out = ask(target, "attention", *leaves, causal=True)
    if reduce in ("sum", "mean"):
        getattr(out, reduce)().backward()
        dout = torch.full_like(out, 1.0 if reduce == "sum" else 1 / out.numel())
        grads = [x.grad for x in leaves]
    else:
        dout = random((1, 1, 2, 8), dtype).expand(1, 5, 2, 8)
        assert not dout.is_contiguous()
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    out = ask(target, "attention", *leaves, causal=True)
    for got, want in zip(grads, torch.autograd.grad(out, leaves, dout.contiguous()), strict=True):
        assert torch.equal(got, want) and got.ne(0).any()
    if reduce == "sum":
        measured(target, "attention", t, ("q", "k", "v"), dout=1.0, causal=True)


@each_target
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_kind
@pytest.mark.parametrize("layout", ["every 2nd row", "last dim", "heads first"])
@pytest.mark.parametrize("which", ["k", "v", "q"])
def test_h16_strides_of_one_tensor(target, dtype, kind, layout, which):
    t = qkv(2, 6, 6, 2, 64, dtype)
    tensors, other = as_kind(kind, t, page_size=4) if kind == "paged" else as_kind(kind, t)
    name = f"{which}_cache" if kind == "paged" and which != "q" else which
    strided = {**tensors, name: cases.laid_out(tensors[name], layout)}
    assert strided[name].stride() != tensors[name].stride()
    measured(target, kind, strided, wants_of(kind), causal=True, **other)


@each_target
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_h17_every_head_dim(target, d, dtype):
    for kind in KINDS:
        t, other = as_kind(kind, qkv(1, 9, 17, 4, d, dtype, 2))
        first = measured(target, kind, t, wants_of(kind), causal=True, **other)
        if first is None:
            continue
        args, kwargs = cases.Call(kind, t, other).arguments(t)
        for _ in range(3):
            again = ask(target, kind, *args, causal=True, **kwargs)
            assert torch.equal(again, first.out)


@each_target
def test_h17_as_reported(target):
    t = qkv(1, 512, 512, 16, 72, torch.float16)
    outs = [ask(target, "attention", *t.values()) for _ in range(4)]
    assert all(torch.equal(out, outs[0]) for out in outs) and not outs[0].isnan().any()


@each_target
@pytest.mark.parametrize("pair", [(192, 128), (576, 512), (64, 8), (8, 64)])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_pairs_of_head_dims(target, pair, dtype):
    for kind in KINDS:
        t, other = as_kind(kind, qkv(2, 3, 9, 4, pair[0], dtype, 1, pair[1]))
        result = measured(target, kind, t, wants_of(kind), causal=True, **other)
        if result is None:
            continue
        assert result.out.shape[-1] == pair[1]


@each_target
def test_values_that_are_a_view_of_keys(target):
    """Latent attention: v is the front of k, and gets a gradient of its own."""
    t = qkv(2, 3, 9, 4, 576, torch.bfloat16, 1)
    t["v"] = t["k"][..., :512]
    measured(target, "attention", t, ("q", "k", "v"))
    tensors = pages(t["q"], t["k"], t["k"], [9, 5], 16)
    tensors["v_cache"] = tensors["k_cache"][..., :512]
    measured(target, "paged", tensors, causal=True)


@each_target
@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 12, 71])
@pytest.mark.parametrize("heads_kv", [1, 2])
def test_every_gqa_ratio(target, ratio, heads_kv):
    for kind in KINDS:
        for dtype in DTYPES[:3]:
            t, other = as_kind(kind, qkv(2, 3, 6, heads_kv * ratio, 16, dtype, heads_kv))
            measured(target, kind, t, wants_of(kind), causal=True, **other)


@each_target
@pytest.mark.parametrize("page_size", [1, 7, 16, 24, 64, 128, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_every_page_size(target, page_size, layout):
    for dtype in DTYPES[:3]:
        lengths = [2 * page_size + 1, page_size, 1, 0]
        t = qkv(4, 2, max(lengths), 4, 16, dtype, 2)
        tensors = pages(t["q"], t["k"], t["v"], lengths, page_size, layout)
        result = measured(target, "paged", tensors, causal=True, kv_layout=layout)
        if result is None:
            continue
        dense = measured(target, "attention", {**t, "seqused_k": ints(*lengths)}, causal=True)
        if dense is None:
            continue
        oracle.assert_close("paged", result.out, dense.out, dense.out)


@each_target
@each_dtype
def test_h22_empty_batch(target, dtype):
    t = {"q": torch.zeros(0, 10, 3952, 64).transpose(1, 2), "k": torch.zeros(0, 10, 16, 64).transpose(1, 2)}
    t = {n: x.to(dtype) for n, x in {**t, "v": t["k"]}.items()}
    for causal in (False, True):
        result = measured(target, "attention", t, ("q", "k", "v"), causal=causal)
        if result is None:
            continue
        assert result.out.shape == (0, 3952, 10, 64) and result.grads["k"].shape == (0, 16, 10, 64)
    none = {n: torch.zeros(0, 2, 16, dtype=dtype) for n in "qkv"}
    none |= {"cu_seqlens_q": ints(0), "cu_seqlens_k": ints(0)}
    result = measured(target, "varlen", none, ("q", "k", "v"), max_seqlen_q=0, max_seqlen_k=0)
    if result is None:
        return
    assert result.out.shape == (0, 2, 16)
    cache = torch.zeros(3, 16, 2, 16, dtype=dtype)
    empty = {"page_table": torch.zeros(0, 2, dtype=torch.int32), "seqlens_k": torch.zeros(0, dtype=torch.int32)}
    out = ask(target, "paged", cache[:0, :1], cache, cache, *empty.values())
    assert out.shape == (0, 1, 2, 16) and out.dtype == dtype


@each_target
@each_kind
def test_h23_index_dtypes(target, kind):
    t = qkv(3, 2, 5, 2, 16)
    results = {}
    names = {
        "attention": ["seqused_k"],
        "varlen": ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"],
        "paged": ["page_table", "seqlens_k"],
    }
    tensors, other = as_kind(kind, t, [5, 4, 3])
    for n in range(2 ** len(names[kind])):
        wide = {name: tensors[name].to([torch.int32, torch.int64][n >> i & 1]) for i, name in enumerate(names[kind])}
        results[n] = measured(target, kind, {**tensors, **wide}, wants_of(kind), causal=True, **other)
        assert (results[n] is None) == (results[0] is None)
        assert results[n] is None or torch.equal(results[n].out, results[0].out)
    for name in names[kind]:
        for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool):
            args, kwargs = cases.Call(kind, tensors, other).arguments({**tensors, name: tensors[name].to(dtype)})
            with pytest.raises(TypeError, match=rf"{name}: .*{dtype}.*int32 or torch.int64"):
                cases.FUNCTIONS[kind](*args, backend=target.backend, **kwargs)


@each_target
@each_kind
@pytest.mark.parametrize(
    "kv", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_h27_fp8_keys_under_wider_queries(target, kind, kv, dtype):
    t = qkv(2, 2, 9, 4, 64, dtype, 2)
    t = {n: x if n == "q" else x.to(kv) for n, x in t.items()}
    if kind == "paged":
        wide = pages(t["q"], t["k"].float(), t["v"].float(), [9, 4], 4)
        tensors, other = {n: x.to(kv) if n.endswith("_cache") else x for n, x in wide.items()}, {}
    else:
        tensors, other = as_kind(kind, t)
    measured(target, kind, tensors, k_scale=0.5, v_scale=2.0, **other)
    measured(target, kind, tensors, causal=True, **other)
    for arch in ("sm_80", "sm_90", "sm_120", "gfx90a", "gfx942", "cpu"):  # a question, never an error
        args, kwargs = cases.Call(kind, tensors, other).arguments({n: x.to("meta") for n, x in tensors.items()})
        assert xattn.supported(*args, kind=kind, device=arch, **kwargs) is True


@each_kind
@pytest.mark.parametrize("kv", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_nan_among_fp8_inputs(kind, kv):
    """NaN that is seen comes out, of the head, the sequence and the rows that see it; NaN that is not seen does not."""
    t = qkv(2, 3, 6, 2, 16, torch.bfloat16)
    t["k"][0, 5, 1], t["v"][1, 4, 0, 3] = torch.nan, torch.nan  # the last key; a value of the last but one
    if kind == "paged":
        wide = pages(t["q"], t["k"].float(), t["v"].float(), [6, 6], 4)
        tensors, other = {n: x.to(kv) if n.endswith("_cache") else x for n, x in wide.items()}, {}
    else:
        tensors, other = as_kind(kind, {n: x if n == "q" else x.to(kv) for n, x in t.items()})
    args, kwargs = cases.Call(kind, tensors, other).arguments(tensors)
    nan = cases.FUNCTIONS[kind](*args, causal=True, **kwargs).isnan().view(2, 3, 2, 16)
    assert nan[0, 2, 1].all() and not nan[0, :2].any() and not nan[0, :, 0].any()
    assert nan[1, 1:, 0, 3].all() and not nan[1, 1:, 1].any()
    assert not nan[1, 1:, 0, :3].any() and not nan[1, 1:, 0, 4:].any()


@each_target
@each_kind
@pytest.mark.parametrize("left", [0, 1, 15, 31, 32, 40])
def test_one_token_decode_at_the_edge_of_the_window(target, kind, left):
    t = qkv(2, 1, 33, 2, 16)
    t["q"].zero_()
    tensors, other = as_kind(kind, t, [33, 17])
    result = measured(target, kind, tensors, wants_of(kind), window=(left, 0), **other)
    if result is None:
        return
    for b, n in enumerate((33, 17)):
        torch.testing.assert_close(result.out.view(2, 2, 16)[b], t["v"][b, max(0, n - 1 - left) : n].mean(0))


# ---------------------------------------------------------------- large problems, in small form
@pytest.fixture
def many_chunks(monkeypatch):
    """Limits so small that nearly every row is a chunk; the list counts the chunks of each pass."""
    import xattn.backends.sdpa
    import xattn.reference

    monkeypatch.setattr(xattn.reference, "CHUNK_SCORES", {"cpu": 40, "gpu": 40})
    monkeypatch.setattr(xattn.backends.sdpa, "_MASK_ELEMENTS", {"cpu": 40, "gpu": 40})
    counts, plain = [], xattn.chunks.chunks

    def counted(inputs, limit):
        found = list(plain(inputs, limit))
        counts.append(len(found))
        return iter(found)

    monkeypatch.setattr(xattn.chunks, "chunks", counted)
    return counts


@each_target
@each_kind
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("how", ["causal", "window", "bool mask", "float mask", "lengths"])
def test_h19_h20_many_chunks_equal_one(target, kind, dtype, how, many_chunks):
    t = qkv(5, 11, 13, 4, 16, dtype, 2)
    tensors, other = as_kind(kind, t, [13, 0, 7, 1, 12] if how == "lengths" else None)
    if how.endswith("mask"):
        mask = random((5, 4, 11, 13), dtype)
        mask[:, :, 4] = -torch.inf
        tensors["attn_mask"] = mask > -0.3 if how == "bool mask" else mask
        if kind == "paged":
            tensors["attn_mask"] = torch.rand(55, 11, generator=torch.Generator().manual_seed(0)) > 0.3
    given = {"causal": {"causal": True}, "window": {"window": (3, 2)}}.get(how, {"causal": True})
    many = measured(target, kind, tensors, wants_of(kind), **given, **other)
    if many is None:
        assert not many_chunks and (target.backend not in FALLBACKS or how.endswith("mask"))
        return
    assert target.backend not in FALLBACKS or min(many_chunks) > 10
    if (
        target.backend == "reference" and kind != "paged"
    ):  # gradients of what the whole call shares are sums over chunks
        shared = {"alibi_slopes": random((4,)).abs(), "sinks": random((4,)), "k_scale": torch.full((5, 2), 0.7)}
        wants = ("q", "k", "v", *shared)
        if how == "float mask":
            wants += ("attn_mask",)
        measured(target, kind, {**tensors, **shared}, wants, **given, **other)
    assert many.out.isfinite().all()


@each_target
def test_h20_h21_more_sequences_and_heads_than_a_grid_has(target):
    q = random((65537, 1, 1, 8), torch.float16)
    k, v = random((65537, 2, 1, 8), torch.float16, 1), random((65537, 2, 1, 8), torch.float16, 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ask(target, "attention", *leaves)
    grads = torch.autograd.grad(out.sum(), leaves)
    a, b, c = (x.detach().float() for x in leaves)
    p = torch.softmax((a * c.new_tensor(8**-0.5) * b).sum(-1), 1)[..., None]
    want = (p * c).sum(1, keepdim=True)
    torch.testing.assert_close(out.float(), want, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(grads[2].float(), p.expand_as(c), atol=2e-3, rtol=2e-3)
    assert all(g.isfinite().all() for g in grads) and grads[0][-1].ne(0).any()


# ---------------------------------------------------------------- determinism, dropout, autograd
@each_target
@pytest.mark.parametrize("kind", ["attention", "varlen"])
def test_h29_deterministic_backward(target, kind):
    t, other = as_kind(kind, qkv(2, 65, 65, 6, 64, torch.bfloat16, 2))
    leaves = {n: x.requires_grad_(x.is_floating_point()) for n, x in t.items()}
    args, kwargs = cases.Call(kind, t, other).arguments(leaves)
    seen = []
    for _ in range(30):
        out = ask(target, kind, *args, causal=True, deterministic=True, **kwargs)
        seen.append(torch.autograd.grad(out.square().sum(), args[:3]))
    assert all(torch.equal(a, b) for grads in seen for a, b in zip(grads, seen[0], strict=True))


@each_target
@each_dtype
@pytest.mark.parametrize("kind", ["attention", "varlen"])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_dropout_of_everything(target, dtype, kind, heads):
    t, other = as_kind(kind, qkv(2, 5, 7, heads[0], 16, dtype, heads[1]))
    t["dropout_rng"] = torch.tensor(cases.RNG)
    dropped = measured(target, kind, t, ("q", "k", "v"), dout=1.0, dropout_p=1.0, **other)
    if dropped is None:
        return
    assert (dropped.out == 0).all() and all((g == 0).all() for g in dropped.grads.values())
    del t["dropout_rng"]
    assert torch.equal(dropped.lse, measured(target, kind, t, **other).lse)


@each_target
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("by_view", [False, True])
def test_tensors_written_between_forward_and_backward(target, which, by_view):
    """Wrong gradients would be silent; autograd's own error is not."""
    leaves = [on(target, x).requires_grad_() for x in qkv(1, 4, 4, 2, 16).values()]
    given = [x * 1.0 for x in leaves]
    out = ask(target, "attention", *given)
    with torch.no_grad():
        (given[which][:, 1:, :1] if by_view else given[which]).mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


@each_target
def test_views_written_in_place_before_the_call(target):
    base = random((1, 6, 3, 2, 16)).requires_grad_()
    buffer = base * 1.0
    q, k, v = buffer.unbind(2)
    buffer[:, ::2].mul_(0.5)
    factor = torch.ones(1, 6, 1, 1)
    factor[:, ::2] = 0.5
    q, k, v = buffer.unbind(2)
    (grad,) = torch.autograd.grad(ask(target, "attention", q, k, v, causal=True).square().sum(), base)
    leaf = base.detach().double().requires_grad_()
    q, k, v = (x * factor for x in leaf.unbind(2))
    (want,) = torch.autograd.grad(oracle.attention(q, k, v, causal=True)[0].square().sum(), leaf)
    torch.testing.assert_close(grad, want.float())


@each_target
@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap", "vmap of grad"])
@pytest.mark.parametrize("kind", ["attention", "varlen"])
def test_h32_functorch(target, transform, kind):
    t, other = as_kind(kind, qkv(2, 3, 5, 2, 16, torch.float64))
    t = {n: on(target, x) for n, x in t.items()}
    args, kwargs = cases.Call(kind, t, other).arguments(t)
    ask(target, kind, args[0].detach().requires_grad_(), *args[1:], causal=True, **kwargs)
    q, *rest = args

    def loss(q):
        return cases.FUNCTIONS[kind](q, *rest, causal=True, backend=target.backend, **kwargs).square().sum()

    def true_loss(q):
        return cases.ORACLES[kind](q, *rest, causal=True, **kwargs)[0].square().sum()

    many = torch.stack([q, 2 * q, -q])
    if transform == "grad":
        got, want = torch.func.grad(loss)(q), torch.func.grad(true_loss)(q)
    elif transform == "vjp":
        got, want = (torch.func.vjp(f, q)[1](torch.tensor(3.0, dtype=q.dtype))[0] for f in (loss, true_loss))
    elif transform == "vmap":
        got, want = torch.func.vmap(loss)(many), torch.stack([true_loss(x) for x in many])
    else:
        got, want = (
            torch.func.vmap(torch.func.grad(loss))(many),
            torch.stack([torch.func.grad(true_loss)(x) for x in many]),
        )
    torch.testing.assert_close(got, want)
    assert got.ne(0).any()


@each_target
@each_dtype
@pytest.mark.parametrize("kind", ["attention", "varlen"])
@pytest.mark.parametrize("causal", [False, True])
def test_h33_gradients_of_lse_alone(target, dtype, kind, causal):
    t, other = as_kind(kind, qkv(2, 6, 6, 4, 64, dtype, 2))
    leaves = {n: x.requires_grad_(x.is_floating_point()) for n, x in t.items()}
    args, kwargs = cases.Call(kind, t, other).arguments(leaves)
    _, lse = ask(target, kind, *args, **kwargs, causal=causal, return_lse=True)
    grads = torch.autograd.grad(lse.mean(), args[:2])
    results = []
    for to in (torch.float64, dtype):
        x = {n: y.detach().to(to).requires_grad_() if y.is_floating_point() else y for n, y in t.items()}
        oracle_args, _ = cases.Call(kind, x, other).arguments(x)
        results.append(torch.autograd.grad(cases.ORACLES[kind](*oracle_args, causal=causal)[1].mean(), oracle_args[:2]))
    for name, got, truth, plain in zip("qk", grads, *results, strict=True):
        assert got.ne(0).any()
        oracle.assert_close(name, got, truth, plain, results[0])


@each_target
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kind", ["attention", "varlen"])
@pytest.mark.parametrize("odd", ["q", "k", "v", "none"])
def test_h34_autocast(target, dtype, kind, odd):
    t = qkv(1, 4, 4, 2, 16)
    tensors, other = as_kind(kind, {n: x if n != odd else x.to(dtype) for n, x in t.items()})
    args, kwargs = cases.Call(kind, tensors, other).arguments(tensors)
    for x in args[:3]:
        x.requires_grad_()
    with torch.autocast(target.device, dtype):
        out = ask(target, kind, *args, causal=True, **kwargs)
    grads = torch.autograd.grad(out.float().sum(), args[:3])
    assert out.dtype == dtype and [g.dtype for g in grads] == [x.dtype for x in args[:3]]
    cast = [x.detach().to(dtype).requires_grad_() for x in args[:3]]
    want = ask(target, kind, *cast, *args[3:], causal=True, **kwargs)
    assert torch.equal(out, want)
    for grad, wanted in zip(grads, torch.autograd.grad(want.float().sum(), cast), strict=True):
        assert torch.equal(grad, wanted.to(grad.dtype))
    if odd != "none":
        with pytest.raises(TypeError, match="dtype of"):
            ask(target, kind, *args, **kwargs)


# ---------------------------------------------------------------- masks of other dtypes, and memory
@each_target
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", ["lowest", -1e9, "fine"])
@pytest.mark.parametrize("kind", ["attention", "varlen"])
def test_an_added_mask_keeps_its_precision(target, dtype, mask_dtype, value, kind):
    """A finite mask hides nothing by itself, however low it is, and its last bits count, whatever the dtype of q."""
    t, other = as_kind(kind, qkv(1, 5, 7, 4, 16, dtype, 2))
    if value == "fine":  # bits that narrower dtypes lose
        mask = 300 + random((5, 7), torch.float64, 4)
    else:
        lowest = torch.finfo(mask_dtype).min if value == "lowest" else max(value, torch.finfo(mask_dtype).min)
        mask = torch.full((5, 7), lowest, dtype=torch.float64)
    mask = mask.to(mask_dtype)
    wide = torch.promote_types(dtype, mask_dtype)
    args, kwargs = cases.Call(kind, t, other).arguments(t)
    out = ask(target, kind, *args, attn_mask=mask, **kwargs)
    plain = {n: x.to(wide) if x.is_floating_point() else x for n, x in t.items()}
    args, kwargs = cases.Call(kind, plain, other).arguments(plain)
    if value == "fine":
        results = []
        for d in (torch.float64, wide):
            exact = {n: x.to(d) if x.is_floating_point() else x for n, x in t.items()}
            args, kwargs = cases.Call(kind, exact, other).arguments(exact)
            results.append(cases.ORACLES[kind](*args, attn_mask=mask.to(d), **kwargs)[0])
        oracle.assert_close("out", out, *results)
    else:  # the same of all keys: as good as no score
        mean = t["v"].double().mean(0 if kind == "varlen" else 1, keepdim=True).repeat_interleave(2, -2)
        assert out.ne(0).all()
        if value == "lowest" and mask_dtype in (torch.float64, torch.float32, torch.bfloat16):
            torch.testing.assert_close(out.double(), mean.expand(out.shape), rtol=2e-2, atol=2e-2)


@each_target
@each_dtype
@pytest.mark.parametrize("order", [(0, 1, 3, 2), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("form", ["bool", "added"])
@pytest.mark.parametrize("kind", ["attention", "varlen"])
def test_masks_under_permuted_strides(target, dtype, order, form, kind):
    t, other = as_kind(kind, qkv(2, 5, 7, 4, 16, dtype, 2))
    mask = random((2, 4, 5, 7), dtype, 4)
    mask = mask > -0.5 if form == "bool" else mask
    back = sorted(range(4), key=order.__getitem__)
    mask = mask.permute(order).contiguous().permute(back)
    measured(target, kind, {**t, "attn_mask": mask}, ("q", "k", "v"), **other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [(64, 64), (64, 32), (32, 64), (7, 9)], ids=str)
@pytest.mark.parametrize(
    "form", ["plain", "causal", "window", "bool mask", "added mask", "mask with a gradient", "used", "strided", "scale"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grads", [False, True])
def test_sdpa_never_takes_torchs_formula(dtype, d, form, kind, grads, monkeypatch):
    """Step by step it holds all scores at once: of torch's kernels for the CPU, only the one with linear memory."""
    from xattn.backends import sdpa

    seen = []
    real = sdpa._sdpa

    def watched(q, k, v, mask=None, **how):
        seen.append(torch._fused_sdp_choice(q, k, v, mask, 0.0, **how))
        return real(q, k, v, mask, **how)

    monkeypatch.setattr(sdpa, "_sdpa", watched)
    tensors = qkv(2, 5, 7, 4, d[0], dtype, 2, d[1])
    if form == "strided":
        tensors = {n: torch.stack([x, x], -1)[..., 0] for n, x in tensors.items()}
    t, other = as_kind(kind, tensors, [4, 7] if form == "used" else None)
    options = {
        "causal": {"causal": True},
        "window": {"window": (2, 0)},
        "bool mask": {"attn_mask": torch.arange(7) != 2},
        "added mask": {"attn_mask": torch.zeros(7)},
        "mask with a gradient": {"attn_mask": torch.zeros(7, dtype=dtype, requires_grad=True)},
        "scale": {"softmax_scale": -0.3, "causal": True},
    }.get(form, {})
    if kind == "paged" and (grads or "attn_mask" in options):
        return
    if grads and form == "mask with a gradient":
        options["attn_mask"].requires_grad_(False)
    args, kwargs = cases.Call(kind, t, other).arguments(
        {n: x.requires_grad_(grads and x.is_floating_point()) for n, x in t.items()}
    )
    with torch.set_grad_enabled(grads):
        out = cases.FUNCTIONS[kind](*args, backend="sdpa", **kwargs, **options)
    if grads:
        out.sum().backward()
    flash = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
    assert seen and set(seen) == {flash}


@pytest.mark.parametrize("d", [(64, 64), (64, 32), (32, 48)], ids=str)
@pytest.mark.parametrize(
    "options", ["{}", "{'causal': True}", "{'window': (9, 0)}", "{'attn_mask': torch.zeros(8192)}"]
)
def test_memory_is_linear_in_the_lengths(d, options):
    """8192 queries and keys of one head: all scores would take 256 MiB, once as they are, and more for each step."""
    code = f"""
import resource, torch, xattn
q, k, v = (torch.randn(1, 8192, 1, n) for n in ({d[0]}, {d[0]}, {d[1]}))
xattn.attention(q[:, :64], k[:, :64], v[:, :64], backend="sdpa")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
xattn.attention(q, k, v, backend="sdpa", **{options})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200


# ---------------------------------------------------------------- compiled code
@each_target
@each_kind
@pytest.mark.parametrize("layout", ["contiguous", "heads first", "every 2nd row", "last dim"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_h31_fake_strides_are_real_strides(target, kind, layout, dtype):
    t, other = as_kind(kind, qkv(2, 6, 6, 4, 16, dtype, 2))
    t = {n: cases.laid_out(x, layout) if x.is_floating_point() else x for n, x in t.items()}
    op = {"attention": "attention", "varlen": "attention_varlen", "paged": "attention_paged"}[kind]
    t = {n: on(target, x) for n, x in t.items()}
    args, kwargs = cases.Call(kind, t, other).arguments(t)
    for return_lse in (False, True):
        kwargs |= {"return_lse": return_lse, "backend": target.backend}
        if not xattn.supported(*args, kind=kind, **kwargs):
            assert target.backend != "reference"
            continue
        real = getattr(torch.ops.xattn, op)(*args, **kwargs)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args]
            fake = getattr(torch.ops.xattn, op)(*fakes, **kwargs)
        for f, r in zip(fake, real, strict=True):
            assert (f.shape, f.stride(), f.dtype) == (r.shape, r.stride(), r.dtype)
    if kind == "paged":
        return
    kwargs["return_lse"] = False
    leaves = [x.detach().requires_grad_() for x in args[:3]]
    out = ask(target, kind, *leaves, *args[3:], **kwargs)
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.stride() == leaf.new_empty(leaf.shape).stride()


@each_target
def test_h31_compiled_transposed_view(target):
    """A BHSD tensor seen as BSHD, forward and backward, with nothing left to eager."""
    t = {n: random((1, 4, 96, 64), torch.float32, i).transpose(1, 2) for i, n in enumerate("qkv")}
    leaves = [on(target, x).requires_grad_() for x in t.values()]
    ask(target, "attention", *leaves, causal=True)

    def fn(q, k, v):
        return xattn.attention(q, k, v, causal=True, backend=target.backend).transpose(1, 2) * 2

    out, want = torch.compile(fn, backend="aot_eager", fullgraph=True)(*leaves), fn(*leaves)
    assert out.stride() == want.stride() and torch.equal(out, want)
    grads, wanted = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, want))
    for got, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, right)


# ---------------------------------------------------------------- caches, devices, threads
@each_target
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 4, 7, 16])
@pytest.mark.parametrize("new", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_new_tokens_across_a_page_boundary(target, layout, page_size, new, dtype):
    before = [page_size - 1, 2 * page_size, 0]
    lengths = [n + new for n in before]
    t = qkv(3, new, max(lengths), 4, 16, dtype, 2)
    full = pages(t["q"], t["k"], t["v"], lengths, page_size, layout)
    want = measured(target, "paged", full, causal=True, kv_layout=layout)
    if want is None:
        return
    grown = pages(t["q"], t["k"], t["v"], lengths, page_size, layout)
    for name in ("k_cache", "v_cache"):  # nothing where the new tokens will stand
        cache = grown[name] if layout == "NHD" else grown[name].transpose(1, 2)
        for b, n in enumerate(before):
            for i in range(n, n + new):
                cache[grown["page_table"][b, i // page_size], i % page_size] = torch.nan
    grown["seqlens_k"] = ints(*before)
    k_new, v_new = (torch.stack([t[s][b, n : n + new] for b, n in enumerate(before)]) for s in "kv")
    grown = {n: on(target, x) for n, x in grown.items()}
    out = ask(target, "paged", *grown.values(), k_new=k_new, v_new=v_new, causal=True, kv_layout=layout)
    grown = {n: x.cpu() for n, x in grown.items()}
    assert torch.equal(out, want.out) and torch.equal(grown["seqlens_k"], ints(*before))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(grown[name].nan_to_num(9.0), full[name].nan_to_num(9.0))


@each_target
@each_dtype
def test_h40_a_bound_of_max_seqlen_is_enough(target, dtype):
    t, _ = packed((3, 0, 5), (4, 2, 7), 4, 16, dtype, 2)
    tight = measured(target, "varlen", t, ("q", "k", "v"), causal=True, max_seqlen_q=5, max_seqlen_k=7)
    if tight is None:
        return
    for longest in ((6, 8), (500, 7), (5, 900), (2**20, 2**20)):
        args = [*(x.detach().requires_grad_(x.is_floating_point()) for x in t.values()), *longest]
        out = ask(target, "varlen", *args, causal=True)
        assert torch.equal(out, tight.out)
    result = measured(target, "varlen", t, ("q", "k", "v"), causal=True, max_seqlen_q=50, max_seqlen_k=70)
    if result is None:
        return
    assert all(torch.equal(grad, tight.grads[n]) for n, grad in result.grads.items())


def test_h37_import_without_a_visible_gpu():
    code = "import xattn, torch; q = torch.ones(1, 2, 1, 8); assert xattn.attention(q, q, q).sum() == 16; print('done')"
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "-1")
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | hidden, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stderr


@pytest.mark.parametrize("arch", ["sm_120", "sm_130", "gfx1201", "gfx1399"])
@each_kind
def test_h38_a_new_architecture_is_named_with_those_that_are_built(arch, kind):
    t, other = as_kind(kind, qkv(1, 2, 4, 2, 16, torch.bfloat16))
    args, kwargs = cases.Call(kind, t, other).arguments({n: x.to("meta") for n, x in t.items()})
    plan = xattn.explain(*args, kind=kind, device=arch, **kwargs)
    native, built = ("sm90", "sm_90") if arch.startswith("sm") else ("cdna", "gfx942")
    text = "; ".join(str(refusal) for refusal in dict(plan.rejected)[native])
    assert arch in text and built in text
    assert plan.backend is not None and arch in str(plan) and built in str(plan)


@pytest.mark.parametrize("written", ["gfx942:sramecc+:xnack-", "gfx942:xnack-", "GFX942"])
def test_h39_architecture_with_features(written):
    t = [torch.empty(1, 2, 2, 16, dtype=torch.bfloat16, device="meta")] * 3
    found, plain = (xattn.explain(*t, device=arch) for arch in (written, "gfx942"))
    assert found == plain and found.device.arch == "gfx942"
    assert not any(r.code == "arch" for r in dict(found.rejected).get("cdna", ()))


@each_target
def test_several_threads_at_once(target):
    t = [qkv(2, 5 + n % 3, 7, 4, 16, DTYPES[n % 4], 2) for n in range(12)]

    def work(x):
        leaves = [y.detach().requires_grad_() for y in x.values()]
        out = ask(target, "attention", *leaves, causal=True)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    alone = [work(x) for x in t]
    with ThreadPoolExecutor(6) as pool:
        for one, many in zip(alone, pool.map(work, t), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))
