"""Dropout in the kernels, through emulated backends: the mask is the reference's, bit for bit, and gradients are those
of the oracle."""

from __future__ import annotations

from typing import Any

import cases
import oracle
import pytest
import torch
from torch import Tensor

import xattn

RNG = (-(2**62) + 5, 2**63 - 1)
DTYPES = [torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def qkv(b=2, sq=70, sk=150, h=4, hk=2, d=64, dv=None, dtype=torch.bfloat16) -> dict[str, Tensor]:
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv or d))
    tensors = {n: randn(*s, dtype=dtype, seed=i) for i, (n, s) in enumerate(zip("qkv", shapes, strict=True))}
    return tensors | {"dropout_rng": torch.tensor(RNG)}


def one_hot(*leading: int, keys: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values (*leading, keys, heads, head_dim_v) that make outputs the weights, key by key."""
    width = -(-keys // 8) * 8
    return torch.eye(keys, width, dtype=dtype)[:, None].expand(*leading, keys, heads, width).contiguous()


def native(kind: str, args: Any, kwargs: Any, target: cases.Target) -> None:
    plan = xattn.explain(*args, kind=kind, backend=target.backend, **kwargs)
    assert plan.native and plan.backend == target.backend, plan


# ---------------------------------------------------------------- the mask
MASKS: dict[str, tuple[dict[str, Any], Any]] = {
    "none": ({}, None),
    "causal": ({"causal": True}, lambda i, j: j <= i),
    "window": ({"window": (40, 3)}, lambda i, j: (j >= i - 40) & (j <= i + 3)),
    "boolean": ({"attn_mask": True}, lambda i, j: (i + j) % 3 != 0),
}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1 - 2**-16, 1.0, 2**-20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drop_what_the_reference_drops(target, p, dtype):
    x = qkv(dtype=dtype, sk=130)
    x["v"] = one_hot(2, keys=130, heads=2, dtype=dtype)
    native("attention", (x["q"], x["k"], x["v"]), {"dropout_p": p, "dropout_rng": x["dropout_rng"]}, target)
    out, wanted = (xattn.attention(**x, dropout_p=p, backend=name) for name in (target.backend, "reference"))
    keep = oracle.keep(RNG, p, 2, 4, 70, 130).transpose(1, 2)
    assert torch.equal(out[..., :130] != 0, keep) and torch.equal(out != 0, wanted != 0)
    assert bool(keep.any()) if p < 0.99 else int(keep.sum()) < 16


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
def test_beside_masks(target, mask, heads):
    options, sees = MASKS[mask]
    x = qkv(sq=90, sk=200, h=heads[0], hk=heads[1])
    x["v"] = one_hot(2, keys=200, heads=heads[1])
    i, j = torch.arange(90)[:, None] + (110 if mask != "boolean" else 0), torch.arange(200)
    seen = torch.ones(90, 200, dtype=torch.bool) if sees is None else sees(i, j)
    if mask == "boolean":
        options = {"attn_mask": seen}
    out = xattn.attention(**x, **options, dropout_p=0.3, backend=target.backend)
    keep = oracle.keep(RNG, 0.3, 2, heads[0], 90, 200).transpose(1, 2) & seen[:, None]
    assert torch.equal(out != 0, keep)


def test_of_packed_sequences(target):
    """The number of a sequence is its place among the others, and positions count from its own first token."""
    lens_q, lens_k = (70, 0, 5, 3), (90, 10, 0, 140)
    q, k = randn(78, 4, 64), randn(240, 2, 64, seed=1)
    v = torch.cat([one_hot(keys=n, heads=2)[..., :8] if n < 8 else one_hot(keys=140, heads=2)[:n] for n in lens_k if n])
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0) for lens in (lens_q, lens_k))
    args = (q, k, v, cu_q, cu_k, 70, 140)
    given = {"dropout_p": 0.4, "dropout_rng": torch.tensor(RNG), "causal": True}
    native("varlen", args, given, target)
    out = xattn.attention_varlen(*args, **given, backend=target.backend)
    wanted = xattn.attention_varlen(*args, **given, backend="reference")
    assert torch.equal(out != 0, wanted != 0)
    keep = oracle.keep(RNG, 0.4, 4, 4, 70, 144)
    seen = torch.arange(144) <= torch.arange(70)[:, None] + 20
    assert torch.equal(out[:70] != 0, (keep[0] & seen & (torch.arange(144) < 90)).transpose(0, 1))


@pytest.mark.parametrize("queries", [1, 3, 70], ids="{} queries".format)
@pytest.mark.parametrize("page_size", [16, 64])
def test_of_paged_caches(target, queries, page_size):
    """The kernels for few queries and for many; queries count by their position in the sequence."""
    lengths = torch.tensor([130, 97], dtype=torch.int32)
    pages = -(-136 // page_size)
    table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(1)).reshape(2, pages).int()
    q, k = randn(2, queries, 4, 64), randn(2 * pages, page_size, 2, 64, seed=1)
    v = torch.zeros(2 * pages, page_size, 2, 136, dtype=torch.bfloat16)
    for row in table.tolist():
        for n, page in enumerate(row):
            for slot in range(page_size):
                if n * page_size + slot < 136:
                    v[page, slot, :, n * page_size + slot] = 1
    given = {"dropout_p": 0.4, "dropout_rng": torch.tensor(RNG), "causal": True}
    args = (q, k, v, table, lengths)
    native("paged", args, given, target)
    out = xattn.attention_paged(*args, **given, backend=target.backend)
    keep = oracle.keep(RNG, 0.4, 2, 4, 136, 136)
    for b, n in enumerate(lengths.tolist()):
        rows = torch.arange(n - queries, n)
        seen = torch.arange(136) <= rows[:, None]
        assert torch.equal(out[b] != 0, (keep[b, :, rows] & seen).transpose(0, 1))


def test_values_beside_everything_else(target):
    x = qkv(sq=66, sk=130, h=2, hk=1) | {
        "alibi_slopes": torch.tensor([[0.5, 0.1], [0.2, 0.3]]),
        "sinks": torch.tensor([0.3, -2.0]),
        "attn_mask": randn(2, 1, 66, 130, dtype=torch.float32),
    }
    call = cases.Call("attention", x, {"softcap": 5.0, "causal": True, "return_lse": True, "dropout_p": 0.3})
    cases.check(call, target)


def test_lse_is_from_before(target):
    x = qkv()
    given = {"return_lse": True, "causal": True, "backend": target.backend}
    plain, dropped = (xattn.attention(**x, **given, dropout_p=p)[1] for p in (0.0, 0.5))
    torch.testing.assert_close(plain, dropped, atol=1e-5, rtol=1e-5)


def test_other_starts_are_refused(target):
    x = qkv(sq=5, sk=7) | {"dropout_rng": torch.tensor([*RNG, 3, 5])}
    with pytest.raises(xattn.UnsupportedError, match="dropout_start"):
        xattn.attention(**x, dropout_p=0.5, backend=target.backend)


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (40, 72)], ids=str)
def test_gradients(target, dims, p):
    x = qkv(d=dims[0], dv=dims[1], sq=70, sk=140, b=1, h=2, hk=1)
    call = cases.Call("attention", x, {"causal": True, "dropout_p": p, "return_lse": True}, ("q", "k", "v"))
    args, kwargs = call.arguments({n: t.requires_grad_() if n in "qkv" else t for n, t in x.items()})
    native("attention", args, kwargs, target)
    cases.check(call, target)


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_beside_masks(target, mask):
    x, options = qkv(sq=90, sk=200, h=3, hk=1), dict(MASKS[mask][0])
    if mask == "boolean":
        x["attn_mask"] = randn(2, 1, 90, 200, dtype=torch.float32) > -0.5
        options = {}
    cases.check(cases.Call("attention", x, options | {"dropout_p": 0.3}, ("q", "k", "v")), target)


def test_gradients_of_packed_sequences(target):
    lens_q, lens_k = (70, 0, 5, 3), (90, 10, 0, 140)
    x = {"q": randn(78, 4, 64), "k": randn(240, 2, 64, seed=1), "v": randn(240, 2, 64, seed=2)}
    x |= {f"cu_seqlens_{n}": torch.tensor([0, *lens]).cumsum(0).int() for n, lens in (("q", lens_q), ("k", lens_k))}
    x |= {"dropout_rng": torch.tensor(RNG), "sinks": torch.tensor([0.3, -2.0, 0.0, 1.0])}
    other = {"max_seqlen_q": 70, "max_seqlen_k": 140, "causal": True, "dropout_p": 0.3, "return_lse": True}
    cases.check(cases.Call("varlen", x, other, ("q", "k", "v", "sinks")), target)


def test_backward_drops_what_forward_dropped(target):
    """Of a value's gradient, one query at a time: only where its weight was kept is there any."""
    x = qkv(b=1, sq=9, sk=130, h=2, hk=2)
    x["v"] = one_hot(1, keys=130, heads=2)
    leaves = {n: t.requires_grad_() if n in "qkv" else t for n, t in x.items()}
    out = xattn.attention(**leaves, dropout_p=0.5, backend=target.backend)
    for row in (0, 7):
        dout = torch.zeros_like(out)
        dout[:, row] = 1
        (dv,) = torch.autograd.grad(out, x["v"], dout, retain_graph=True)
        assert torch.equal(dv[0, :, :, 0] != 0, (out[0, row, :, :130] != 0).T)


def test_a_new_pair_is_another_call(target):
    """What was prepared for one pair answers another."""
    x = qkv(b=1, sq=9, sk=64)
    found = []
    for pair in ((1, 2), (1, 3), (1, 2)):
        x["dropout_rng"] = torch.tensor(pair)
        leaves = {n: t.detach().requires_grad_() if n in "qkv" else t for n, t in x.items()}
        out = xattn.attention(**leaves, dropout_p=0.5, backend=target.backend)
        found.append((out.detach(), *torch.autograd.grad(out.sum(), [leaves[n] for n in "qkv"])))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert all(not torch.equal(a, b) for a, b in zip(found[0][::3], found[1][::3], strict=True))


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_one_preparation_does_not_serve_another_p(target, p):
    x = qkv(b=1, sq=9, sk=64)
    for each in (0.5, p):
        cases.check(cases.Call("attention", x, {"dropout_p": each}, ("q", "k", "v")), target)
