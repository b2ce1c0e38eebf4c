"""The drop-in for torch's scaled_dot_product_attention gives what torch's gives."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import xattn
from xattn.compat.sdpa import scaled_dot_product_attention


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(lead=(2,), heads=4, heads_kv=None, seqlen_q=5, seqlen_k=5, dim=16, dim_v=None, dtype=torch.float32):
    heads_kv, dim_v = heads_kv or heads, dim_v or dim
    return (
        randn(*lead, heads, seqlen_q, dim, seed=1, dtype=dtype),
        randn(*lead, heads_kv, seqlen_k, dim, seed=2, dtype=dtype),
        randn(*lead, heads_kv, seqlen_k, dim_v, seed=3, dtype=dtype),
    )


def same(q: Tensor, k: Tensor, v: Tensor, *args, tolerance: float = 1e-5, **options) -> None:
    """Results and gradients equal torch's."""
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    got = scaled_dot_product_attention(*inputs, *args, **options)
    wanted = F.scaled_dot_product_attention(*inputs, *args, **options)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    seed = randn(*got.shape, seed=9, dtype=got.dtype)
    for one, other in zip(*(torch.autograd.grad(x, inputs, seed) for x in (got, wanted)), strict=True):
        assert not one.isnan().any()
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=10 * tolerance)


def test_the_same_arguments():
    torchs = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert list(inspect.signature(scaled_dot_product_attention).parameters) == torchs


LENGTHS = [(5, 5), (3, 8), (8, 3), (1, 6), (6, 1), (1, 1)]


@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS)
def test_causal_is_aligned_top_left(seqlen_q, seqlen_k):
    q, k, v = qkv(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    same(q, k, v, is_causal=True)
    got = scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril()
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, mask), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[:, :, 0], v[:, :, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS)
@pytest.mark.parametrize("lead", [(2,), (), (2, 3)], ids=str)
def test_plain(seqlen_q, seqlen_k, lead):
    same(*qkv(lead, seqlen_q=seqlen_q, seqlen_k=seqlen_k))


def masks(lead, heads, seqlen_q, seqlen_k):
    shapes = [(seqlen_q, seqlen_k), (1, seqlen_k), (seqlen_q, 1), (heads, seqlen_q, seqlen_k)]
    shapes += [
        (*lead, heads, seqlen_q, seqlen_k),
        (*lead, 1, seqlen_q, seqlen_k),
        (*[1] * len(lead), heads, 1, seqlen_k),
    ]
    return list(dict.fromkeys(shapes))


@pytest.mark.parametrize("form", ["bool", "added"])
@pytest.mark.parametrize(
    "lead, shape",
    [(lead, shape) for lead in ((2,), (), (2, 3)) for shape in masks(lead, 4, 5, 7)]
    + [((2, 3), (3, 4, 5, 7)), ((2, 3), (1, 3, 1, 5, 7)), ((2, 3), (2, 1, 4, 5, 7)), ((2, 3, 2), (3, 1, 1, 1, 7))],
    ids=str,
)
def test_masks(form, lead, shape):
    mask = randn(*shape, seed=4)
    mask = mask > -0.5 if form == "bool" else mask
    if form == "bool":
        mask[..., 0] = True  # torch's own gradients of rows without keys are not all zero
    same(*qkv(lead, seqlen_q=5, seqlen_k=7), mask)


def test_a_row_without_keys_is_zero():
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    q, k, v = qkv(seqlen_k=7)
    got = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, mask), rtol=1e-5, atol=1e-5)
    assert not got[:, :, 2].any()


