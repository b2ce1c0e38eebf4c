"""Epilogues: what is done to the output before it is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Epilogue:
    """``fn(o, b, h, q_idx, d, *aux)`` applied to every element ``o`` of the output, in float32, before it is rounded.

    ``fn``: a function of 0-d tensors; ``b``, ``h``, ``q_idx``, ``d`` are the element's sequence, query head, query and
    channel. ``aux``: tensors handed on to it (others that it captures work too). ``out_dtype``: the dtype of the
    result, default that of the call.
    """

    def __init__(self, fn: Callable[..., Any], aux: tuple[Tensor, ...] = (), out_dtype: torch.dtype | None = None):
        if not callable(fn):
            raise TypeError(f"fn: got {type(fn).__name__}; allowed: a function fn(o, b, h, q_idx, d, *aux)")
        if not isinstance(aux, (tuple, list)) or not all(isinstance(t, Tensor) for t in aux):
            raise TypeError(f"aux: got {type(aux).__name__}; allowed: a tuple or list of tensors")
        if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
            raise TypeError(f"out_dtype: got {out_dtype!r}; allowed: a torch.dtype or None")
        self.fn, self.aux, self.out_dtype = fn, tuple(aux), out_dtype

    def then(self, other: Epilogue) -> Epilogue:
        """This epilogue, then ``other`` on its result."""
        if not isinstance(other, Epilogue):
            raise TypeError(f"other: got {type(other).__name__}; allowed: an xattn.Epilogue")
        first, second = self.fn, other.fn
        mine, theirs = slice(None, len(self.aux)), slice(len(self.aux), None)

        def both(o, b, h, q_idx, d, *aux):
            return second(first(o, b, h, q_idx, d, *aux[mine]), b, h, q_idx, d, *aux[theirs])

        return Epilogue(both, self.aux + other.aux, other.out_dtype or self.out_dtype)


class epilogues:
    """Ready-made epilogues. Tensors are shaped like the output, (batch, seqlen_q, heads_q, head_dim_v)."""

    @staticmethod
    def residual(x: Tensor) -> Epilogue:
        """out + x."""
        return Epilogue(lambda o, b, h, q_idx, d, x: o + x[b, q_idx, h, d], (x,))

    @staticmethod
    def gate(x: Tensor) -> Epilogue:
        """out * silu(x), the gating of SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020)."""
        return Epilogue(lambda o, b, h, q_idx, d, x: o * torch.nn.functional.silu(x[b, q_idx, h, d]), (x,))

    @staticmethod
    def quantize(scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Epilogue:
        """out / scale, clamped to the range of ``dtype`` (fp8 or int8; int8 is rounded half to even). ``scale``: one
        float32 number."""
        if dtype.is_floating_point:
            top = torch.finfo(dtype).max
            return Epilogue(lambda o, b, h, q_idx, d, s: (o / s.reshape(())).clamp(-top, top), (scale,), dtype)
        low, high = float(torch.iinfo(dtype).min), float(torch.iinfo(dtype).max)
        return Epilogue(lambda o, b, h, q_idx, d, s: (o / s.reshape(())).round().clamp(low, high), (scale,), dtype)
