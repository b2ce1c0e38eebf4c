"""The twelve contracts, one after the other, on every target; what a target refuses, it refuses with reasons.

Two probes say most: with q = 0 and v the identity matrix a row of the result shows which keys are seen, and with which
weight; lse of q = 0 is the logarithm of the number of keys.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import subprocess
import sys

import cases
import oracle
import pytest
import torch
from torch import Tensor

import xattn
from xattn import dispatch

per_target = pytest.mark.parametrize("target", cases.targets(), ids=str)
per_kind = pytest.mark.parametrize("kind", cases.FUNCTIONS)
PAIRS = [(1, 1), (5, 5), (3, 8), (8, 3), (1, 9), (9, 1)]


class Refused(Exception):
    """The target does not answer, and said why."""


def ask(target: cases.Target, kind: str, *args, **kwargs):
    """The call on the target; raises Refused where it refuses as its plan says."""
    plan = xattn.explain(*args, kind=kind, backend=target.backend, **kwargs)
    if plan.backend is None:
        with pytest.raises(xattn.UnsupportedError):
            cases.FUNCTIONS[kind](*args, backend=target.backend, **kwargs)
        raise Refused
    return cases.FUNCTIONS[kind](*args, backend=target.backend, **kwargs)


def answered(test):
    """A test in which being refused, with reasons, is right."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with contextlib.suppress(Refused):
            test(*args, **kwargs)

    return run