def test_gradient_of_a_mask():
    q, k, v = qkv(seqlen_k=7)
    mask = randn(1, 4, 5, 7, seed=4).requires_grad_()
    got, wanted = (f(q, k, v, mask) for f in (scaled_dot_product_attention, F.scaled_dot_product_attention))
    seed = randn(*got.shape, seed=9)
    one, other = (torch.autograd.grad(x, mask, seed)[0] for x in (got, wanted))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("lead", [(2,), (), (2, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gqa(heads_kv, lead, is_causal):
    same(*qkv(lead, heads_kv=heads_kv, seqlen_q=4, seqlen_k=6), enable_gqa=True, is_causal=is_causal)


def test_gqa_with_a_mask_and_a_scale():
    same(*qkv(heads_kv=2, seqlen_k=7), randn(2, 4, 5, 7, seed=4), enable_gqa=True, scale=0.3)


@pytest.mark.parametrize("scale", [None, 0.3, 1.0])
def test_scale(scale):
    same(*qkv(seqlen_k=7), scale=scale)


def test_a_value_of_another_width():
    same(*qkv(dim=32, dim_v=8), is_causal=True)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float64, 1e-9)])
def test_dtypes(dtype, tolerance):
    same(*qkv(dtype=dtype, seqlen_k=7), is_causal=True, tolerance=tolerance)


def test_leading_dimensions_broadcast():
    q, k, v = qkv((2, 3), seqlen_k=7)
    same(q, k[:1], v[:, :1])
    same(q[:1, :1], k, v)
    same(q, k[0, 0], v[0])


HEADS = {
    "one of keys": ((4, 1, 1), {}),
    "one of query": ((1, 4, 4), {}),
    "one of key": ((4, 1, 4), {}),
    "one of value": ((4, 4, 1), {}),
    "one of query and key": ((1, 1, 4), {}),
    "one of keys in GQA": ((4, 1, 1), {"enable_gqa": True}),
    "others of key and value in GQA": ((4, 2, 4), {"enable_gqa": True}),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_heads_broadcast(name, is_causal):
    heads, options = HEADS[name]
    same(*(t[:, :n] for t, n in zip((Q, K, V), heads, strict=True)), is_causal=is_causal, **options)


@pytest.mark.parametrize("dims", [(3, 2, 2), (2, 3, 3), (2, 4, 4), (4, 2, 3), (2, 4, 2), (3, 4, 4), (4, 3, 2)], ids=str)
def test_heads_may_be_missing(dims):
    inputs = [t[(0,) * (4 - n)] for t, n in zip((Q, K, V), dims, strict=True)]
    same(*inputs)
    same(*inputs, is_causal=True)
    if dims[0] >= dims[1]:  # torch applies a mask before value is broadcast
        same(*inputs, torch.ones(5, 7, dtype=torch.bool).tril(1))


@pytest.mark.parametrize("shape", [(), (7,), (1,), (1, 7)], ids=str)
@pytest.mark.parametrize("lead", [(2,), (), None], ids=str)
def test_masks_of_few_dimensions(shape, lead):
    """As documented; torch itself takes them for one sequence alone."""
    q, k, v = (t[0, 0] for t in (Q, K, V)) if lead is None else qkv(lead, seqlen_k=7)
    mask = randn(7, seed=5)[:1].view(shape) if math.prod(shape) == 1 else randn(*shape, seed=5)
    torch.testing.assert_close(
        scaled_dot_product_attention(q, k, v, mask),
        F.scaled_dot_product_attention(q, k, v, mask.expand(5, 7)),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("dim, dim_v", [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"is_causal": True}], ids=str)
def test_without_channels(dim, dim_v, options):
    """Scores of 0 then."""
    same(Q[..., :dim], K[..., :dim], V[..., :dim_v], **options)


def test_any_strides():
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(dim=32))
    same(q, k, v)
    same(q[..., ::2], k[..., ::2], v[:, :, :, ::2])


@pytest.mark.parametrize("lead", [(), (0,), (2, 0)], ids=str)
def test_without_a_batch(lead):
    q, k, v = qkv(lead)
    got = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert got.shape == F.scaled_dot_product_attention(q, k, v, is_causal=True).shape


def test_without_queries_or_keys():
    for lengths in ((0, 5), (5, 0), (0, 0)):
        for is_causal in (False, True):
            q, k, v = qkv(seqlen_q=lengths[0], seqlen_k=lengths[1])
            got = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            assert got.shape == q.shape and not got.any()


