"""A drop-in for torch.nn.functional.scaled_dot_product_attention: its layout, its arguments, its meaning, answered by
xattn."""

from __future__ import annotations

import math

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
    if min(query.dim(), key.dim(), value.dim()) < 3:
        raise ValueError(
            f"query, key, value: got {query.dim()}, {key.dim()}, {value.dim()} dimensions; allowed: from 3 of each"
        )
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask: got a tensor; allowed: None where is_causal is set")
    for name, t in (("key", key), ("value", value)):
        if not enable_gqa and t.shape[-3] != query.shape[-3]:
            raise ValueError(
                f"{name}: got {t.shape[-3]} heads for {query.shape[-3]} of query; allowed: as many, or enable_gqa=True"
            )
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