def pack(kind: str, q: Tensor, k: Tensor, v: Tensor, page_size: int = 2) -> list:
    """Arguments of a call that means what ``attention(q, k, v)`` means, with NaN in what belongs to no sequence."""
    batch, seqlen_q, seqlen_k = *q.shape[:2], k.shape[1]
    if kind == "attention":
        return [q, k, v]
    if kind == "varlen":
        offsets = [torch.arange(batch + 1, device=q.device) * n for n in (seqlen_q, seqlen_k)]
        tail = [x.new_full((2, *x.shape[2:]), math.nan) for x in (q, k, v)]
        rows = [torch.cat([x.flatten(0, 1), t]) for x, t in zip((q, k, v), tail, strict=True)]
        return [*rows, *offsets, seqlen_q, seqlen_k]
    pages = -(-seqlen_k // page_size)
    caches = []
    for x in (k, v):
        cache = x.new_full((batch, pages * page_size, *x.shape[2:]), math.nan)
        cache[:, :seqlen_k] = x
        caches.append(cache.view(batch * pages, page_size, *x.shape[2:]))
    table = torch.full((batch, pages + 1), -1, device=q.device)
    table[:, :pages] = torch.arange(batch * pages, device=q.device).view(batch, pages)
    return [q, *caches, table, torch.full((batch,), seqlen_k, device=q.device)]


def unpack(kind: str, out: Tensor, batch: int) -> Tensor:
    """(batch, seqlen_q, heads, head_dim_v) of what ``pack`` packed."""
    return out[:-2].unflatten(0, (batch, -1)) if kind == "varlen" else out


def weights(target, kind, seqlen_q, seqlen_k, dtype=torch.float32, **options) -> Tensor:
    """(batch 2, seqlen_q, seqlen_k) weights of the keys, for q = 0 and one head."""
    device = target.device
    q = torch.zeros(2, seqlen_q, 1, 8, dtype=dtype, device=device)
    k = torch.randn(2, seqlen_k, 1, 8, dtype=dtype, device=device)
    v = torch.eye(seqlen_k, dtype=dtype, device=device)[None, :, None].expand(2, -1, 1, -1)
    out = ask(target, kind, *pack(kind, q, k, v), **options)
    return unpack(kind, out, 2)[:, :, 0]


def randn(*shape, device="cpu", dtype=torch.float32, seed=0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def qkv(target, seqlen_q=5, seqlen_k=7, heads=(4, 2), d=16, dtype=torch.float32):
    return [
        randn(2, n, h, d, device=target.device, dtype=dtype, seed=s)
        for s, (n, h) in enumerate(((seqlen_q, heads[0]), *[(seqlen_k, heads[1])] * 2))
    ]


# ---------------------------------------------------------------- 1: an empty row gives 0, -inf, and no gradient
EMPTY = {
    "no keys": lambda sq: {"sk": 0},
    "causal": lambda sq: {"sk": 2, "causal": True, "rows": range(sq - 2)},
    "window": lambda sq: {"sk": 2, "window": (None, 0), "rows": range(sq - 2)},
    "bool mask": lambda sq: {"attn_mask": torch.arange(sq)[:, None] != 1, "rows": [1]},
    "added mask": lambda sq: {"attn_mask": torch.where(torch.arange(sq)[:, None] != 1, 0.0, -math.inf), "rows": [1]},
    "seqused_k": lambda sq: {"seqused_k": torch.tensor([0, 0])},
    "mask_mod": lambda sq: {"mask_mod": lambda b, h, i, j: i != 1, "rows": [1]},
}  # fmt: skip


@per_target
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("kind", ["attention", "varlen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", EMPTY)
@pytest.mark.parametrize("grads", [False, True])
@answered
def test_1_empty_rows(target, kind, dtype, how, with_lse, grads):
    options = EMPTY[how](5)
    sk, rows = options.pop("sk", 7), list(options.pop("rows", range(5)))
    options = {n: x.to(target.device) if isinstance(x, Tensor) else x for n, x in options.items()}
    q, k, v = (t.requires_grad_(grads) for t in qkv(target, 5, sk, dtype=dtype))
    result = ask(target, kind, *pack(kind, q, k, v), return_lse=with_lse, **options)
    out, lse = result if with_lse else (result, None)
    out = unpack(kind, out, 2)
    assert (out[:, rows] == 0).all() and not out.isnan().any()
    assert out[:, [r for r in range(5) if r not in rows]].ne(0).all()
    roots = [out]
    if with_lse:
        lse = lse[:, :-2].unflatten(1, (2, -1)).transpose(0, 1) if kind == "varlen" else lse
        assert (lse[:, :, rows] == -math.inf).all()
        roots.append(lse)
    if grads:
        found = torch.autograd.grad(roots, (q, k, v), [torch.ones_like(x) for x in roots])
        assert not any(g.isnan().any() for g in found)
        assert (found[0][:, rows] == 0).all()
        if len(rows) == 5:
            assert not any(g.any() for g in found)


@per_target
@pytest.mark.parametrize("kind", cases.FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fill", [6e4, math.inf, math.nan])
@pytest.mark.parametrize("grads", [False, True])
@answered
def test_1_without_keys_q_does_not_matter(target, kind, dtype, fill, grads):
    """Whatever q holds: large numbers whose sum overflows, or none."""
    grads &= kind != "paged"
    q, k, v = qkv(target, 5, 0, dtype=dtype)
    leaves = [t.requires_grad_(grads) for t in (torch.full_like(q, fill), k, v)]
    args = pack(kind, *leaves)
    if kind == "paged":
        caches = [torch.full((3, 2, 2, 16), math.nan, dtype=dtype, device=target.device)] * 2
        args = [leaves[0], *caches, torch.full((2, 2), -1, device=target.device), args[-1]]
    out = ask(target, kind, *args)
    assert (unpack(kind, out, 2) == 0).all()
    if grads:
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), leaves))


@per_target
@pytest.mark.parametrize("kind", ["attention", "varlen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["bool mask", "added mask", "window", "causal"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("grads", [False, True])
@answered
def test_1_what_an_empty_row_holds_stays_in_it(target, kind, dtype, how, sinks, grads):
    """NaN in q of the row and in the gradient of its out reaches nothing; NaN in v does not reach the row."""
    options = EMPTY[how](5)
    sk, rows = options.pop("sk", 7), list(options.pop("rows"))
    options = {n: x.to(target.device) if isinstance(x, Tensor) else x for n, x in options.items()}
    if sinks:
        options["sinks"] = torch.tensor([0.5, 1.0, 0.2, 2.0], device=target.device)
    results = []
    for fill in (math.nan, 0.0):
        q, k, v = qkv(target, 5, sk, dtype=dtype)
        q[:, rows] = fill
        leaves = [t.requires_grad_(grads) for t in (q, k, v)]
        out = unpack(kind, ask(target, kind, *pack(kind, *leaves), **options), 2)
        dout = torch.ones_like(out)
        dout[:, rows] = fill
        results.append([out, *(torch.autograd.grad(out, leaves, dout) if grads else ())])
        assert all((g[:, rows] == 0).all() for g in results[-1][1:2])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    q, k, v = qkv(target, 5, sk, dtype=dtype)
    v[:] = math.nan
    out = unpack(kind, ask(target, kind, *pack(kind, q, k, v), **options), 2)
    assert (out[:, rows] == 0).all()


@per_target
@per_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grads", [False, True])
@answered
def test_1_a_sink_without_bound_takes_all(target, kind, dtype, grads):
    grads &= kind != "paged"
    leaves = [t.requires_grad_(grads) for t in qkv(target, dtype=dtype)]
    sinks = torch.tensor([math.inf, 0.5, -math.inf, math.inf], device=target.device, requires_grad=grads)
    out, lse = ask(target, kind, *pack(kind, *leaves), sinks=sinks, return_lse=True)
    plain, plain_lse = ask(target, kind, *pack(kind, *leaves), sinks=sinks.detach().clamp(max=0.5), return_lse=True)
    heads = lse.transpose(0, 1) if lse.dim() == 3 else lse
    other = plain_lse.transpose(0, 1) if lse.dim() == 3 else plain_lse
    assert (out[..., [0, 3], :] == 0).all() and torch.equal(out[..., [1, 2], :], plain[..., [1, 2], :])
    real = heads[:, :-2] if kind == "varlen" else heads
    assert (real[[0, 3]] == math.inf).all() and torch.equal(heads[[1, 2]], other[[1, 2]])
    if grads:
        found = torch.autograd.grad(
            (out, lse), (leaves[0], *leaves, sinks), (torch.ones_like(out), torch.ones_like(lse)), allow_unused=True
        )
        assert not any(g.isnan().any() for g in found)
        assert (found[0][:, :, [0, 3]] == 0).all() and (found[-1][[0, 3]] == 0).all()


# ---------------------------------------------------------------- 2, 3: aligned bottom-right, distances inclusive
def diagonal_distance(seqlen_q, seqlen_k):
    """How far key j stands behind (negative) or ahead of the query's own position."""
    return torch.arange(seqlen_k) - (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)


@per_target
@per_kind
@pytest.mark.parametrize("sizes", PAIRS, ids=str)
@answered
def test_2_causal(target, kind, sizes):
    seen = weights(target, kind, *sizes, causal=True) > 0
    assert torch.equal(seen.cpu(), (diagonal_distance(*sizes) <= 0).expand_as(seen))


@per_target
@per_kind
@pytest.mark.parametrize("sizes", PAIRS, ids=str)
@answered
def test_3_window(target, kind, sizes):
    distance = diagonal_distance(*sizes)
    for left, right, causal in itertools.product([None, 0, 1, 3, 100], [None, 0, 1, 3, 100], [False, True]):
        seen = weights(target, kind, *sizes, causal=causal, window=(left, right)) > 0
        low = -math.inf if left is None else -left
        high = min(math.inf if right is None else right, 0 if causal else math.inf)
        wanted = (distance >= low) & (distance <= high)
        assert torch.equal(seen.cpu(), wanted.expand_as(seen)), (left, right, causal)


@per_target
@per_kind
@pytest.mark.parametrize("far", [2**31, 2**62, sys.maxsize - 1, sys.maxsize])
@answered
def test_3_distances_without_end(target, kind, far):
    """Distances that an index cannot be added to are as good as None."""
    args = pack(kind, *qkv(target))
    for window in ((None, far), (far, None), (far, far), (2, far), (far, 0)):
        plain = tuple(None if n == far else n for n in window)
        for causal in (False, True):
            options = {"causal": causal, "return_lse": target.backend != "sdpa"}
            got, wanted = (ask(target, kind, *args, window=w, **options) for w in (window, plain))
            if not options["return_lse"]:
                got, wanted = [got], [wanted]
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, wanted, strict=True))


@per_target
@per_kind
@pytest.mark.parametrize("scale", [-0.3, 0.0, -2.0, 1e-37, -1e30])
@pytest.mark.parametrize("sizes", [(5, 5), (3, 8), (8, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
def test_2_causal_under_any_scale(target, kind, scale, sizes, dtype):
    case = cases.Case(
        kind,
        dtype,
        heads=(2, 2),
        lengths=(sizes,) * (1 if kind == "attention" else 2),
        causal=True,
        softmax_scale=scale,
        grads="" if kind == "paged" else "qkv",
        page_size=4 if kind == "paged" else 0,
    )
    call = cases.make(case, target.device)
    if abs(scale) < 1e29:
        return cases.check(call, target)
    args, kwargs = call.arguments({n: x.detach().requires_grad_(n in call.wants) for n, x in call.tensors.items()})
    with contextlib.suppress(Refused):
        out = ask(target, kind, *args, **kwargs)
        assert not out.isnan().any()


# ---------------------------------------------------------------- 4: lse
@per_target
@per_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@answered
def test_4_lse(target, kind, dtype):
    q, k, v = qkv(target, dtype=dtype)
    out, lse = ask(target, kind, *pack(kind, q * 0, k, v), causal=True, return_lse=True)
    assert lse.dtype == torch.float32 and lse.device == out.device
    wanted = torch.tensor([3.0, 4, 5, 6, 7]).log()
    if kind == "varlen":
        assert lse.shape == (4, 12) and (lse[:, 10:] == -math.inf).all()
        wanted = wanted.repeat(2).expand(4, -1)
        lse = lse[:, :10]
    else:
        assert lse.shape == (2, 4, 5)
        wanted = wanted.expand(2, 4, -1)
    oracle.assert_close("lse", lse.cpu(), wanted.double(), wanted)


@per_target
@pytest.mark.parametrize("kind", ["attention", "varlen"])
@answered
def test_4_gradients_flow_through_lse(target, kind):
    q, k, v = (t.requires_grad_() for t in qkv(target))
    _, lse = ask(target, kind, *pack(kind, q, k, v), return_lse=True)
    got = torch.autograd.grad(lse[lse > -math.inf].sum(), (q, k))
    results = []
    for dtype in (torch.float64, torch.float32):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        results.append(torch.autograd.grad(oracle.attention(*leaves)[1].sum(), leaves[:2]))
    for name, g, truth, plain in zip("qk", got, *results, strict=True):
        oracle.assert_close(name, g, truth, plain, results[0])


# ---------------------------------------------------------------- 5: what lies outside never reaches a result
@per_target
@per_kind
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("grads", [False, True])
@answered
def test_5_what_lies_outside(target, kind, junk, grads):
    """The result is bit for bit that with zeros there."""
    if kind == "paged" and grads:
        return
    results = []
    for fill in (junk, 0.0):
        q, k, v = qkv(target)
        used = torch.tensor([3, 7], device=target.device)
        if kind == "paged":
            args = pack("paged", q, k, v)
            args[4] = used
            for cache in args[1:3]:
                cache[2:4], cache[cache.isnan()] = fill, fill
                cache[1, 1] = fill
            results.append([ask(target, kind, *args)])
            continue
        for x in (k, v):
            x[0, 3:] = fill
        q, k, v = leaves = [t.requires_grad_(grads) for t in (q, k, v)]
        args = pack(kind, q, k, v)
        if kind == "varlen":
            args[:3] = [torch.cat([t[:-2], torch.full_like(t[-2:], fill)]) for t in args[:3]]
        out = ask(target, kind, *args, seqused_k=used)
        found = [out]
        if grads:
            dout = torch.ones_like(out)
            if kind == "varlen":
                assert (out[-2:] == 0).all()
                dout[-2:] = fill
            found += torch.autograd.grad(out, leaves, dout)
        results.append(found)
    for a, b in zip(*results, strict=True):
        assert not a.isnan().any() and torch.equal(a, b)


# ---------------------------------------------------------------- 6: no argument is ignored
OPTIONS = {
    "causal": True,
    "window": (1, 0),
    "softmax_scale": 2.0,
    "softcap": 0.5,
    "attn_mask": torch.arange(7) % 2 == 0,
    "alibi_slopes": torch.tensor([0.5, 1.0, 0.2, 2.0]),
    "sinks": torch.tensor([0.5, 1.0, 0.2, 2.0]),
    "seqused_k": torch.tensor([3, 4]),
    "dropout_p": 0.5,
    "score_mod": lambda s, b, h, i, j: s * 2,
    "mask_mod": lambda b, h, i, j: j != 2,
    "epilogue": xattn.Epilogue(lambda o, b, h, i, d: o * 2),
    "q_scale": 2.0,
    "k_scale": torch.tensor(2.0),
    "v_scale": torch.full((2, 2), 3.0),
}


@per_target
@per_kind
@pytest.mark.parametrize("name", OPTIONS)
@answered
def test_6_no_argument_is_ignored(target, kind, name):
    if kind == "paged" and name in ("seqused_k", "dropout_p"):
        return
    value = OPTIONS[name]
    if kind == "paged" and name == "attn_mask":
        value = torch.tensor([True, False, True, False, True]).expand(10, 5)
    value = value.to(target.device) if isinstance(value, Tensor) else value
    args = pack(kind, *qkv(target))
    plain = ask(target, kind, *args)
    changed = ask(target, kind, *args, **{name: value})
    assert not torch.equal(plain, changed)


# ---------------------------------------------------------------- 7: index tensors
@per_target
@per_kind
@pytest.mark.parametrize("form", [torch.int32, torch.int64, "strided"], ids=str)
@answered
def test_7_index_tensors(target, kind, form):
    args = pack(kind, *qkv(target))
    options = {} if kind == "paged" else {"seqused_k": torch.tensor([3, 6], device=target.device)}
    wanted = ask(target, kind, *args, **options)

    def change(x):
        if not isinstance(x, Tensor) or x.is_floating_point():
            return x
        if form != "strided":
            return x.to(form)
        return torch.stack([x, torch.full_like(x, -99)], -1)[..., 0]

    got = ask(target, kind, *map(change, args), **{n: change(x) for n, x in options.items()})
    assert torch.equal(got, wanted)


# ---------------------------------------------------------------- 8: the same result, bit for bit
@per_target
@per_kind
@pytest.mark.parametrize("d", [16, 72])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@answered
def test_8_forward_is_bitwise_reproducible(target, kind, d, dtype):
    args = pack(kind, *qkv(target, 65, 129, (6, 2), d, dtype))
    first = ask(target, kind, *args, causal=True)
    for _ in range(3):
        assert torch.equal(first, ask(target, kind, *args, causal=True))


@per_target
@pytest.mark.parametrize("kind", ["attention", "varlen"])
@answered
def test_8_backward_is_bitwise_reproducible_when_asked(target, kind):
    leaves = [t.requires_grad_() for t in qkv(target, 65, 129, (6, 2), 64, torch.bfloat16)]
    found = []
    for _ in range(5):
        out = ask(target, kind, *pack(kind, *leaves), deterministic=True)
        found.append(torch.autograd.grad(out.sum(), leaves))
    assert all(torch.equal(a, b) for grads in found[1:] for a, b in zip(grads, found[0], strict=True))


@per_target
@per_kind
@answered
def test_8_batch_invariant(target, kind):
    q, k, v = qkv(target, 3, 9)
    with xattn.batch_invariant():
        both = unpack(kind, ask(target, kind, *pack(kind, q, k, v)), 2)
        for b in range(2):
            one = [t[b : b + 1] for t in (q, k, v)]
            assert torch.equal(both[b : b + 1], unpack(kind, ask(target, kind, *pack(kind, *one)), 1))


@per_target
@pytest.mark.parametrize("kind", ["varlen", "paged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@answered
def test_8_batch_invariant_beside_longer_sequences(target, kind, dtype):
    """Another sequence must not decide which kernel answers."""
    queries, keys = [2, 70], [37, 90]
    q, k, v = (
        randn(sum(n), h, 16, device=target.device, dtype=dtype, seed=s)
        for s, (n, h) in enumerate(((queries, 4), (keys, 2), (keys, 2)))
    )

    def offsets(lengths):
        return torch.tensor([0, *itertools.accumulate(lengths)], device=target.device)

    def call(count):
        nq, nk = queries[:count], keys[:count]
        longest = {"max_seqlen_q": max(nq), "max_seqlen_k": max(nk), "causal": True}
        if kind == "varlen":
            rows = [x[: sum(n)] for x, n in ((q, nq), (k, nk), (v, nk))]
            return ask(target, kind, *rows, offsets(nq), offsets(nk), **longest)
        caches = [torch.cat([x, x.new_zeros(-len(x) % 16, *x.shape[1:])]).unflatten(0, (-1, 16)) for x in (k, v)]
        table = torch.arange(8, device=target.device).expand(count, -1).clone()
        table[1:] += 2  # from the page that the first one leaves on
        del longest["max_seqlen_k"]
        used = torch.tensor(nk, device=target.device)
        return ask(target, kind, q[: sum(nq)], *caches, table, used, cu_seqlens_q=offsets(nq), **longest)

    with xattn.batch_invariant():
        assert torch.equal(call(2)[: queries[0]], call(1))


# ---------------------------------------------------------------- 9: dropout
@per_target
@pytest.mark.parametrize("kind", ["attention", "varlen"])
@pytest.mark.parametrize("p", [0.25, 1.0])
@answered
def test_9_dropout(target, kind, p):
    pair = torch.tensor([3, 1], device=target.device)
    got = weights(target, kind, 9, 70, dropout_p=p, dropout_rng=pair)
    wanted = oracle.keep(pair, p, 2, 1, 9, 70)[:, 0]
    assert torch.equal(got.cpu() != 0, wanted)
    scaled = torch.full((), 1 / (70 * (1 - p)) if p < 1 else 0.0, dtype=torch.float64).expand(wanted.shape) * wanted
    oracle.assert_close("weights", got.cpu(), scaled, scaled.float())


@per_target
@pytest.mark.parametrize("kind", ["attention", "varlen"])
@answered
def test_9_pairs_are_drawn_from_torchs_generator(target, kind):
    torch.manual_seed(5)
    first, second = (weights(target, kind, 9, 70, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(first, weights(target, kind, 9, 70, dropout_p=0.5)) and not torch.equal(first, second)


# ---------------------------------------------------------------- 10, 11: devices
def test_10_import_creates_no_context_and_survives_fork():
    code = """
import os, torch, xattn
xattn.devices(), xattn.capabilities(), xattn.supported(*(torch.empty(1, 1, 1, 8, device="meta"),) * 3)
assert not torch.cuda.is_initialized()
child = os.fork()
if not child:
    q = torch.ones(1, 2, 1, 8)
    os._exit(0 if torch.equal(xattn.attention(q, q, q), q) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


@pytest.mark.gpu(count=2)
@per_target
@per_kind
@answered
def test_11_the_device_of_the_tensors_is_used(target, kind):
    q, k, v = (t.to("cuda:1") for t in qkv(target, dtype=torch.float16))
    with torch.cuda.device(0):
        out = ask(target, kind, *pack(kind, q, k, v))
    assert out.device == q.device
    truth, plain = (oracle.attention(q.to(d), k.to(d), v.to(d))[0] for d in (torch.float64, torch.float16))
    oracle.assert_close("out", unpack(kind, out, 2), truth, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "sdpa", "sm80"])
def test_11_the_current_stream_is_used(backend):
    target = cases.Target(backend, "cuda")
    q, k, v = (torch.randn(2, 512, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    wanted = ask(target, "attention", q, k, v)
    stream = torch.cuda.Stream()
    late = torch.full_like(q, math.nan)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        got = ask(target, "attention", late, k, v)
    stream.synchronize()
    assert torch.equal(got, wanted)


# ---------------------------------------------------------------- 12: values on the device (on the CPU: test_errors.py)
@per_target
@pytest.mark.parametrize(
    "kind, change",
    [
        ("varlen", {3: [0, 4, 3]}),
        ("varlen", {3: [1, 5, 10]}),
        ("varlen", {3: [0, 5, 99]}),
        ("varlen", {4: [0, 8, 7]}),
        ("varlen", {4: [0, 7, 17]}),
        ("varlen", {5: 4}),
        ("varlen", {6: 6}),
        ("varlen", {"seqused_k": [3, 8]}),
        ("varlen", {"seqused_k": [-1, 3]}),
        ("attention", {"seqused_k": [3, 8]}),
        ("attention", {"seqused_k": [-1, 3]}),
        ("paged", {4: [3, 99]}),
        ("paged", {4: [-1, 3]}),
        ("paged", {3: [[0, 1, 2, 8], [4, 5, 6, 7]]}),
        ("paged", {3: [[0, -1, 2, 3], [4, 5, 6, 7]]}),
    ],
    ids=str,
)
@answered
def test_12_bad_values_on_the_device(target, kind, change):
    dtype = torch.bfloat16 if dispatch.get(target.backend).native else torch.float32
    args, options = pack(kind, *qkv(target, dtype=dtype)), {}
    out = torch.full_like(args[0], math.nan)
    for where, value in change.items():
        value = torch.tensor(value, device=target.device) if isinstance(value, list) else value
        if isinstance(where, int):
            args[where] = value
        else:
            options[where] = value
    if target.device == "cpu":
        with pytest.raises(xattn.DeviceValueError):
            ask(target, kind, *args, out=out, **options)
        assert out.isnan().all()
        xattn.check_errors()
    else:
        # twice: a native backend launches the second without planning
        for _ in range(2):
            ask(target, kind, *args, **options)
            with pytest.raises(xattn.DeviceValueError):
                xattn.check_errors()
        xattn.check_errors()


def test_12_validation_on_the_device_is_a_setting(monkeypatch):
    q = torch.ones(1, 2, 1, 8)
    monkeypatch.setenv("XATTN_VALIDATE", "device")
    assert torch.equal(xattn.attention(q, q, q), q)
    monkeypatch.setenv("XATTN_VALIDATE", "everything")
    with pytest.raises(ValueError, match="XATTN_VALIDATE is 'everything'; allowed: 'device' or unset"):
        xattn.attention(q, q, q)
