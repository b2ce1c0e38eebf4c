"""Every code of an 8-bit float in a paged cache: as a value and as a key, exactly."""

from __future__ import annotations

import torch
from torch import Tensor

import xattn


def codes(cache: torch.dtype, device: str) -> Tensor:
    """All 256, as (4, 64)."""
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(4, 64).to(device).view(cache)


def _one_key_each(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(pages, table, lengths) of sequences that have one key of one head, a row of ``rows`` each."""
    pages = torch.zeros(len(rows), 16, 1, rows.shape[1], dtype=torch.uint8, device=rows.device)
    pages[:, 0, 0] = rows.view(torch.uint8)
    table = torch.arange(len(rows), dtype=torch.int32, device=rows.device)[:, None]
    return pages.view(rows.dtype), table, torch.ones_like(table[:, 0])


def check_values(backend: str, device: str, cache: torch.dtype, element: torch.dtype) -> None:
    """One key takes all of the softmax: the output is its value."""
    all_codes = codes(cache, device)
    v, table, lengths = _one_key_each(all_codes)
    q, k = torch.ones(4, 1, 1, 64, dtype=element, device=device), torch.zeros_like(v.view(torch.uint8)).view(cache)
    out = xattn.attention_paged(q, k, v, table, lengths, backend=backend)[:, 0, 0]
    want = all_codes.float().to(element)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(), want.nan_to_num())


def check_keys(backend: str, device: str, cache: torch.dtype, element: torch.dtype) -> None:
    """Queries of one column each: their lse is that column of the key, but for what units of log2 round."""
    all_codes = codes(cache, device)
    k, table, lengths = _one_key_each(all_codes)
    q = torch.eye(64, dtype=element, device=device)[None, :, None].expand(4, -1, -1, -1).contiguous()
    v = torch.zeros_like(k.view(torch.uint8)).view(cache)
    options = {"softmax_scale": 1.0, "return_lse": True, "backend": backend}
    out, lse = xattn.attention_paged(q, k, v, table, lengths, **options)
    want = all_codes.float()
    broken = want.isnan().any(1)  # in a column NaN, in all of its products
    assert broken.sum() == (2 if cache == torch.float8_e4m3fn else 1)
    assert lse[broken].isnan().all() and out[broken].isnan().all()
    torch.testing.assert_close(lse[~broken, 0], want[~broken], rtol=1e-6, atol=0)
