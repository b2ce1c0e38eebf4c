"""A cache of FlashAttention 2's as pages: its lengths, rotation by its positions, sequences that start late."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import status, validate
from ..errors import UnsupportedError
from ..rotary import Rotary
from . import flash_attn_arguments as arguments


def seqlens(given: Any, batch: int, room: int, k: Tensor | None, device: torch.device) -> Tensor:
    """The tokens in the cache before the call, (batch,)."""
    if given is None and k is not None:
        validate.fail("cache_seqlens", None, "an int or a tensor, where k is given")
    if given is None or not isinstance(given, Tensor):
        count = room if given is None else validate.count("cache_seqlens", given)
        return torch.full((batch,), count, dtype=torch.int64, device=device)
    arguments.index("cache_seqlens", given, batch, 1, device)
    return given


def rotated(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    first: Tensor,
    each: bool,
) -> tuple[Tensor, Tensor | None]:
    """q and k at their positions from ``first`` on; with ``each`` every query at its own, else all at ``first``."""
    if cos is None and sin is None:
        return q, k
    if k is None:
        validate.fail("k", None, "a tensor, where rotary_cos is given")
    names = {"cos": "rotary_cos", "sin": "rotary_sin", "interleaved": "rotary_interleaved", "rotary": "rotary_cos"}
    rotary = arguments.named(names, Rotary, cos, sin, interleaved)
    turned = []
    for x, step in ((k, 1), (q, int(each))):
        positions = first.long()[:, None] + torch.arange(x.shape[1], device=x.device) * step
        arguments.named(names, rotary.check_positions, x, positions)
        tables = (rotary.cos, rotary.sin, rotary.interleaved)
        turned.append(arguments.named(names, torch.ops.xattn.rotary, x, positions, *tables))
    return turned[1], turned[0]


def shifted(
    k_cache: Tensor, v_cache: Tensor, pages: Tensor, table: str, leftpad: Tensor, lengths: Tensor, new: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The caches as pages of one token each, and the page table of each sequence from its ``leftpad`` on."""
    num_pages, size = k_cache.shape[:2]
    if v_cache.shape[:2] != k_cache.shape[:2] or not size:
        allowed = f"{tuple(k_cache.shape[:2])} pages of tokens, as k_cache has, at least one in each"
        validate.fail("v_cache", f"shape {tuple(v_cache.shape)}", allowed)
    room = pages.shape[1] * size
    if not torch.compiler.is_compiling():  # there the call itself says that a length or a page is wrong
        _check(pages, table, num_pages, size, leftpad, lengths, new)
    (k_tokens, step), (v_tokens, step_v) = (_tokens(c, new) for c in (k_cache, v_cache))
    if step != step_v:
        got = f"strides {k_cache.stride()} of k_cache and {v_cache.stride()} of v_cache"
        raise UnsupportedError(f"cache_leftpad: got {got}; allowed: sequences of both as many tokens apart")
    position = torch.arange(room, device=pages.device) + leftpad.long()[:, None]
    inside = (position >= 0) & (position < room)
    position = torch.where(inside, position, 0)
    page = pages.long().gather(1, torch.div(position, size, rounding_mode="floor"))
    return k_tokens, v_tokens, torch.where(inside, page * step + position % size, -1)


def _check(pages: Tensor, table: str, num_pages: int, size: int, leftpad: Tensor, lengths: Tensor, new: int) -> None:
    """What the shifted page table hides: values, by the name of the argument that they were given in."""
    room, ends = pages.shape[1] * size, lengths.long() + new
    status.report("seqlens_k", (leftpad < 0) | (leftpad > lengths), "cache_leftpad", leftpad, "0 to cache_seqlens")
    allowed = f"0 to {room}, the tokens that there is room for" + (f", less the {new} of k" if new else "")
    status.report("no_room", ends > room, "cache_seqlens", lengths, allowed)
    first = torch.arange(pages.shape[1], device=pages.device) * size
    used = (first < ends[:, None]) & (first + size > leftpad[:, None])
    bad = used & ((pages < 0) | (pages >= num_pages))
    status.report("page_table", bad, table, pages, f"0 to {num_pages - 1}, what k_cache has")


def _tokens(cache: Tensor, new: int) -> tuple[Tensor, int]:
    """A view of a cache whose pages are its tokens, and how many tokens two pages of the cache are apart."""
    (pages, size), (far, near) = cache.shape[:2], cache.stride()[:2]
    step = far // near if near and not far % near else None
    if size == 1:
        near, step = far, 1
    elif pages == 1:
        step = size
    allowed = "k_cache and v_cache whose sequences are a whole number of tokens apart"
    if step is not None:
        shape = (max((pages - 1) * step + size, 0) if pages else 0, 1, *cache.shape[2:])
        tokens = cache.as_strided(shape, (near, near, *cache.stride()[2:]))
        if not new:
            return tokens, step
        try:
            validate.writable("", tokens)
            return tokens, step
        except ValueError:
            allowed = "with k, caches in which a token's heads lie together"
    got = f"a cache of shape {tuple(cache.shape)}, strides {cache.stride()}"
    raise UnsupportedError(f"cache_leftpad: got {got}; allowed: {allowed}")