def test_dropout():
    """The masks are xattn's; what is not dropped is scaled, and torch's seed decides."""
    q, k, v = qkv(seqlen_q=64, seqlen_k=64)
    v = torch.ones_like(v)
    torch.manual_seed(1)
    one = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.5), one)
    assert not torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.5), one)
    assert one.std() > 0.01 and one.mean() == pytest.approx(1, abs=0.05)
    assert not scaled_dot_product_attention(q, k, v, dropout_p=1.0).any()


Q, K, V = qkv(seqlen_k=7)
REFUSED = {
    "heads": (
        (Q, K[:, :2], V[:, :2]),
        {},
        "key, value: got 2, 2 heads for 4 of query; allowed: as many, 1, or",
    ),
    "heads of value": ((Q, K, V[:, :2]), {}, "key, value: got 4, 2 heads for 4 of query"),
    "heads of GQA": (
        (Q, K[:, :3], V[:, :3]),
        {"enable_gqa": True},
        "key: got 3 heads for 4 of query; allowed: a",
    ),
    "heads of query in GQA": ((Q[:, :1], K, V), {"enable_gqa": True}, "key: got 4 heads for 1 of query"),
    "heads missing in GQA": ((Q, K[0, 0], V), {"enable_gqa": True}, "got 4, 2, 4 dimensions; allowed: from 3 of each"),
    "one dimension": ((Q[0, 0, 0], K[0, 0], V[0, 0]), {}, "got 1, 2, 2 dimensions; allowed: from 2 of each"),
    "a batch beside heads": ((Q[:, 0], K, V), {}, "heads for 2 of query"),
    "batch": (
        (Q, K[:1].expand(3, -1, -1, -1), V),
        {},
        r"query, key, value: got leading dimensions \(2,\), \(3,\), \(2,\); allowed: such that broadcast",
    ),
    "width": ((Q, K[..., :8], V), {}, "k: got shape"),
    "mask": ((Q, K, V, torch.ones(5, 6)), {}, "attn_mask: got shape"),
    "mask of another batch": ((Q, K, V, torch.ones(3, 1, 5, 7)), {}, "attn_mask: got shape"),
    "mask in float64": ((Q, K, V, torch.ones(5, 7).double()), {}, "attn_mask: got torch.float64; allowed: torch.bool"),
    "mask in fp16": ((Q, K, V, torch.ones(5, 7).half()), {}, "attn_mask: got torch.float16; allowed: torch.bool"),
    "mask of too many": ((Q[0, 0], K[0, 0], V[0, 0], torch.ones(1, 5, 7)), {}, "attn_mask: got shape"),
    "dropout": ((Q, K, V), {"dropout_p": 1.5}, "dropout_p: got 1.5"),
}
ONLY_HERE = {  # torch takes some of these on some devices, or reads where there is nothing
    "mask and causal": ((Q, K, V, torch.ones(5, 7)), {"is_causal": True}, "attn_mask: got a tensor; allowed: None"),
    "no heads": ((Q[:, :0], K[:, :0], V[:, :0]), {}, "q: got 0 heads"),
    "lengths": ((Q, K, V[:, :, :6]), {}, "v: got shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_torch_refuses(name):
    args, options, words = REFUSED[name]
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        F.scaled_dot_product_attention(*args, **options)
    with pytest.raises(ValueError, match=words):
        scaled_dot_product_attention(*args, **options)


@pytest.mark.parametrize("name", ONLY_HERE)
def test_refuses(name):
    args, options, words = ONLY_HERE[name]
    with pytest.raises(ValueError, match=words):
        scaled_dot_product_attention(*args, **options)


@pytest.mark.parametrize("shape", [(5, 6), (3, 4, 5, 7), (3, 3, 4, 5, 7), (1, 2, 3, 4, 5, 7)], ids=str)
def test_refuses_masks_beside_other_leading_dimensions(shape):
    with pytest.raises(ValueError, match="attn_mask: got shape"):
        scaled_dot_product_attention(*qkv((2, 2), seqlen_k=7), torch.ones(shape))


@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.tensor(2), 2, np.float32(0.3)])
def test_scales_of_other_types(scale):
    same(*qkv(), scale=scale)


