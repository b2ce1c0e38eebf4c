"""From padded batches to packed sequences and back, as flash_attn.bert_padding offers it; all differentiable."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens that a mask keeps.

    Args:
        hidden_states: (batch, seqlen, ...). attention_mask: (batch, seqlen), bool or 0 and 1: the tokens that count.
        unused_mask: of that shape: tokens that are packed as well, and do not count; none is in both.

    Returns:
        (packed (total, ...), indices (total,) of its tokens among batch * seqlen, cu_seqlens (batch + 1,) int32,
        the longest sequence, the tokens of each sequence that count (batch,) int32).
    """
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = packed.sum(-1, dtype=torch.int32)
    indices = packed.flatten().nonzero().flatten()
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...) with the tokens (total, ...) at ``indices`` (total,) among batch * seqlen, and 0
    elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """``input[indices]``: (total, ...) for input (n, ...) and indices (total,)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with ``values`` (total, ...) at ``indices`` (total,), each only once, and 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)
