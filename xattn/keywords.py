"""Keyword arguments of the public functions but ``return_lse``, on which their overloads differ; for type checkers.
Meaning and defaults stand with the functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from torch import Tensor

from .fusion import Epilogue
from .rotary import Rotary


class Shards(TypedDict, total=False):
    """Of ``context_parallel``."""

    causal: bool
    window: tuple[int | None, int | None] | None
    softmax_scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    dropout_rng: Tensor | None
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    q_scale: float | Tensor | None
    k_scale: float | Tensor | None
    v_scale: float | Tensor | None
    deterministic: bool | None
    backend: str | None


class Common(Shards, total=False):
    """Of all three calls."""

    attn_mask: Tensor | None
    epilogue: Epilogue | None
    out: Tensor | None


class Dense(Common, total=False):
    """Of ``attention`` and ``attention_varlen``."""

    seqused_k: Tensor | None


class Paged(Common, total=False):
    """Of ``attention_paged``."""

    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    k_new: Tensor | None
    v_new: Tensor | None
    cu_seqlens_new: Tensor | None
    rotary: Rotary | None
    kv_layout: str
    num_splits: int | None
