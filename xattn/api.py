"""The public functions. calls.py turns their arguments into those of one op; meaning and errors are the op's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from . import calls, segments, status, validate
from .fusion import Epilogue
from .inputs import NO_BOUND
from .rotary import Rotary

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import Dense, Paged


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Dense]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Dense]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Dense]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_rng: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    epilogue: Epilogue | None = None,
    q_scale: float | Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * softmax_scale) v for every head, in one pass.

    Order: scores = q.k * softmax_scale (and the scales) -> softcap -> score_mod -> + ALiBi -> + attn_mask -> masks
    (causal, window, mask_mod, seqused_k, boolean attn_mask) -> sink -> softmax -> dropout -> v -> epilogue.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp16, bf16, fp32, fp64 or fp8, any strides.
        k, v: (batch, seqlen_k, heads_kv, head_dim) and (batch, seqlen_k, heads_kv, head_dim_v). heads_q is a multiple
            of heads_kv: query head h reads head h // (heads_q / heads_kv).
        causal: query i sees keys up to i + seqlen_k - seqlen_q (aligned bottom-right).
        window: (left, right), inclusive distances from that diagonal; None on a side is unbounded, 0 is a real
            distance.
        softmax_scale: default head_dim ** -0.5; 0, or of a size from 2^-126 to 1e30.
        softcap: scores become softcap * tanh(scores / softcap); 0 is off; otherwise from 2^-126 to 1e30.
        attn_mask: boolean (True keeps) or a float added, broadcastable to (batch, heads_q, seqlen_q, seqlen_k). Floats
            of any dtype count in full.
        alibi_slopes: (heads_q,) or (batch, heads_q), float: -slope * |i + seqlen_k - seqlen_q - j| is added
            (Press et al., "Train short, test long", 2022).
        sinks: (heads_q,), natural-log logits, not scaled, of one more key whose value is 0; lse includes it. A sink of
            +inf takes all: out 0, lse +inf, gradients 0.
        seqused_k: (batch,), int32 or int64: keys from there on do not exist, so that seqlen_k is seqused_k[b] wherever
            something is aligned to it (causal, window, ALiBi).
        dropout_p: in [0, 1]; kept weights are scaled by 1 / (1 - dropout_p). dropout_rng: int64[2] (seed, offset) on
            the device; drawn from torch's generator of the device when not given. Equal pairs give equal masks
            everywhere (rng.py). Where the call is a part of a larger one, int64[4]: seed, offset, and the q_idx and
            kv_idx that the first query and the first key have there (in ``attention`` alone).
        score_mod: fn(score, b, h, q_idx, kv_idx) -> score; mask_mod: fn(b, h, q_idx, kv_idx) -> True where seen, as
            FlexAttention's. Tensors that they capture may require gradients (score_mod).
            Native kernels have them compiled in: arithmetic, comparisons, where, minima and maxima, roundings,
            exponentials and their kin, whole numbers, and elements of captured tensors. A refusal names an operation
            that they cannot have.
        epilogue: an ``Epilogue`` applied to the output before it is rounded; natively, too, with the same operations.
            All three are traced with 0-d tensors that have no value: no .item(), .tolist(), .numpy() or Python
            condition on them or on captured tensors, no shape that depends on them, no write into what is captured.
        q_scale, k_scale, v_scale: numbers or float32 tensors, 0-d or (batch, heads_kv), that multiply q, k, v.
        return_lse: also return the logsumexp of the scores.
        deterministic: a bitwise reproducible backward; None follows torch.are_deterministic_algorithms_enabled().
        out: a tensor of exactly the result's shape, dtype and device to write to.
        backend: the name of the only backend to ask; it never falls back.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q (bf16 for fp8), contiguous; with return_lse (out,
        lse), lse in natural log, float32, (batch, heads_q, seqlen_q). A row that sees no key has out 0, lse -inf and
        gradients 0, whatever it and the gradient of its out hold.

        What lies outside the valid range (keys from seqused_k on; in the other calls, what offsets, lengths and pages
        leave out) never reaches a result, be it NaN. A NaN in a key or value that only a mask hides (causal, window,
        attn_mask, mask_mod) may reach rows that see other keys, as 0 * NaN.

    Raises:
        TypeError, ValueError: an argument is not what is allowed, out given where a gradient is asked for; nothing was
            launched or written.
        UnsupportedError: no backend, or not the one named, answers; the refusals are listed. Also for forward-mode
            derivatives (torch.func.jvp, jacfwd, hessian) and for out under a torch.func transform.
    """
    plain = score_mod is None and mask_mod is None and epilogue is None and out is None
    if plain and type(dropout_p) is float and not dropout_p:
        tensors: tuple[Any, ...] = (q, k, v, attn_mask, alibi_slopes, sinks, seqused_k)
        if not (q_scale is None and k_scale is None and v_scale is None):
            tensors = (*tensors, q_scale, k_scale, v_scale)
        found = calls.repeated(
            "attention",
            tensors,
            (causal, window, softmax_scale, softcap, return_lse, backend),
        )
        if found is not None:
            return found
    given = {
        "q": q,
        "k": k,
        "v": v,
        "causal": causal,
        "window": window,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "attn_mask": attn_mask,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "seqused_k": seqused_k,
        "dropout_p": dropout_p,
        "dropout_rng": dropout_rng,
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "epilogue": epilogue,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "return_lse": return_lse,
        "deterministic": deterministic,
        "out": out,
        "backend": backend,
    }
    return calls.run(calls.normalise("attention", given))


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Dense],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[Dense],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    **options: Unpack[Dense],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_rng: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    epilogue: Epilogue | None = None,
    q_scale: float | Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` over sequences of different lengths, packed behind each other.

    Args:
        q: (total_q, heads_q, head_dim). k: (total_k, heads_kv, head_dim). v: (total_k, heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,), int32 or int64, on the device of q: sequence b is rows cu_seqlens[b]
            to cu_seqlens[b + 1]. Rows behind the last offset belong to no sequence and come out as empty rows.
        max_seqlen_q, max_seqlen_k: at least the longest sequence; an upper bound will do.
        attn_mask: broadcastable to (batch, heads_q, max_seqlen_q, max_seqlen_k), indexed within each sequence.
        Everything else: see ``attention``. Indices given to score_mod and the others count within the sequence.

    Returns:
        out (total_q, heads_q, head_dim_v); with return_lse (out, lse), lse (heads_q, total_q).

    Raises:
        As ``attention``; DeviceValueError (on the CPU at once, on a GPU from ``check_errors``) for offsets that
        decrease or leave the tensor and for a max_seqlen that is too small.
    """
    plain = score_mod is None and mask_mod is None and epilogue is None and out is None
    if plain and type(dropout_p) is float and not dropout_p:
        tensors: tuple[Any, ...] = (q, k, v, cu_seqlens_q, cu_seqlens_k, attn_mask, alibi_slopes, sinks, seqused_k)
        if not (q_scale is None and k_scale is None and v_scale is None):
            tensors = (*tensors, q_scale, k_scale, v_scale)
        found = calls.repeated(
            "varlen",
            tensors,
            (causal, window, softmax_scale, softcap, return_lse, backend),
            (max_seqlen_q, max_seqlen_k),
        )
        if found is not None:
            return found
    given = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "causal": causal,
        "window": window,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "attn_mask": attn_mask,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "seqused_k": seqused_k,
        "dropout_p": dropout_p,
        "dropout_rng": dropout_rng,
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "epilogue": epilogue,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "return_lse": return_lse,
        "deterministic": deterministic,
        "out": out,
        "backend": backend,
    }
    return calls.run(calls.normalise("varlen", given))


@overload
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Paged],
) -> Tensor: ...
@overload
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[Paged],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seqlens_k: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[Paged],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seqlens_k: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    cu_seqlens_new: Tensor | None = None,
    rotary: Rotary | None = None,
    kv_layout: str = "NHD",
    num_splits: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_rng: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    epilogue: Epilogue | None = None,
    q_scale: float | Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a paged cache, after writing new tokens into it if there are any. It has no gradient.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with cu_seqlens_q (batch + 1,). Query i
            of a sequence stands at position length - seqlen_q + i, where length counts its tokens, the new ones
            included: that is its q_idx.
        k_cache, v_cache: (num_pages, page_size, heads_kv, head_dim) for kv_layout "NHD", (num_pages, heads_kv,
            page_size, head_dim) for "HND", any strides; v_cache may be a view of k_cache. fp8 under a q in bf16, fp16
            or fp32, with scales; native kernels read e4m3, on gfx942 e4m3fnuz, under bf16 and fp16.
        page_table: (batch, max_pages), int32 or int64: the pages of each sequence; what stands behind its length is
            never looked at.
        seqlens_k: (batch,), int32 or int64: tokens in the cache before the call. It is not modified.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, the new tokens included; None is right too, and may be
            slower. A max_seqlen_q below the seqlen_q of q is an error.
        k_new, v_new: (batch, seqlen_new, heads_kv, head_dim), or packed with cu_seqlens_new (batch + 1,): written
            behind the seqlens_k tokens, and part of the attention. The cache is changed. Scales, above 0 then, divide
            them; fp8 caches clamp them. v_new may be left out where v_cache is a view of k_cache that holds, of each
            page, slot and head, channels of that same vector of k_cache.
        rotary: applied to k_new before it is written, and to q, at their positions.
        num_splits: how many parts of the keys native kernels work on at once; None leaves it to them. Fallbacks work in
            one part.
        attn_mask: boolean (total_q, max_seqlen_q), a tree mask: which of the sequence's new tokens each query sees;
            older keys are visible. The queries are then the newest tokens.
        dropout_p, dropout_rng: as in ``attention``; the mask follows positions in the sequence, so one (seed,
            offset) drops the same in prefill and decode.
        Everything else: see ``attention``.

    Returns:
        out shaped like q with head_dim_v; with return_lse (out, lse), lse (batch, heads_q, seqlen_q) or (heads_q,
        total_q).

    Raises:
        As ``attention_varlen``; ValueError where a gradient is asked for; also DeviceValueError for a page id or length
        out of range, and for new tokens without room: on the CPU before anything is written, on a GPU those are not
        written and ``check_errors`` raises.
    """
    plain = score_mod is None and mask_mod is None and epilogue is None and out is None
    if plain and type(dropout_p) is float and not dropout_p:
        dense = max_seqlen_q is None and type(q) is Tensor and not q.is_nested and q.dim() > 1
        longest = q.shape[0 if q.dim() == 3 else 1] if dense else 0
        of_scores = (attn_mask, alibi_slopes, sinks, q_scale, k_scale, v_scale)
        tensors: Any = (q, k_cache, v_cache, cu_seqlens_q, page_table, seqlens_k, *of_scores)
        options = (causal, window, softmax_scale, softcap, return_lse, backend)
        bounds = (longest if max_seqlen_q is None else max_seqlen_q, NO_BOUND if max_seqlen_k is None else max_seqlen_k)
        paged = (kv_layout, num_splits, segments.invariant())
        found = None
        if k_new is not None:
            new = (k_new, v_new, cu_seqlens_new)
            found = calls.repeated_extended(tensors, new, rotary, options, bounds, paged)
        elif v_new is None and cu_seqlens_new is None and rotary is None:
            found = calls.repeated("paged", tensors, options, bounds, paged)
        if found is not None:
            return found
    given = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": page_table,
        "seqlens_k": seqlens_k,
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "k_new": k_new,
        "v_new": v_new,
        "cu_seqlens_new": cu_seqlens_new,
        "rotary": rotary,
        "kv_layout": kv_layout,
        "num_splits": num_splits,
        "causal": causal,
        "window": window,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "attn_mask": attn_mask,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "dropout_p": dropout_p,
        "dropout_rng": dropout_rng,
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "epilogue": epilogue,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "return_lse": return_lse,
        "deterministic": deterministic,
        "out": out,
        "backend": backend,
    }
    return calls.run(calls.normalise("paged", given))


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The attention over all keys from attentions over parts of them, exactly.

    Args:
        outs: partial outputs, each (batch, seqlen_q, heads_q, head_dim_v), or packed (total_q, heads_q, head_dim_v).
        lses: their logsumexps, each (batch, heads_q, seqlen_q) or (heads_q, total_q), float32; float64 is taken
            too, and kept. Sinks must be part of exactly one.

    Returns:
        (out, lse) of the same shapes and dtypes. out = sum_n out_n exp(lse_n - lse) with lse = log sum_n exp(lse_n);
        where every part is empty, out 0 and lse -inf; a part with lse inf is the result, of several their mean. Both
        are differentiable.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if isinstance(parts, Tensor) or not isinstance(parts, Sequence):
            validate.fail(name, type(parts).__name__, "a list or tuple of tensors", TypeError)
    if not outs or len(outs) != len(lses):
        got = f"{len(outs)} and {len(lses)} tensors"
        validate.fail("outs, lses", got, "as many of one as of the other, at least one")
    for name, parts in (("outs", outs), ("lses", lses)):
        for t in parts:
            validate.tensor(name, t, optional=False)
            validate.alike(name, t, parts[0], outs[0].device)
    out, lse = outs[0], lses[0]
    if lse.dtype not in (torch.float32, torch.float64):
        validate.fail("lses", lse.dtype, "torch.float32, torch.float64", TypeError)
    dims = {3: (1, 0), 4: (0, 2, 1)}.get(out.dim(), ())
    if not dims or tuple(lse.shape) != tuple(out.shape[n] for n in dims):
        got = f"shape {tuple(lse.shape)} for outs of {tuple(out.shape)}"
        validate.fail("lses", got, "(batch, heads_q, seqlen_q), or (heads_q, total_q) for packed outs")
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    stacked = torch.stack(list(lses)).to(dtype)
    all_of_it = stacked.detach() == float("inf")
    taken = all_of_it.any(0)
    stacked = torch.where(taken, 0, stacked)
    top = stacked.detach().amax(0)
    top = torch.where(top == float("-inf"), 0, top)
    weights = torch.where(taken, all_of_it.to(dtype), torch.exp(stacked - top))
    total = weights.sum(0)
    empty = total == 0
    safe = torch.where(empty, 1, total)
    merged = torch.where(empty, float("-inf"), torch.log(safe) + top)
    merged = torch.where(taken, float("inf"), merged)
    weights = (weights / safe).transpose(-1, -2)[..., None]
    # A part without weight counts as 0 whatever it holds: its out may be anything where its lse is -inf.
    values = torch.where(weights == 0, 0, torch.stack(list(outs)).to(dtype))
    return (values * weights).sum(0).to(out.dtype), merged.to(lse.dtype)


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Within it, a row's result does not depend on the other sequences of the call, bit for bit: split counts and
    groups are fixed. It may stand around a compiled function or inside it, and holds for a call's backward as well."""
    if torch.compiler.is_compiling():
        segments.traced.append(True)
        try:
            yield
        finally:
            segments.traced.pop()
        return
    token = segments.one_by_one.set(True)
    try:
        yield
    finally:
        segments.one_by_one.reset(token)


def check_errors(device: torch.device | str | int | None = None) -> None:
    """Waits for the GPU (all that xattn used, or ``device``) and raises DeviceValueError with what kernels reported;
    clears it. ValueError for a device that is not here, TypeError for what is none.

    Values that only the device can see (lengths, offsets, page ids) are checked there without stopping the host. With
    the environment variable XATTN_VALIDATE=device every call does this. On the CPU bad values raise at once.
    """
    status.check_errors(device)
