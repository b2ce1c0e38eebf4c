"""A drop-in for FlashAttention 2: its seven functions, their arguments and their meaning, answered by xattn;
``install()`` has them imported as ``flash_attn``.

Where FlashAttention 2's kernels do other than its documentation says, the documentation is followed:

- softmax_lse of a row that sees no key is -inf (its kernels mostly write +inf); it has a gradient (there: none).
- With ALiBi and causal, softmax_lse is that of the scores with the documented bias (there: of shifted ones).
- S_dmask holds the softmax itself, (batch, nheads, seqlen_q, seqlen_k), negative where dropped (there: padded, and
  scaled in another way). Without dropout it is empty, as there. Masks of dropout are xattn's.
- A window stays one where it is wider than the keys are many.

What FlashAttention 2 refuses and xattn can do is done: other dtypes and head dimensions, any strides, int64 lengths,
pages of any size, no batch, dropout beside softcap, cache_leftpad beside block_table, short rotary tables. A distance
of window_size below -1 is an error. Errors are xattn's, by the names of the arguments here: TypeError, ValueError and
xattn.UnsupportedError, on the CPU for values in tensors too, before anything is written. On a GPU those values are
reported by xattn.check_errors().
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import paging, rng, status, validate
from ..api import attention, attention_paged, attention_varlen
from ..errors import UnsupportedError
from ..rotary import Rotary
from . import flash_attn_padding, stand_in

VERSION = "2.8.4+xattn"  # of the interface

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (batch, seqlen_q, nheads, headdim) over k and v (batch, seqlen_k, nheads_k, headdim).

    Args:
        dropout_p: in [0, 1].
        softmax_scale: default headdim ** -0.5.
        causal: query i sees keys up to i + seqlen_k - seqlen_q (aligned bottom-right).
        window_size: (left, right), inclusive distances from that diagonal, a tuple, list or tensor; -1 is unbounded.
        softcap: scores become softcap * tanh(scores / softcap); off from 0 downwards.
        alibi_slopes: (nheads,) or (batch, nheads): -slope * |i + seqlen_k - seqlen_q - j| is added.
        deterministic: a bitwise reproducible backward; False follows torch.use_deterministic_algorithms.
        return_attn_probs: also return softmax_lse and S_dmask.

    Returns:
        out, shaped like q; with return_attn_probs (out, softmax_lse, S_dmask): softmax_lse (batch, nheads, seqlen_q),
        float32; S_dmask (batch, nheads, seqlen_q, seqlen_k) with dropout, else empty. A row that sees no key has out 0.
    """
    options = _options(
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    )
    return _dense(q, k, v, {}, **options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` with kv (batch, seqlen_k, 2, nheads_k, headdim)."""
    k, v = _unpacked("kv", kv, "batch", "seqlen_k", 2, "nheads_k", "headdim")
    options = _options(
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    )
    return _dense(q, k, v, {"k": "kv", "v": "kv"}, **options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` with qkv (batch, seqlen, 3, nheads, headdim)."""
    q, k, v = _unpacked("qkv", qkv, "batch", "seqlen", 3, "nheads", "headdim")
    options = _options(
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    )
    return _dense(q, k, v, {"q": "qkv", "k": "qkv", "v": "qkv"}, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """``flash_attn_func`` over sequences of different lengths, packed: q (total_q, nheads, headdim), k and v (total_k,
    nheads_k, headdim).

    Args:
        cu_seqlens_q, cu_seqlens_k: (batch + 1,), int32 or int64: sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1].
        max_seqlen_q, max_seqlen_k: at least the longest sequence.
        block_table: (batch, max_num_blocks): k and v are pages, (num_blocks, page_block_size, nheads_k, headdim), and
            cu_seqlens_k says only how many tokens of its pages each sequence has. There is no gradient then.
        Everything else: see ``flash_attn_func``.

    Returns:
        out, shaped like q; with return_attn_probs (out, softmax_lse, S_dmask): softmax_lse (nheads, total_q), float32;
        S_dmask (batch, nheads, max_seqlen_q, max_seqlen_k) with dropout, else empty. With dropout and block_table
        S_dmask is refused: FlashAttention 2 defines none.
    """
    options = _options(
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    )
    if block_table is None:
        return _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {}, **options)
    del options["deterministic"]  # there is no backward
    probs = options.pop("return_attn_probs")
    validate.tensor("q", q, optional=False)
    validate.tensor("cu_seqlens_k", cu_seqlens_k, optional=False)
    if cu_seqlens_k.dim() != 1 or cu_seqlens_k.shape[0] < 1:
        validate.fail("cu_seqlens_k", f"shape {tuple(cu_seqlens_k.shape)}", "(batch + 1,)")
    if probs and options["dropout_p"] > 0:
        raise UnsupportedError(
            "return_attn_probs: got True with dropout_p and block_table; allowed: two of the three, as there is no "
            "S_dmask of pages"
        )
    names = {"k_cache": "k", "v_cache": "v", "page_table": "block_table", "seqlens_k": "cu_seqlens_k"}
    out, lse = _named(
        names,
        attention_paged,
        *(q, k, v, block_table, cu_seqlens_k.diff()),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        return_lse=True,
        **options,
    )
    return (out, lse, q.new_empty(0)) if probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` with kv (total_k, 2, nheads_k, headdim)."""
    k, v = _unpacked("kv", kv, "total_k", 2, "nheads_k", "headdim")
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = _options(
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    )
    return _varlen(q, k, v, *lengths, {"k": "kv", "v": "kv"}, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` with qkv (total, 3, nheads, headdim) and one ``cu_seqlens`` and ``max_seqlen``."""
    q, k, v = _unpacked("qkv", qkv, "total", 3, "nheads", "headdim")
    names = {"q": "qkv", "k": "qkv", "v": "qkv"}
    names |= {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}
    options = _options(
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    )
    return _varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, names, **options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q (batch, seqlen_q, nheads, headdim) over a cache, after writing new tokens into it in place if
    there are any. The result has no gradient.

    Args:
        k_cache, v_cache: (batch_cache, seqlen_cache, nheads_k, headdim); with block_table pages, (num_blocks,
            page_block_size, nheads_k, headdim).
        k, v: (batch, seqlen_new, nheads_k, headdim), both or neither: written from index cache_seqlens on.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), only with k: the first rotary_dim channels are rotated, of
            k by the rows cache_seqlens, cache_seqlens + 1 and so on; of q by the same with causal or a window, else
            all by row cache_seqlens.
        rotary_interleaved: channels 2i and 2i + 1 are a pair; False: i and i + rotary_dim / 2.
        cache_seqlens: int, or (batch,), int32 or int64: the tokens in the cache before the call, counted from index 0
            of the cache, also with cache_leftpad. None: the cache is full; an error with k.
        cache_batch_idx: (batch,): the row of the cache that each sequence has, not with block_table. None: row b.
        cache_leftpad: (batch,): where in the cache each sequence starts.
        block_table: (batch, max_num_blocks): the pages of each sequence.
        num_splits: how many parts of the keys native kernels work on at once; 0 leaves it to them.
        Everything else: see ``flash_attn_func``.

    Returns:
        out, shaped like q; with return_softmax_lse (out, softmax_lse), softmax_lse (batch, nheads, seqlen_q), float32.

    Raises:
        As ``flash_attn_func``; UnsupportedError for cache_leftpad where the tokens of k_cache and v_cache do not lie
        at one distance from each other, or, with k, where the heads of a token do not lie together.
    """
    given: dict[str, Tensor | None] = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    given |= {"k": k, "v": v} if k is not None or v is not None else {}
    for name, t in given.items():
        validate.tensor(name, t, optional=False)
        if t is not None and t.dim() != 4:
            validate.fail(name, f"shape {tuple(t.shape)}", "4 dimensions")
    batch = q.shape[0]
    if k is not None and k.shape[0] != batch:
        validate.fail("k", f"shape {tuple(k.shape)}", f"the batch of q, {batch}")
    paged = block_table is not None
    if paged and cache_batch_idx is not None:
        validate.fail("cache_batch_idx", "a tensor", "None, where block_table says what each sequence has")
    for name, index, dims in (
        ("cache_batch_idx", cache_batch_idx, 1),
        ("cache_leftpad", cache_leftpad, 1),
        ("block_table", block_table, 2),
    ):
        if index is not None:
            _index(name, index, batch, dims, q.device)
    if block_table is not None:
        pages = block_table
    elif cache_batch_idx is not None:
        pages = cache_batch_idx[:, None]
    else:
        if k_cache.shape[0] < batch:
            validate.fail("k_cache", f"shape {tuple(k_cache.shape)}", f"the batch of q, {batch}, or more sequences")
        pages = torch.arange(batch, device=q.device)[:, None]
    table = "block_table" if paged else "k_cache" if cache_batch_idx is None else "cache_batch_idx"
    room = pages.shape[1] * k_cache.shape[1]
    lengths = _cache_seqlens(cache_seqlens, batch, room, k, q.device)
    window = _window(window_size)
    causal = validate.flag("causal", causal)
    with torch.no_grad():
        q, k = _rotated(q, k, rotary_cos, rotary_sin, rotary_interleaved, lengths, causal or window is not None)
        if cache_leftpad is not None:
            new = 0 if k is None else k.shape[1]
            k_cache, v_cache, pages = _shifted(k_cache, v_cache, pages, table, cache_leftpad, lengths, new)
            lengths = lengths - cache_leftpad
        return _named(
            {
                "k_new": "k",
                "v_new": "v",
                "page_table": table,
                "seqlens_k": "cache_seqlens",
                "return_lse": "return_softmax_lse",
            },
            attention_paged,
            *(q, k_cache, v_cache, pages, lengths),
            k_new=k,
            v_new=v,
            softmax_scale=softmax_scale,
            causal=causal,
            window=window,
            softcap=_softcap(softcap),
            alibi_slopes=alibi_slopes,
            num_splits=validate.count("num_splits", num_splits) or None,
            return_lse=return_softmax_lse,
        )


# ---------------------------------------------------------------- arguments
def _options(
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    deterministic: Any,
    return_attn_probs: Any,
) -> dict[str, Any]:
    """What the six functions without a cache have in common, in xattn's terms, and return_attn_probs."""
    return {
        "dropout_p": validate.number("dropout_p", dropout_p, 0.0, 1.0),
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": _window(window_size),
        "softcap": _softcap(softcap),
        "alibi_slopes": alibi_slopes,
        "deterministic": validate.flag("deterministic", deterministic) or None,
        "return_attn_probs": validate.flag("return_attn_probs", return_attn_probs),
    }


def _window(window_size: Any) -> tuple[int | None, int | None] | None:
    sides = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    allowed = "(left, right), each a distance from 0, or -1 for a side without bound"
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        validate.fail("window_size", repr(window_size), allowed, TypeError)
    left, right = (validate.count("window_size", n.item() if isinstance(n, Tensor) else n, -1) for n in sides)
    return None if left == right == -1 else (None if left < 0 else left, None if right < 0 else right)


def _softcap(softcap: Any) -> float:
    return max(validate.number("softcap", softcap), 0.0)


def _unpacked(name: str, t: Any, *shape: str | int) -> tuple[Tensor, ...]:
    """The tensors packed in ``t`` along the dimension whose size ``shape`` gives."""
    validate.tensor(name, t, optional=False)
    dim = next(n for n, size in enumerate(shape) if isinstance(size, int))
    if t.dim() != len(shape) or t.shape[dim] != shape[dim]:
        validate.fail(name, f"shape {tuple(t.shape)}", f"({', '.join(map(str, shape))})")
    return t.unbind(dim)


def _named(names: Mapping[str, str], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn`` called; its errors name the arguments as ``names`` does, and window as window_size."""
    try:
        return fn(*args, **kwargs)
    except (TypeError, ValueError, UnsupportedError) as error:
        text = str(error)
        found = re.match(r"[\w, ]+(?=: got)", text)
        if found is None:
            raise
        known = {"window": "window_size", **names}
        said = dict.fromkeys(known.get(name, name) for name in found[0].split(", "))
        error.args = (", ".join(said) + text[found.end() :],)
        raise


# ---------------------------------------------------------------- without a cache
def _dense(
    q: Tensor, k: Tensor, v: Tensor, names: Mapping[str, str], dropout_p: float, return_attn_probs: bool, **options: Any
) -> Any:
    pair = rng.draw(q.device) if return_attn_probs and dropout_p > 0 else None
    drop = {"dropout_p": dropout_p, "dropout_rng": pair}
    found = _named(names, attention, q, k, v, return_lse=return_attn_probs, **drop, **options)
    if not return_attn_probs:
        return found
    if pair is None:
        return *found, q.new_empty(0)
    with torch.no_grad():  # values that pick one key each: the output is the weights
        seqlen_k = k.shape[1]
        unit = torch.eye(seqlen_k, max(seqlen_k, 1), dtype=v.dtype, device=v.device)[None, :, None]
        weights = attention(q, k, unit.expand(*v.shape[:3], -1), **options)
        assert isinstance(weights, Tensor)
        weights = weights[..., :seqlen_k].transpose(1, 2)
        index = torch.meshgrid(*(torch.arange(n, device=q.device) for n in weights.shape), indexing="ij")
        return *found, torch.where(rng.keep(pair, dropout_p, *index), weights, -weights)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    names: Mapping[str, str],
    dropout_p: float,
    return_attn_probs: bool,
    **options: Any,
) -> Any:
    validate.tensor("q", q, optional=False)
    pair = rng.draw(q.device) if return_attn_probs and dropout_p > 0 else None
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    drop = {"dropout_p": dropout_p, "dropout_rng": pair}
    found = _named(names, attention_varlen, q, k, v, *lengths, return_lse=return_attn_probs, **drop, **options)
    if not return_attn_probs:
        return found
    if pair is None:
        return *found, q.new_empty(0)
    with torch.no_grad():
        start = cu_seqlens_q.new_zeros(cu_seqlens_q.shape[0] - 1)
        _, column, exists = paging.token_positions(start, k, cu_seqlens_k)
        unit = (column[:, None] == torch.arange(max(max_seqlen_k, 1), device=v.device)) & exists[:, None]
        unit = unit.to(v.dtype)[:, None].expand(*v.shape[:2], -1)
        weights = attention_varlen(q, k, unit, *lengths, **options)
        assert isinstance(weights, Tensor)
        weights = weights[..., :max_seqlen_k]
        sequence, row, exists = paging.token_positions(start, q, cu_seqlens_q)
        padded = weights.new_zeros(len(start), max_seqlen_q, *weights.shape[1:])
        padded[sequence[exists], row[exists]] = weights[exists]
        padded = padded.transpose(1, 2)
        index = torch.meshgrid(*(torch.arange(n, device=q.device) for n in padded.shape), indexing="ij")
        return *found, torch.where(rng.keep(pair, dropout_p, *index), padded, -padded)


# ---------------------------------------------------------------- with a cache
def _index(name: str, t: Any, batch: int, dims: int, device: torch.device) -> None:
    validate.tensor(name, t, optional=False)
    if t.dtype not in (torch.int32, torch.int64):
        validate.fail(name, t.dtype, "torch.int32 or torch.int64", TypeError)
    if t.dim() != dims or t.shape[0] != batch:
        allowed = f"({batch},)" if dims == 1 else f"({batch}, max_num_blocks)"
        validate.fail(name, f"shape {tuple(t.shape)}", allowed)
    if t.device != device:
        validate.fail(name, f"device {t.device}", f"the device of q, {device}")


def _cache_seqlens(given: Any, batch: int, room: int, k: Tensor | None, device: torch.device) -> Tensor:
    """The tokens in the cache before the call, (batch,)."""
    if given is None and k is not None:
        validate.fail("cache_seqlens", None, "an int or a tensor, where k is given")
    if given is None or not isinstance(given, Tensor):
        count = room if given is None else validate.count("cache_seqlens", given)
        return torch.full((batch,), count, dtype=torch.int64, device=device)
    _index("cache_seqlens", given, batch, 1, device)
    return given


def _rotated(
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
    rotary = _named(names, Rotary, cos, sin, interleaved)
    turned = []
    for x, step in ((k, 1), (q, int(each))):
        positions = first.long()[:, None] + torch.arange(x.shape[1], device=x.device) * step
        _named(names, rotary.check_positions, x, positions)
        turned.append(_named(names, torch.ops.xattn.rotary, x, positions, rotary.cos, rotary.sin, rotary.interleaved))
    return turned[1], turned[0]


def _shifted(
    k_cache: Tensor, v_cache: Tensor, pages: Tensor, name: str, leftpad: Tensor, lengths: Tensor, new: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The caches as pages of one token each, and the page table of each sequence from its ``leftpad`` on."""
    num_pages, size = k_cache.shape[:2]
    if v_cache.shape[:2] != k_cache.shape[:2] or not size:
        allowed = f"{tuple(k_cache.shape[:2])} pages of tokens, as k_cache has, at least one in each"
        validate.fail("v_cache", f"shape {tuple(v_cache.shape)}", allowed)
    room = pages.shape[1] * size
    ends = lengths.long() + new
    status.report("seqlens_k", (leftpad < 0) | (leftpad > lengths), "cache_leftpad", leftpad, "0 to cache_seqlens")
    allowed = f"0 to {room}, the tokens that there is room for" + (f", less the {new} of k" if new else "")
    status.report("no_room", ends > room, "cache_seqlens", lengths, allowed)
    used = torch.arange(pages.shape[1], device=pages.device) * size < ends[:, None]
    bad = used & ((pages < 0) | (pages >= num_pages))
    status.report("page_table", bad, name, pages, f"0 to {num_pages - 1}, what k_cache has")
    (k_tokens, step), (v_tokens, step_v) = (_tokens(c, new) for c in (k_cache, v_cache))
    if step != step_v:
        got = f"strides {k_cache.stride()} of k_cache and {v_cache.stride()} of v_cache"
        raise UnsupportedError(f"cache_leftpad: got {got}; allowed: sequences of both as many tokens apart")
    position = torch.arange(room, device=pages.device) + leftpad.long()[:, None]
    inside = (position >= 0) & (position < room)
    position = torch.where(inside, position, 0)
    page = pages.long().gather(1, torch.div(position, size, rounding_mode="floor"))
    return k_tokens, v_tokens, torch.where(inside, page * step + position % size, -1)


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


# ---------------------------------------------------------------- in place of flash_attn
def install() -> None:
    """From now on ``import flash_attn`` gives these functions: also from ``flash_attn.flash_attn_interface``, with
    ``flash_attn.bert_padding`` (index_first_axis, index_put_first_axis, pad_input, unpad_input), ``__version__`` and
    the distribution flash-attn that importlib.metadata finds. Everything else of the library is an ImportError or an
    AttributeError meanwhile, be it installed or not.

    Call it before what imports flash_attn, or asks whether it is there, is imported. ``uninstall`` undoes it.
    """
    functions = {name: globals()[name] for name in __all__ if name.startswith("flash_attn")}
    padding = {name: getattr(flash_attn_padding, name) for name in flash_attn_padding.__all__}
    modules = {"": functions, "flash_attn_interface": functions, "bert_padding": padding}
    stand_in.put("flash_attn", "flash-attn", VERSION, __file__, modules)


def uninstall() -> None:
    """Undoes ``install``: sys.modules holds what it held. Functions that were imported meanwhile stay xattn's."""
    stand_in.remove("flash_attn")
