"""Tensors as Hopper's tensor memory accelerator reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from .inputs import is_direct
from .kernel_call import TensorMap


def tensor_map(offset: int, number: int, t: Tensor, rows: int) -> TensorMap:
    """(head_dim, row, head, sequence) in boxes of 128 bytes and ``rows`` rows, swizzled by 128 bytes."""
    if t.dim() == 3:
        t = t[None]
    order = (3, 1, 2, 0)
    sizes = tuple(max(1, t.shape[n]) for n in order)
    width = t.element_size()
    strides = tuple(width if n == 3 else width * t.stride(n) if t.shape[n] > 1 else 16 for n in order)
    element = {torch.float16: 6, torch.bfloat16: 9}.get(t.dtype, 0)  # 0: bytes
    return TensorMap(offset, number, element, sizes, strides, (128 // width, rows, 1, 1), swizzle=3, l2_promotion=3)


def mapped(t: Tensor) -> Tensor:
    """The tensor, or a copy of it that TMA can read: rows at multiples of 16 bytes, no stride 0."""
    moves = all(s > 0 or n <= 1 for s, n in zip(t.stride(), t.shape, strict=True))
    return t if moves and is_direct(t) else t.clone(memory_format=torch.contiguous_format)
