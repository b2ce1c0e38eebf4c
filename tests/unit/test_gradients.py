"""Derivatives: finite differences in float64, first and second order, for every argument that has one.

Values against the oracle are in the cases of test_attention.py and test_varlen.py.
"""

from __future__ import annotations

from dataclasses import replace

import cases
import oracle
import pytest
import torch

import xattn

SMALL = {
    "attention": cases.Case(
        dtype="fp64", head_dims=(4, 3), heads=(1, 2), lengths=((3, 4),), grads="all", return_lse=True
    ),
    "varlen": cases.Case(
        "varlen", "fp64", (4, 3), (1, 2), lengths=((3, 4), (0, 2), (2, 1)), grads="all", return_lse=True, spare=1
    ),
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (1, 0)},
    "softcap": {"softcap": 2.5},
    "bool mask": {"attn_mask": "bool bhqk"},
    "added mask": {"attn_mask": "add 11qk"},
    "added mask of keys": {"attn_mask": "add k"},
    "alibi_slopes": {"alibi_slopes": "bh"},
    "sinks": {"sinks": True},
    "seqused_k": {"seqused_k": "int64"},
    "dropout": {"dropout_p": 0.25},
    "score_mod": {"score_mod": "captured", "softcap": 2.5},
    "mask_mod": {"mask_mod": "plain"},
    "epilogue": {"epilogue": "captured"},
    "scales": {"scales": "0-d", "softcap": 2.5},
    "scales per head": {"scales": "per head"},
}


def doubled(case: cases.Case) -> cases.Call:
    """The call with every float tensor but the scales, which are float32 by contract, in float64."""
    call = cases.make(case)
    wide = {n: t.double() if t.is_floating_point() and not n.endswith("_scale") else t for n, t in call.tensors.items()}
    call.tensors = wide
    call.wants = tuple(n for n in call.wants if wide[n].dtype == torch.float64)
    return call


def function_of(call: cases.Call, backend: str):
    """(f of the tensors that want a gradient, those tensors, all finite); what is -inf in lse counts as 0."""
    finite = [torch.nan_to_num(call.tensors[n].detach(), nan=0.0, neginf=0.0) for n in call.wants]
    leaves = [x.requires_grad_() for x in finite]

    def f(*values):
        args, kwargs = call.arguments(call.tensors | dict(zip(call.wants, values, strict=True)))
        result = cases.FUNCTIONS[call.kind](*args, backend=backend, **kwargs)
        if not call.other.get("return_lse"):
            return result
        out, lse = result
        return out, lse.double().masked_fill(lse == -torch.inf, 0)

    return f, leaves


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_first_derivative(kind, options):
    """lse is float32 by contract, too coarse for finite differences of it: test_attention.py measures its gradient."""
    call = doubled(replace(SMALL[kind], return_lse=False, **options))
    f, leaves = function_of(call, "reference")
    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_second_derivative(kind, options):
    call = doubled(replace(SMALL[kind], return_lse=False, **options))
    f, leaves = function_of(call, "reference")
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "sinks": True}, {"window": (1, 0), "score_mod": "captured"}], ids=str
)
def test_second_derivative_through_lse(kind, options):
    """Against autograd of the oracle, since lse is float32."""
    call = doubled(replace(SMALL[kind], **options))
    results = []
    for f, leaves in (function_of(call, "reference"), _oracle_function(call)):
        out, lse = f(*leaves)
        first = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.cos().sum() for g in first), leaves)])
    for n, (got, truth) in enumerate(zip(*results, strict=True)):
        oracle.assert_close(f"derivative {n}", got.float(), truth, truth.float(), tuple(results[1]))


def _oracle_function(call: cases.Call):
    _, leaves = function_of(call, "reference")

    def f(*values):
        args, kwargs = call.arguments(call.tensors | dict(zip(call.wants, values, strict=True)))
        kwargs.pop("return_lse")
        out, lse = cases.ORACLES[call.kind](*args, **kwargs)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    return f, leaves


@pytest.mark.parametrize("target", cases.targets(), ids=str)
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_gradients_add_up_over_what_is_broadcast(target, dtype):
    """One tensor as k and v, and expanded over the batch."""
    base = torch.randn(1, 7, 1, 8, dtype=cases.DTYPES[dtype], device=target.device)
    q = torch.randn(2, 5, 3, 8, dtype=base.dtype, device=target.device)
    results = []

    def on_target(*tensors):
        return xattn.attention(*tensors, backend=target.backend)

    def by_oracle(*tensors):
        return oracle.attention(*tensors)[0]

    for f, d in ((on_target, base.dtype), (by_oracle, torch.float64), (by_oracle, base.dtype)):
        leaf = base.to(d).requires_grad_()
        kv = leaf.expand(2, -1, -1, -1)
        results.append(torch.autograd.grad(f(q.to(d), kv, kv).sin().sum(), leaf)[0])
    oracle.assert_close("gradient", *results)


def test_masks_that_broadcast_get_the_sum():
    """Every shape of an added mask, its gradient of the same shape."""
    q, k, v = (torch.randn(2, n, 2, 4, dtype=torch.float64) for n in (3, 5, 5))
    for shape in ((2, 2, 3, 5), (1, 1, 3, 5), (3, 5), (5,), (2, 1, 1, 5), (2, 3, 1), (1,), (), (1, 2, 1, 5)):
        mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(2, 3, 2, 4, dtype=torch.float64)
        got, truth = (
            torch.autograd.grad((out * weight).sum(), mask)[0]
            for out in (xattn.attention(q, k, v, attn_mask=mask), oracle.attention(q, k, v, attn_mask=mask)[0])
        )
        assert got.shape == mask.shape
        oracle.assert_close(f"mask {shape}", got, truth, truth, (weight,))
