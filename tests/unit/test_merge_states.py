"""merge_states: parts of the keys give the attention over all of them, exactly, whatever the parts are."""

from __future__ import annotations

import math

import cases
import oracle
import pytest
import torch

import xattn

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def parts(dtype, cuts, packed=False, **options):
    """(q, k, v), and (outs, lses) of attention over the keys between ``cuts``."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, h, 16, generator=g).to(dtype) for n, h in ((5, 4), (cuts[-1], 2), (cuts[-1], 2)))
    found = [
        xattn.attention(q, k[:, a:b], v[:, a:b], return_lse=True, **options)
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    outs, lses = ([r[i] for r in found] for i in (0, 1))
    if packed:
        outs, lses = [o.flatten(0, 1) for o in outs], [x.transpose(0, 1).flatten(1) for x in lses]
    return (q, k, v), outs, lses


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cuts", [(0, 9), (0, 4, 9), (0, 0, 9), (0, 9, 9), (0, 1, 2, 70, 130)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_give_the_whole(dtype, cuts, packed):
    (q, k, v), outs, lses = parts(dtype, cuts, packed)
    out, lse = xattn.merge_states(outs, lses)
    assert out.dtype == dtype and lse.dtype == torch.float32
    if packed:
        out, lse = out.unflatten(0, (2, 5)), lse.unflatten(1, (2, 5)).transpose(0, 1)
    truth, truth_lse = oracle.attention(*(t.double() for t in (q, k, v)))
    plain, plain_lse = oracle.attention(q, k, v)
    oracle.assert_close("out", out, truth, plain)
    oracle.assert_close("lse", lse, truth_lse, plain_lse)


def test_sinks_in_one_part():
    sinks = torch.tensor([0.5, -1.0, 2.0, 9.0])
    (q, k, v), outs, lses = parts(torch.float32, (0, 4, 9))
    outs[0], lses[0] = xattn.attention(q, k[:, :4], v[:, :4], sinks=sinks, return_lse=True)
    out, lse = xattn.merge_states(outs, lses)
    truth = oracle.attention(q.double(), k.double(), v.double(), sinks=sinks.double())
    for name, got, wanted in zip(("out", "lse"), (out, lse), truth, strict=True):
        oracle.assert_close(name, got, wanted, wanted.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inside", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_empty_parts(dtype, inside, count):
    """What an empty part holds does not matter."""
    outs = [torch.full((1, 1, 2, 64), inside, dtype=dtype) for _ in range(count)]
    lses = [torch.full((1, 2, 1), -math.inf) for _ in range(count)]
    out, lse = xattn.merge_states(outs, lses)
    assert (out == 0).all() and (lse == -math.inf).all()
    real, level = torch.randn(1, 1, 2, 64).to(dtype), torch.randn(1, 2, 1)
    out, lse = xattn.merge_states([*outs, real], [*lses, level])
    assert torch.equal(out, real) and torch.equal(lse, level)


@pytest.mark.parametrize("level", [0.0, 1e4, -1e4, 3e38])
def test_large_levels(level):
    outs, lses = [torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)], [torch.full((1, 1, 1), level)] * 2
    out, lse = xattn.merge_states(outs, lses)
    assert torch.equal(out, torch.full_like(out, 0.5))
    torch.testing.assert_close(lse, lses[0] + math.log(2))


def test_order_and_grouping():
    _, outs, lses = parts(torch.float64, (0, 2, 5, 9))
    whole = xattn.merge_states(outs, lses)
    backwards = xattn.merge_states(outs[::-1], lses[::-1])
    out, lse = xattn.merge_states(outs[:2], lses[:2])
    in_two = xattn.merge_states([out, outs[2]], [lse, lses[2]])
    for other in (backwards, in_two):
        for name, got, wanted in zip(("out", "lse"), other, whole, strict=True):
            oracle.assert_close(name, got.float(), wanted, wanted)


def test_gradients():
    _, outs, lses = parts(torch.float64, (0, 2, 5, 9))
    leaves = [t.double().requires_grad_() for t in (*outs, *lses)]
    with torch.no_grad():
        leaves[4][0, 1, 2] = -math.inf
    outs, lses = leaves[:3], leaves[3:]
    found = torch.autograd.grad([x.masked_fill(x.isinf(), 0).sum() for x in xattn.merge_states(outs, lses)], leaves)
    assert not any(g.isnan().any() for g in found)

    def merged(*parts):
        return xattn.merge_states(parts[:3], parts[3:])

    small = [t[:1, :1, :1].detach().contiguous().requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(merged, small)


def test_gradients_of_the_whole():
    """From the loss through the merge and the parts to q, k, v."""
    (q, k, v), _, _ = parts(torch.float32, (0, 9))
    results = []
    for cuts in ((0, 4, 9), (0, 9)):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        found = [
            xattn.attention(leaves[0], *(t[:, a:b] for t in leaves[1:]), return_lse=True)
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]
        out, lse = xattn.merge_states([o for o, _ in found], [x for _, x in found])
        results.append(torch.autograd.grad((out.sin().sum() + lse.sum()), leaves))
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = oracle.attention(*wide)
    truth = torch.autograd.grad(out.sin().sum() + lse.sum(), wide)
    for name, got, plain, wanted in zip("qkv", *results, truth, strict=True):
        oracle.assert_close(name, got, wanted, plain, truth)


def test_partials_of_a_case():
    """Parts of the keys under a window and ALiBi, by masks that leave one part of the keys each."""
    call = cases.make(cases.Case(heads=(2, 3), window=(3, 1), alibi_slopes="h", lengths=((5, 9),)))
    args, kwargs = call.arguments(call.tensors)
    masks = [(torch.arange(9) < 4), (torch.arange(9) >= 4)]
    found = [xattn.attention(*args, attn_mask=m, return_lse=True, **kwargs) for m in masks]
    out, lse = xattn.merge_states([o for o, _ in found], [x for _, x in found])
    truth, truth_lse, *_ = cases.expected(call, torch.float64)
    plain, plain_lse, *_ = cases.expected(call, torch.float32)
    oracle.assert_close("out", out, truth, plain)
    oracle.assert_close("lse", lse, truth_lse, plain_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("levels", [(math.inf, 0.0), (-math.inf, math.inf, 3.0), (math.inf, 1.0, math.inf)], ids=str)
def test_a_part_without_bound_is_the_result(dtype, packed, levels):
    shape, lse_shape = ((5, 2, 8), (2, 5)) if packed else ((1, 5, 2, 8), (1, 2, 5))
    outs = [torch.randn(shape).to(dtype).requires_grad_() for _ in levels]
    lses = [torch.zeros(lse_shape) for _ in levels]
    for lse, level in zip(lses, levels, strict=True):
        lse[..., 0, :] = level  # the other head is merged as ever
        lse.requires_grad_()
    out, lse = xattn.merge_states(outs, lses)
    wins = [o for o, level in zip(outs, levels, strict=True) if level == math.inf]
    torch.testing.assert_close(out[..., 0, :], (sum(wins) / len(wins))[..., 0, :])
    torch.testing.assert_close(out[..., 1, :], (sum(outs) / len(outs))[..., 1, :], rtol=1e-2, atol=1e-2)
    assert (lse[..., 0, :] == math.inf).all() and lse[..., 1, :].isfinite().all()
    grads = torch.autograd.grad((out, lse), (*outs, *lses), (torch.ones_like(out), torch.ones_like(lse)))
    assert not any(g.isnan().any() for g in grads)
    assert all((g[..., 0, :] == 0).all() for g in grads[len(outs) :])