@pytest.mark.parametrize("scale, error", [(math.nan, ValueError), (math.inf, ValueError), ("1", TypeError)])
def test_a_bad_scale_is_named_as_torch_names_it(scale, error):
    with pytest.raises(error, match="^scale: got .*; allowed: a"):
        scaled_dot_product_attention(Q, K, V, scale=scale)


@pytest.mark.parametrize("options", [{}, {"attn_mask": torch.ones(5, 7).tril()}, {"is_causal": True}])
def test_one_head(options):
    same(Q[0, 0], K[0, 0], V[0, 0], **options)


def test_a_wide_mask_beside_narrow_queries():
    same(*(t.bfloat16() for t in (Q, K, V)), attn_mask=torch.ones(5, 7), tolerance=2e-2)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_arrays_of_numpy(name):
    given = {"query": Q, "key": K, "value": V, "attn_mask": torch.ones(5, 7)}
    with pytest.raises(TypeError, match=f"^{name}: got ndarray; allowed: a torch.Tensor"):
        scaled_dot_product_attention(**given | {name: given[name].numpy()})


def test_refuses_integer_masks():
    with pytest.raises(TypeError, match="attn_mask: got torch.int64"):
        scaled_dot_product_attention(Q, K, V, torch.ones(5, 7, dtype=torch.int64))


def test_answered_by_xattn(monkeypatch):
    """Not by torch behind its back."""
    calls = []
    monkeypatch.setattr(
        "xattn.compat.sdpa.attention", lambda q, k, v, **kw: calls.append(kw) or xattn.attention(q, k, v, **kw)
    )
    scaled_dot_product_attention(Q, K, V, is_causal=True)
    scaled_dot_product_attention(V, V, Q[:, :, :1].expand_as(V), is_causal=True)
    assert [c["causal"] for c in calls] == [True, True] and all(c["window"] is None for c in calls)


@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS)
@pytest.mark.parametrize("scale", [-0.3, 0.0, -2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_causal_under_any_scale(seqlen_q, seqlen_k, scale, dtype):
    """Where torch's own causal mask becomes NaN, as torch with the mask written out."""
    inputs = [t.requires_grad_() for t in qkv(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype)]
    mask = torch.zeros(seqlen_q, seqlen_k, dtype=dtype)
    mask[~torch.ones_like(mask).tril().bool()] = -torch.inf
    q, k, v = inputs
    got = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    wanted = torch.softmax(scale * (q @ k.mT) + mask, -1) @ v
    seed = randn(*got.shape, seed=9, dtype=dtype)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    for one, other in zip(*(torch.autograd.grad(x, inputs, seed) for x in (got, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_in_the_place_of_torchs(monkeypatch):
    """Fallbacks call torch's own function, not what was put there."""
    q, k, v = (t.requires_grad_() for t in qkv())
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)
    got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    got.sum().backward()
    for backend in ("sdpa", "reference"):
        xattn.attention(*(t.transpose(1, 2) for t in (q, k, v)), backend=backend)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_causal_call_follows_the_lengths():
    def call(q, k):
        return scaled_dot_product_attention(q, k, k, is_causal=True)

    traced = torch.jit.trace(call, (torch.randn(1, 2, 4, 8), torch.randn(1, 2, 5, 8)))
    for seqlen_q, seqlen_k in ((4, 5), (7, 3), (3, 9)):
        q, k = torch.randn(1, 2, seqlen_q, 8), torch.randn(1, 2, seqlen_k, 8)
        torch.testing.assert_close(traced(q, k), F.scaled_dot_product_attention(q, k, k, is_causal=True))
