"""Writes tokens into a paged cache through its page table, with torch operations; reading is in segments.py."""

from __future__ import annotations

import torch
from torch import Tensor

from . import status
from .rotary import Rotary


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seqlens_k: Tensor,
    k_new: Tensor,
    v_new: Tensor | None,
    *,
    cu_seqlens_new: Tensor | None = None,
    kv_layout: str = "NHD",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rotary: Rotary | None = None,
) -> None:
    """Writes ``k_new``, ``v_new`` behind the ``seqlens_k`` tokens of each sequence.

    Tokens without room, or whose page id is out of range, are not written: on the CPU nothing is, and DeviceValueError
    is raised; on a GPU the others are, and the status word is set.
    """
    sequence, position, exists = token_positions(seqlens_k, k_new, cu_seqlens_new)
    page_size = k_cache.shape[1 if kv_layout == "NHD" else 2]
    column = torch.div(position, page_size, rounding_mode="floor")
    has_room = (column < page_table.shape[1]) & (position >= 0)
    room = f"positions below {page_table.shape[1] * page_size}, for which the page table has room"
    no_room = ("k_new", position, f"{room}; nothing was written")
    if page_table.shape[1] == 0:
        status.report("no_room", exists, *no_room)
        return
    page = page_table[sequence, column.clamp(0, page_table.shape[1] - 1)].long()
    in_cache = (page >= 0) & (page < k_cache.shape[0])
    status.report("seqlens_k", seqlens_k < 0, "seqlens_k", seqlens_k, "lengths from 0")
    status.report("no_room", exists & ~has_room, *no_room)
    ids = f"page ids from 0, below num_pages, {k_cache.shape[0]}"
    status.report("page_table", exists & has_room & ~in_cache, "page_table", page, ids)
    if not page.numel() or not k_cache.shape[0]:
        return
    if rotary is not None:
        k_new = rotary.apply(k_new, torch.where(exists, position, 0).view(k_new.shape[:-2]))
    kept = exists & has_room & in_cache
    slot = position.clamp(min=0) % page_size
    for cache, new, scale in ((k_cache, k_new, k_scale), (v_cache, v_new, v_scale)):
        if new is not None:
            values = _rounded(new.flatten(0, -3), cache.dtype, scale, sequence)
            _write(cache, torch.where(kept, page, 0), torch.where(kept, slot, 0), values, kept, kv_layout)


def token_positions(lengths: Tensor, new: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence, position in it, whether it belongs to one) of each token of ``new``, behind ``lengths``; all of shape
    (tokens,)."""
    batch = lengths.shape[0]
    if cu_seqlens is None:
        count = new.shape[1]
        sequence = torch.arange(batch, device=new.device).repeat_interleave(count, output_size=batch * count)
        offset = torch.arange(count, device=new.device).repeat(batch)
        return sequence, lengths.long()[sequence] + offset, torch.ones_like(sequence, dtype=torch.bool)
    token = torch.arange(new.shape[0], device=new.device)
    ends = cu_seqlens.long()
    found = torch.searchsorted(ends[1:].contiguous(), token, right=True)
    sequence = found.clamp(max=max(batch - 1, 0))
    if batch == 0:
        return sequence, token, torch.zeros_like(token, dtype=torch.bool)
    return sequence, lengths.long()[sequence] + token - ends[sequence], (found < batch) & (token >= ends[0])


def _rounded(new: Tensor, dtype: torch.dtype, scale: Tensor | None, sequence: Tensor) -> Tensor:
    """(tokens, heads, width) in the cache's dtype: divided by the scale, and clamped to the range where the dtype is
    fp8."""
    if scale is not None:
        new = (new if new.dtype == torch.float64 else new.float()) / (
            scale if scale.dim() == 0 else scale[sequence][..., None]
        )
    if dtype.itemsize == 1:
        top = torch.finfo(dtype).max
        new = new.float().clamp(-top, top)  # NaN stays NaN
    return new.to(dtype)


def _write(cache: Tensor, page: Tensor, slot: Tensor, values: Tensor, kept: Tensor, kv_layout: str) -> None:
    """cache[page, slot] = values where ``kept``. Tokens not kept repeat the write of one that is, so that no result
    depends on order."""
    first = kept.to(torch.int8).argmax(0, keepdim=True)
    page, slot = (torch.where(kept, x, x[first]) for x in (page, slot))
    at = (page, slice(None), slot) if kv_layout == "HND" else (page, slot)
    bits = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # fp8 is moved as bytes
    values = values.view(bits.dtype)
    stand_in = torch.where(kept.any(), values[first], bits[at][first])
    bits[at] = torch.where(kept[:, None, None], values, stand_in)
