"""xattn as an attention implementation of Hugging Face transformers.

``register()`` makes ``attn_implementation="xattn"`` known; ``PagedCache`` is a cache in pages for ``generate``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, cast

import torch
from packaging.version import Version
from torch import Tensor

from .. import dispatch
from ..api import attention, attention_varlen

OLDEST = "5.17"

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        "xattn.compat.transformers needs transformers, which is not installed: pip install xattn[demo]"
    ) from error
if Version(_transformers.__version__) < Version(OLDEST):
    raise ImportError(
        f"xattn.compat.transformers needs transformers {OLDEST} or newer, not {_transformers.__version__}"
    )

from transformers import AttentionInterface  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask  # noqa: E402

from .transformers_cache import NewStates, PagedCache  # noqa: E402

__all__ = ["PagedCache", "attention_forward", "attention_mask", "register"]


def register(name: str = "xattn", backend: str | None = None) -> None:
    """Makes ``attn_implementation=name`` known to transformers: the attention, and the masks that it is given.

    ``backend``: the name of the only backend to ask; it never falls back. To have several, register several names.
    ValueError where there is none of that name.
    """
    dispatch.check_name(backend)
    AttentionInterface.register(name, partial(attention_forward, backend=backend))
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a layer: boolean (batch, 1, q_length, kv_length), True keeps; None where plain causal attention,
    aligned bottom-right, says the same: also for the chunks of a long prompt.

    Arguments: those of transformers' mask functions; ``attention_mask`` is the padding, (batch, tokens), True keeps.
    """
    if allow_is_causal_skip and _is_plain(q_length, kv_length, q_offset, kv_offset, attention_mask, local_size):
        return None
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=cast(int, q_offset),  # a tensor will do
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        **kwargs,
    )


def _is_plain(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    padding: Tensor | None,
    local_size: int | None,
) -> bool:
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    if isinstance(q_offset, Tensor) or (padding is not None and tracing):  # values are not to be read here
        return False
    end = kv_offset + kv_length
    if q_offset + q_length != end:  # a cache of fixed size, with room behind the last token
        return False
    if local_size is not None and (kv_offset or kv_length > local_size):
        return False
    return padding is None or (padding.shape[-1] >= end and bool(padding[:, kv_offset:end].all()))


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | NewStates,
    value: Tensor | NewStates,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a layer calls. Arguments mean what they mean to transformers' other attention functions.

    Args:
        query: (batch, heads, seqlen_q, head_dim). key, value: (batch, heads_kv, seqlen_k, ...), or what a PagedCache
            gave for them.
        attention_mask: boolean (True keeps) or added, (batch, 1 or heads, seqlen_q, at least seqlen_k). It says all
            about causality and windows; None means causal if ``is_causal``, or, that being None, ``module.is_causal``
            says so, aligned bottom-right, with ``sliding_window``.
        sliding_window: how many keys a query sees, itself included.
        s_aux: (heads,), attention sinks.
        position_bias: added to the scores, broadcastable to (batch, heads, seqlen_q, seqlen_k).
        cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,), sequences packed into a batch of one.
        kwargs: what other parts of a model are told; whatever would change the result is refused.

    Returns:
        ((batch, seqlen_q, heads, head_dim_v), None): attention weights are never made.
    """
    _refuse(kwargs)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "deterministic": deterministic,
        "backend": backend,
    }
    if isinstance(key, NewStates):
        if dropout or position_bias is not None or cu_seq_lens_q is not None:
            _fail("dropout, position_bias, cu_seq_lens_q", "given", "none of them with a PagedCache")
        return key.attend(query, attention_mask, causal=causal, sliding_window=sliding_window, **options), None

    if attention_mask is not None and attention_mask.dim() != 4:
        _fail("attention_mask", f"shape {tuple(attention_mask.shape)}", "(batch, 1 or heads, seqlen_q, seqlen_k)")
    options["dropout_p"] = dropout
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    mask = None if attention_mask is None else attention_mask[..., :seqlen_k]
    if mask is None:
        options["causal"] = causal and seqlen_q > 1
        if sliding_window is not None and seqlen_k > sliding_window:
            options["window"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
        if cu_seq_lens_q is not None and position_bias is None:
            return _packed(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, options), None
    if cu_seq_lens_q is not None:
        mask = _both(_same_sequence(cu_seq_lens_q, cu_seq_lens_k, seqlen_q, seqlen_k, q.device), mask)
    if position_bias is not None:
        mask = _both(position_bias[..., :seqlen_k], mask)
    out = attention(q, k, v, attn_mask=mask, **options)
    return out, None


# Arguments that some models give, and that mean another computation than the one here.
_UNKNOWN = ("head_mask", "attention_bias", "indices", "block_indices", "block_table", "sinks")


def _refuse(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        _fail(
            "output_attentions", True, 'False: attention weights are never made; load the model with "eager" for them'
        )
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            _fail(name, type(kwargs[name]).__name__, "None: xattn has no such argument")


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    max_q: int | Tensor | None,
    max_k: int | Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Sequences behind each other in a batch of one."""
    if q.shape[0] != 1:
        _fail("cu_seq_lens_q", f"a batch of {q.shape[0]}", "sequences packed into a batch of one")
    longest = [t.shape[1] if n is None else int(n) for t, n in ((q, max_q), (k, max_k))]
    offsets = (cu_q, cu_q if cu_k is None else cu_k)
    out = attention_varlen(q[0], k[0], v[0], *offsets, longest[0], longest[1], **options)
    return out.unsqueeze(0)


def _same_sequence(cu_q: Tensor, cu_k: Tensor | None, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """(1, 1, seqlen_q, seqlen_k): whether query and key are of the same packed sequence."""
    owner = []
    for ends, length in ((cu_q, seqlen_q), (cu_q if cu_k is None else cu_k, seqlen_k)):
        owner.append(torch.searchsorted(ends[1:].contiguous(), torch.arange(length, device=device), right=True))
    return (owner[0][:, None] == owner[1])[None, None]


def _both(a: Tensor, b: Tensor | None) -> Tensor:
    """One mask that says what two say: booleans keep, floats are added."""
    if b is None:
        return a
    if a.dtype == torch.bool and b.dtype == torch.bool:
        return a & b
    if a.dtype == torch.bool:
        return torch.where(a, b, float("-inf"))
    if b.dtype == torch.bool:
        return torch.where(b, a, float("-inf"))
    return a + b


def _fail(name: str, got: object, allowed: str) -> NoReturn:
    raise ValueError(f"{name}: got {got}; allowed: {allowed}")
