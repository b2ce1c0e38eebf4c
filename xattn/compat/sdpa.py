"""A drop-in for torch.nn.functional.scaled_dot_product_attention: its layout, its arguments, its meaning, answered by
xattn."""

from __future__ import annotations

import math
import numbers

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api import attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch's: query (..., heads, seqlen_q, head_dim), key and value (..., heads, seqlen_k, head_dim).

    Leading dimensions broadcast, heads among them, and may be missing; with ``enable_gqa`` the heads of key and value
    divide those of query. attn_mask broadcasts to (..., heads, seqlen_q, seqlen_k), from any number of dimensions.
    ``is_causal`` is aligned top-left, as torch defines it (query i sees keys up to i whatever the lengths), and
    excludes an attn_mask. A row that sees no key gives 0, as torch's does. What torch refuses is refused: TypeError for
    what is no tensor or number, ValueError for the rest.
    """
    tensors = [("query", query), ("key", key), ("value", value)]
    for name, t in (*tensors, *([("attn_mask", attn_mask)] if attn_mask is not None else [])):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}; allowed: a torch.Tensor")
    scale = _scale(scale)
    dims = [t.dim() for _, t in tensors]
    if min(dims) < 2 or (enable_gqa and min(dims) < 3):
        least = "3 of each where enable_gqa is set" if enable_gqa else "2 of each"
        raise ValueError(f"query, key, value: got {', '.join(map(str, dims))} dimensions; allowed: from {least}")
    if max(dims) == 2 and attn_mask is not None and attn_mask.dim() > 2:
        raise ValueError(f"attn_mask: got shape {tuple(attn_mask.shape)}; allowed: 2 dimensions, as query has")
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask: got a tensor; allowed: None where is_causal is set")
    allowed_dtypes = (torch.bool, torch.float32, query.dtype)
    if attn_mask is not None and attn_mask.is_floating_point() and attn_mask.dtype not in allowed_dtypes:
        allowed = f"torch.bool, torch.float32, or the dtype of query, {query.dtype}"
        raise ValueError(f"attn_mask: got {attn_mask.dtype}; allowed: {allowed}")
    query, key, value = _with_heads(query, key, value, enable_gqa)
    heads = query.shape[-3]
    leads = [t.shape[:-3] for t in (query, key, value)]
    try:
        lead = torch.broadcast_shapes(*leads)
    except RuntimeError as error:
        got = ", ".join(str(tuple(n)) for n in leads)
        raise ValueError(f"query, key, value: got leading dimensions {got}; allowed: such that broadcast") from error
    if query.shape[-1] == key.shape[-1] == 0:  # scores of 0, whatever the scale
        query, key, scale = F.pad(query, (0, 1)), F.pad(key, (0, 1)), 1.0
    batch = math.prod(lead)
    q, k, v = (
        t.expand(*lead, *t.shape[-3:]).reshape(batch, *t.shape[-3:]).transpose(1, 2) for t in (query, key, value)
    )
    if attn_mask is not None and attn_mask.dim() > 3 and len(lead) != 1:
        rest = attn_mask.shape[-3:]
        try:
            attn_mask = attn_mask.expand(*lead, *rest).reshape(batch, *rest)
        except RuntimeError as error:
            full = (*lead, heads, query.shape[-2], key.shape[-2])
            raise ValueError(
                f"attn_mask: got shape {tuple(attn_mask.shape)}; allowed: a shape that broadcasts to {full}"
            ) from error
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    # A trace keeps numbers: a mask follows the lengths of later calls.
    if is_causal and torch.jit.is_tracing():  # type: ignore[attr-defined]
        attn_mask, is_causal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).tril(), False
    window = (None, seqlen_q - seqlen_k) if is_causal and seqlen_q >= seqlen_k else None
    if is_causal and seqlen_q < seqlen_k:  # the diagonal is left of ours: the keys behind it do not exist for anybody
        k, v = k[:, :seqlen_q], v[:, :seqlen_q]
    causal = is_causal and seqlen_q <= seqlen_k
    wide = v if value.shape[-1] else F.pad(v, (0, 1))
    out = attention(
        q,
        k,
        wide,
        causal=causal,
        window=window if not causal else None,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        softmax_scale=scale,
    )
    out = out[..., : value.shape[-1]].transpose(1, 2)
    return out.reshape(seqlen_q, value.shape[-1]) if max(dims) == 2 else out.reshape(*lead, heads, *out.shape[2:])


def _with_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The three with a dimension of heads, which those of key and value, as many, divide."""
    query, key, value = (t if t.dim() > 2 else t[None] for t in (query, key, value))
    heads_q, heads_k, heads_v = (t.shape[-3] for t in (query, key, value))
    if enable_gqa:
        for name, heads in (("key", heads_k), ("value", heads_v)):
            if heads_q and (not heads or heads_q % heads):
                raise ValueError(f"{name}: got {heads} heads for {heads_q} of query; allowed: a number that divides it")
        if heads_k != heads_v:
            key, value = (t.repeat_interleave(heads_q // t.shape[-3], -3) for t in (key, value))
        return query, key, value
    try:
        (heads,) = torch.broadcast_shapes((heads_q,), (heads_k,), (heads_v,))
    except RuntimeError as error:
        raise ValueError(
            f"key, value: got {heads_k}, {heads_v} heads for {heads_q} of query; "
            "allowed: as many, 1, or with enable_gqa=True a number that divides it"
        ) from error
    if heads_k != 1 or heads_v != 1:  # one head of both is read by all heads as it is
        key, value = (t.expand(*t.shape[:-3], heads, *t.shape[-2:]) for t in (key, value))
    return query.expand(*query.shape[:-3], heads, *query.shape[-2:]), key, value


def _scale(scale: float | Tensor | None) -> float | None:
    """A number, or a tensor of one, which torch takes too."""
    if isinstance(scale, Tensor) and scale.dim() == 0 and not scale.is_complex() and scale.dtype != torch.bool:
        scale = scale.item()
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale: got {type(scale).__name__}; allowed: a number, or None")
    if not math.isfinite(scale):
        raise ValueError(f"scale: got {scale}; allowed: a finite number")
    return float(scale)
