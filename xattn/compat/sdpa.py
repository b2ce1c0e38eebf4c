"""A drop-in for torch.nn.functional.scaled_dot_product_attention: its layout, its arguments, its meaning, answered by
xattn."""

from __future__ import annotations

import math
import numbers

import torch
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

    ``is_causal`` is aligned top-left, as torch defines it (query i sees keys up to i whatever the lengths), and
    excludes an attn_mask. A row that sees no key gives 0, as torch's does. Raises what torch raises for what torch
    refuses, as ValueError.
    """
    tensors = [("query", query), ("key", key), ("value", value)]
    for name, t in (*tensors, *([("attn_mask", attn_mask)] if attn_mask is not None else [])):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}; allowed: a torch.Tensor")
    scale = _scale(scale)
    if query.dim() == key.dim() == value.dim() == 2:  # one head of one sequence
        if attn_mask is not None and attn_mask.dim() > 2:
            raise ValueError(f"attn_mask: got shape {tuple(attn_mask.shape)}; allowed: 2 dimensions, as query has")
        return scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask, dropout_p, is_causal, scale, enable_gqa
        )[0]
    if min(query.dim(), key.dim(), value.dim()) < 3:
        raise ValueError(
            f"query, key, value: got {query.dim()}, {key.dim()}, {value.dim()} dimensions; "
            "allowed: from 3 of each, or 2 of all"
        )
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask: got a tensor; allowed: None where is_causal is set")
    for name, t in (("key", key), ("value", value)):
        if not enable_gqa and t.shape[-3] != query.shape[-3]:
            raise ValueError(
                f"{name}: got {t.shape[-3]} heads for {query.shape[-3]} of query; allowed: as many, or enable_gqa=True"
            )
    allowed_dtypes = (torch.bool, torch.float32, query.dtype)
    if attn_mask is not None and attn_mask.is_floating_point() and attn_mask.dtype not in allowed_dtypes:
        allowed = f"torch.bool, torch.float32, or the dtype of query, {query.dtype}"
        raise ValueError(f"attn_mask: got {attn_mask.dtype}; allowed: {allowed}")
    leads = [t.shape[:-3] for t in (query, key, value)]
    try:
        lead = torch.broadcast_shapes(*leads)
    except RuntimeError as error:
        got = ", ".join(str(tuple(n)) for n in leads)
        raise ValueError(f"query, key, value: got leading dimensions {got}; allowed: such that broadcast") from error
    batch = math.prod(lead)
    q, k, v = (
        t.expand(*lead, *t.shape[-3:]).reshape(batch, *t.shape[-3:]).transpose(1, 2) for t in (query, key, value)
    )
    if attn_mask is not None and attn_mask.dim() > 3 and len(lead) != 1:
        rest = attn_mask.shape[-3:]
        try:
            attn_mask = attn_mask.expand(*lead, *rest).reshape(batch, *rest)
        except RuntimeError as error:
            full = (*lead, query.shape[-3], query.shape[-2], key.shape[-2])
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
    out = attention(
        q,
        k,
        v,
        causal=causal,
        window=window if not causal else None,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        softmax_scale=scale,
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).reshape(*lead, query.shape[-3], seqlen_q, value.shape[-1])


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
