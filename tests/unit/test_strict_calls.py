"""What is asked in a way that is easily overlooked: tangents, gradients of ops, fakes, transforms, overlaps, copies."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import xattn

P = xattn.attention_paged
Q = torch.randn(2, 5, 2, 8)
TABLE, LENGTHS = torch.tensor([[0, 1], [2, 3]]), torch.tensor([1, 2])


def caches(**kwargs):
    return torch.zeros(4, 8, 2, 8, **kwargs), torch.zeros(4, 8, 2, 8)


def test_out_that_overlaps_is_refused_when_compiled():
    out = torch.zeros(400).as_strided((2, 5, 2, 8), (1, 8, 4, 1))
    with pytest.raises(Exception, match="out: got strides|Observed exception"):
        torch.compile(lambda x, o: xattn.attention(x, x, x, out=o), fullgraph=True, backend="eager")(Q, out)
    assert not out.any()


@pytest.mark.parametrize(
    "name", ["attn_mask", "alibi_slopes", "sinks", "q_scale", "score_mod", "epilogue", "op", "sdpa"]
)
def test_tangents_are_refused(name):
    given = {"attn_mask": torch.zeros(5, 5), "op": Q, "sdpa": torch.zeros(5, 5)}.get(name, torch.ones(2))
    given = torch.tensor(1.0) if name == "q_scale" else given
    with forward_ad.dual_level(), pytest.raises(xattn.UnsupportedError, match="forward-mode"):
        dual = forward_ad.make_dual(given, torch.ones_like(given))
        if name == "op":
            torch.ops.xattn.attention(dual, Q, Q)
        elif name == "sdpa":
            q = Q.transpose(1, 2)
            xattn.compat.sdpa.scaled_dot_product_attention(q, q, q, attn_mask=dual)
        elif name == "score_mod":
            xattn.attention(Q, Q, Q, score_mod=lambda s, b, h, i, j: s * dual[h])
        elif name == "epilogue":
            epilogue = xattn.Epilogue(lambda o, b, h, i, d, aux: o * aux[h], (dual,))
            xattn.attention(Q, Q, Q, epilogue=epilogue)
        else:
            xattn.attention(Q, Q, Q, **{name: dual})


@pytest.mark.parametrize("name", ["k_new", "v_new", "rotary"])
def test_tangents_are_refused_in_paged_calls(name):
    k, v = caches()
    with forward_ad.dual_level(), pytest.raises(xattn.UnsupportedError, match="forward-mode"):
        table = torch.ones(32, 4)
        dual = forward_ad.make_dual(table, table)
        new = {"k_new": Q, "v_new": Q, "rotary": xattn.Rotary(dual if name == "rotary" else table, table)}
        if name != "rotary":
            new[name] = forward_ad.make_dual(Q, Q)
        P(Q, k, v, TABLE, LENGTHS, **new)
    assert not k.any()


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "k_new", "v_new", "k_scale"])
def test_append_op_has_no_gradient(name):
    given = dict(zip(("k_cache", "v_cache"), caches(), strict=True))
    given |= {"page_table": TABLE, "seqlens_k": LENGTHS, "k_new": Q.clone(), "v_new": Q.clone()}
    given["k_scale"] = torch.tensor(1.0)
    given[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name}: got a tensor that requires a gradient"):
        torch.ops.xattn.append_paged(**given)
    with torch.no_grad():
        torch.ops.xattn.append_paged(**given)


@pytest.mark.parametrize("name", ["q", "k_cache", "sinks", "k_scale", "rotary"])
def test_paged_calls_name_what_asks_for_a_gradient(name):
    k, v = caches(requires_grad=name == "k_cache")
    given = {"sinks": torch.zeros(2), "k_scale": torch.tensor(1.0)}.get(name)
    kwargs = {} if given is None else {name: given.requires_grad_()}
    if name == "rotary":
        kwargs = {"rotary": xattn.Rotary(torch.ones(32, 4, requires_grad=True), torch.ones(32, 4))}
    with pytest.raises(ValueError, match=f"^{name}: got .*requires a gradient"):
        P(Q.clone().requires_grad_(name == "q"), k, v, TABLE, LENGTHS + 5, **kwargs)


def test_supported_under_transforms():
    assert torch.vmap(lambda x: xattn.attention(x, x, x) if xattn.supported(x, x, x) else x)(Q[None]).shape[0] == 1
    torch.func.grad(lambda x: x.sum() if xattn.supported(x, x, x) else 0 * x.sum())(Q)


@pytest.mark.parametrize("name", ["out", "append", "rotary", "scale"])
@pytest.mark.filterwarnings("error:Accessing the data pointer")
def test_fakes(name):
    with FakeTensorMode() as mode:
        q, k, v, table, lengths = map(mode.from_tensor, (Q, *caches(), TABLE, LENGTHS))
        angles = mode.from_tensor(torch.ones(32, 4))
        kwargs = {"out": {"out": torch.empty(2, 5, 2, 8)}, "append": {"k_new": q, "v_new": q}}.get(name, {})
        kwargs = kwargs or ({"k_scale": 2.0, "k_new": q, "v_new": q} if name == "scale" else {})
        kwargs = kwargs or {"rotary": xattn.Rotary(angles, angles)}
        assert P(q, k, v, table, lengths, **kwargs).shape == Q.shape


@pytest.mark.parametrize("name", ["causal", "return_lse", "deterministic"])
def test_flags_of_numpy(name):
    xattn.attention(Q, Q, Q, **{name: np.bool_(True)})
    assert xattn.Rotary(torch.ones(2, 2), torch.ones(2, 2), np.bool_(True)).interleaved is True
    with pytest.raises(TypeError, match=name):
        xattn.attention(Q, Q, Q, **{name: 1})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_scales_in_tensors_are_finite(name, value):
    with pytest.raises(ValueError, match=name):
        xattn.attention(Q, Q, Q, **{name: torch.tensor(value)})
    with pytest.raises(ValueError, match=name):
        torch.ops.xattn.attention(Q, Q, Q, **{name: torch.tensor(value)})
    if name != "q_scale":
        k, v = caches()
        with pytest.raises(ValueError, match=name):
            torch.ops.xattn.append_paged(k, v, TABLE, LENGTHS, Q, Q, **{name: torch.tensor(value)})
        assert not k.any()


@pytest.mark.parametrize("way", [copy.copy, pickle.dumps])
def test_a_cache_is_not_copied_by_half(way):
    cache = xattn.PagedKVCache(2, 4, 1, 2, 8, device="cpu")
    with pytest.raises(TypeError, match=r"PagedKVCache: got .*allowed: copy.deepcopy"):
        way(cache)
    copy.deepcopy(cache)
