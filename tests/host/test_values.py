"""What values do to native kernels, through emulated backends: NaN, infinity, and numbers at the ends of float32."""

from __future__ import annotations

import math

import pytest
import torch

import xattn


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def pages(x, page_size=8):
    """(pages, table) of x, (batch, tokens, heads, dim)."""
    count = -(-x.shape[1] // page_size)
    cache = x.new_zeros(x.shape[0], count * page_size, *x.shape[2:])
    cache[:, : x.shape[1]] = x
    table = torch.arange(x.shape[0] * count, dtype=torch.int32).view(x.shape[0], count)
    return cache.view(-1, page_size, *x.shape[2:]), table


def ask(kernel, target, q, k, v, **options):
    """(out, lse) of the forward body, or of one that reads pages: with many queries, or few."""
    options = {**options, "return_lse": True, "backend": target.backend}
    if kernel == "forward":
        return xattn.attention(q, k, v, **options)
    (k_cache, table), (v_cache, _) = pages(k), pages(v)
    used = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32)
    return xattn.attention_paged(q, k_cache, v_cache, table, used, **options)


KERNELS = pytest.mark.parametrize("kernel", ["forward", "decode"])


def agree(found, wanted, rtol=2e-2):
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=rtol, atol=rtol, equal_nan=True)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e2, 1e4, 1e5, 1e7])
def test_large_scores(target, kernel, dtype, size):
    """However large: one key takes all then, the same as in the reference."""
    if dtype == torch.float16:
        size = min(size, 1e4)
    q, k, v = randn(2, 3, 2, 16) * size, randn(2, 50, 2, 16) * size, randn(2, 50, 2, 16)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k[:, 40] = k[:, 3]  # as large, in another block
    wide = [t.float() for t in (q, k, v)]
    found = ask(kernel, target, q, k, v)
    agree(found, xattn.attention(*wide, return_lse=True, backend="reference"))


@KERNELS
@pytest.mark.parametrize("scale", [1e3, 1e8, 1e20, 1e30, 1e-30])
def test_scales_at_the_ends(target, kernel, scale):
    q, k, v = randn(2, 3, 2, 16), randn(2, 50, 2, 16), randn(2, 50, 2, 16)
    found = ask(kernel, target, q, k, v, softmax_scale=scale)
    wide = [t.double() for t in (q, k, v)]
    agree(found, xattn.attention(*wide, softmax_scale=scale, return_lse=True, backend="reference"))


@KERNELS
@pytest.mark.parametrize("softcap", [2.0**-126, 1.0, 1e3, 1e5, 1e9, 1e30])
def test_softcaps_at_the_ends(target, kernel, softcap):
    q, k, v = randn(2, 3, 2, 16), randn(2, 50, 2, 16), randn(2, 50, 2, 16)
    wide = [t.double() for t in (q, k, v)]
    wanted = xattn.attention(*wide, softcap=softcap, return_lse=True, backend="reference")
    agree(ask(kernel, target, q, k, v, softcap=softcap), wanted, rtol=4e-3)
    scale = {"softmax_scale": 1e30 if softcap < 1 else 1e-30, "softcap": softcap}
    out, lse = ask(kernel, target, q * 0, k, v, **scale)
    agree((out, lse), xattn.attention(wide[0] * 0, *wide[1:], return_lse=True, backend="reference", **scale))


@KERNELS
def test_nan_makes_a_row_nan(target, kernel):
    """It is no row without keys."""
    q, k, v = randn(2, 3, 2, 16), randn(2, 50, 2, 16), randn(2, 50, 2, 16)
    q[0, 1, 0, 5] = math.nan
    out, lse = ask(kernel, target, q, k, v)
    assert out[0, 1, 0].isnan().all() and lse[0, 0, 1].isnan()
    assert out.isnan().sum() == 16 and lse.isnan().sum() == 1
    k[1, 20, 1, 0] = math.nan
    out, lse = ask(kernel, target, q, k, v)
    assert out[1, :, 1].isnan().all() and lse[1, 1].isnan().all() and not out[1, :, 0].isnan().any()
    slopes = torch.tensor([math.nan, 0.5])
    out, lse = ask(kernel, target, q[1:], k[1:], v[1:], alibi_slopes=slopes)
    assert out.isnan().all() and lse.isnan().all()
    out, lse = ask(kernel, target, q[:1], k[:1, :1] * math.nan, v[:1, :1])
    assert out.isnan().all() and lse.isnan().all()


EMPTY = {
    "causal": {"causal": True},
    "window": {"window": (None, 0)},
    "boolean": {"attn_mask": torch.tensor([[False], [True], [True]])},
    "added": {"attn_mask": torch.tensor([[-math.inf], [0.0], [0.0]])},
}


@pytest.mark.parametrize(
    ("kernel", "how"), [*(("forward", how) for how in EMPTY), ("decode", "causal"), ("decode", "window")]
)
def test_a_row_without_keys_is_zero_whatever_the_values(target, kernel, how):
    q, k, v = randn(1, 3, 2, 16), randn(1, 2, 2, 16), torch.full((1, 2, 2, 16), math.nan).bfloat16()
    q[:, 0] = math.nan
    out, lse = ask(kernel, target, q, k, v, **EMPTY[how])
    assert (out[:, 0] == 0).all() and (lse[..., 0] == -math.inf).all()
    assert out[:, 1:].isnan().all() and lse[..., 1:].isfinite().all()


@pytest.mark.parametrize("mask_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_lowest_added_mask_hides_nothing(target, mask_dtype):
    """It is finite, in whatever dtype, and the same of all keys; what is -inf hides, and NaN stays NaN."""
    q, k, v = (torch.randn(1, n, 2, 16, dtype=torch.bfloat16) for n in (5, 7, 7))
    q.zero_()
    mask = torch.full((5, 7), torch.finfo(mask_dtype).min, dtype=mask_dtype)
    mask[1], mask[2, 3:], mask[3, 0] = -math.inf, -math.inf, math.nan
    out, lse = xattn.attention(q, k, v, attn_mask=mask, return_lse=True, backend=target.backend)
    for row, keys in ((0, slice(0, 7)), (2, slice(0, 3)), (4, slice(0, 7))):
        torch.testing.assert_close(out[0, row].double(), v[0, keys].double().mean(0), rtol=2e-2, atol=2e-2)
    assert not out[0, 1].any() and lse[0, :, 1].eq(-math.inf).all() and out[0, 3].isnan().all()
