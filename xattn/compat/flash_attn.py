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
of window_size below -1 is an error. Errors are xattn's, by the names of the arguments here (in a compiled function by
those of xattn, for values in tensors): TypeError, ValueError and
xattn.UnsupportedError, on the CPU for values in tensors too, before anything is written. On a GPU those values are
reported by xattn.check_errors().
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import paging, rng, validate
from ..api import attention, attention_paged, attention_varlen
from ..errors import UnsupportedError
from . import flash_attn_arguments as arguments
from . import flash_attn_cache as cache
from . import flash_attn_padding as padding
from . import stand_in

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
    options = arguments.options(
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
    k, v = arguments.unpacked("kv", kv, "batch", "seqlen_k", 2, "nheads_k", "headdim")
    options = arguments.options(
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
    q, k, v = arguments.unpacked("qkv", qkv, "batch", "seqlen", 3, "nheads", "headdim")
    options = arguments.options(
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
    options = arguments.options(
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
    out, lse = arguments.named(
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
    k, v = arguments.unpacked("kv", kv, "total_k", 2, "nheads_k", "headdim")
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = arguments.options(
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
    q, k, v = arguments.unpacked("qkv", qkv, "total", 3, "nheads", "headdim")
    names = {"q": "qkv", "k": "qkv", "v": "qkv"}
    names |= {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}
    options = arguments.options(
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
            arguments.index(name, index, batch, dims, q.device)
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
    lengths = cache.seqlens(cache_seqlens, batch, room, k, q.device)
    window = arguments.window(window_size)
    causal = validate.flag("causal", causal)
    with torch.no_grad():
        q, k = cache.rotated(q, k, rotary_cos, rotary_sin, rotary_interleaved, lengths, causal or window is not None)
        if cache_leftpad is not None:
            new = 0 if k is None else k.shape[1]
            k_cache, v_cache, pages = cache.shifted(k_cache, v_cache, pages, table, cache_leftpad, lengths, new)
            lengths = lengths - cache_leftpad
        return arguments.named(
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
            softcap=arguments.softcap_from_zero(softcap),
            alibi_slopes=alibi_slopes,
            num_splits=validate.count("num_splits", num_splits) or None,
            return_lse=return_softmax_lse,
        )


# ---------------------------------------------------------------- without a cache
def _dense(
    q: Tensor, k: Tensor, v: Tensor, names: Mapping[str, str], dropout_p: float, return_attn_probs: bool, **options: Any
) -> Any:
    validate.tensor(names.get("q", "q"), q, optional=False)
    pair = rng.draw(q.device) if return_attn_probs and dropout_p > 0 else None
    drop = {"dropout_p": dropout_p, "dropout_rng": pair}
    found = arguments.named(names, attention, q, k, v, return_lse=return_attn_probs, **drop, **options)
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
    found = arguments.named(names, attention_varlen, q, k, v, *lengths, return_lse=return_attn_probs, **drop, **options)
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


# ---------------------------------------------------------------- in place of flash_attn
def install() -> None:
    """From now on ``import flash_attn`` gives these functions: also from ``flash_attn.flash_attn_interface``, with
    ``flash_attn.bert_padding`` (index_first_axis, index_put_first_axis, pad_input, unpad_input), ``__version__`` and
    the distribution flash-attn that importlib.metadata finds. Everything else of the library is an ImportError or an
    AttributeError meanwhile, be it installed or not.

    Call it before what imports flash_attn, or asks whether it is there, is imported. ``uninstall`` undoes it.
    """
    functions = {name: globals()[name] for name in __all__ if name.startswith("flash_attn")}
    of_padding = {name: getattr(padding, name) for name in padding.__all__}
    modules = {"": functions, "flash_attn_interface": functions, "bert_padding": of_padding}
    stand_in.put("flash_attn", "flash-attn", VERSION, __file__, modules)


def uninstall() -> None:
    """Undoes ``install``: sys.modules holds what it held. Functions that were imported meanwhile stay xattn's."""
    stand_in.remove("flash_attn")
