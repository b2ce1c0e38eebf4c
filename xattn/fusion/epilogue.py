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

    ``rows``: which of ``aux`` have the shape of the output. In dense calls they are handed on as they are, in others as
    (rows, heads_q, head_dim_v), and behind all aux where the sequences start (see ``_of_row``). Ready-made epilogues
    set it.
    """

    def __init__(self, fn: Callable[..., Any], aux: tuple[Tensor, ...] = (), out_dtype: torch.dtype | None = None):
        if not callable(fn):
            raise TypeError(f"fn: got {type(fn).__name__}; allowed: a function fn(o, b, h, q_idx, d, *aux)")
        if not isinstance(aux, (tuple, list)) or not all(isinstance(t, Tensor) for t in aux):
            raise TypeError(f"aux: got {type(aux).__name__}; allowed: a tuple or list of tensors")
        if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
            raise TypeError(f"out_dtype: got {out_dtype!r}; allowed: a torch.dtype or None")
        self.fn, self.aux, self.out_dtype = fn, tuple(aux), out_dtype
        self.rows: tuple[int, ...] = ()
        self._made: tuple[Callable[..., Epilogue], tuple[Any, ...]] | None = None

    def then(self, other: Epilogue) -> Epilogue:
        """This epilogue, then ``other`` on its result."""
        if not isinstance(other, Epilogue):
            raise TypeError(f"other: got {type(other).__name__}; allowed: an xattn.Epilogue")
        first, second = self.fn, other.fn
        end = len(self.aux)
        mine, theirs = slice(None, end), slice(end, end + len(other.aux))
        # Where sequences start stands behind all aux, if anywhere, for those that read by rows.
        starts = slice(end + len(other.aux), None)
        my_rows, their_rows = (starts if e.rows else slice(0, 0) for e in (self, other))

        def both(o, b, h, q_idx, d, *aux):
            o = first(o, b, h, q_idx, d, *aux[mine], *aux[my_rows])
            return second(o, b, h, q_idx, d, *aux[theirs], *aux[their_rows])

        made = Epilogue(both, self.aux + other.aux, other.out_dtype or self.out_dtype)
        made.rows = (*self.rows, *(n + end for n in other.rows))
        made._made = (Epilogue.then, (self, other))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._made if self._made is not None else super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        if self._made is not None and self._made[0] is Epilogue.then:
            first, second = self._made[1]
            return f"{first!r}.then({second!r})"
        parts = [getattr(self.fn, "__name__", repr(self.fn)).strip("_")]
        if self.aux:
            parts.append(f"aux of {', '.join(f'{t.dtype} {tuple(t.shape)}' for t in self.aux)}")
        if self.out_dtype is not None:
            parts.append(f"out_dtype={self.out_dtype}")
        return f"Epilogue({', '.join(parts)})"


def _residual(o, b, h, q_idx, d, x, starts=None):
    return o + _of_row(x, starts, b, h, q_idx, d)


def _gate(o, b, h, q_idx, d, x, starts=None):
    return o * torch.nn.functional.silu(_of_row(x, starts, b, h, q_idx, d))


def _of_row(x, starts, b, h, q_idx, d):
    """The element of x (batch, seqlen_q, heads, head_dim_v), or of x (rows, heads, head_dim_v). There sequence b has
    its row of q_idx 0 at starts[b], if it has one; the last row stands at the end."""
    if starts is None:
        return x[b, q_idx, h, d]
    return x[torch.minimum(starts[b] + q_idx, starts[-1]), h, d]


def _ready(made: Callable[..., Epilogue], args: tuple[Any, ...], epilogue: Epilogue, rows: tuple[int, ...]) -> Epilogue:
    epilogue.rows, epilogue._made = rows, (made, args)
    return epilogue


def _tensor(name: str, value: Any, allowed: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}; allowed: {allowed}")


_LIKE_OUT = "a tensor of the shape of the output"
_SMALL = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.uint8,
)


class epilogues:
    """Ready-made epilogues. Tensors have the shape of the output, whatever the kind of the call; they can be
    pickled."""

    @staticmethod
    def residual(x: Tensor) -> Epilogue:
        """out + x."""
        _tensor("x", x, _LIKE_OUT)
        return _ready(epilogues.residual, (x,), Epilogue(_residual, (x,)), (0,))

    @staticmethod
    def gate(x: Tensor) -> Epilogue:
        """out * silu(x), the gating of SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020)."""
        _tensor("x", x, _LIKE_OUT)
        return _ready(epilogues.gate, (x,), Epilogue(_gate, (x,)), (0,))

    @staticmethod
    def quantize(scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Epilogue:
        """out / scale, clamped to the range of ``dtype`` (fp8, int8 or uint8; whole numbers are rounded half to even).
        ``scale``: one float32 number."""
        _tensor("scale", scale, "a tensor of one float32 number")
        if scale.numel() != 1 or not scale.is_floating_point():
            raise ValueError(f"scale: got {scale.dtype} {tuple(scale.shape)}; allowed: a tensor of one float32 number")
        if dtype not in _SMALL:
            got = dtype if isinstance(dtype, torch.dtype) else repr(dtype)
            raise TypeError(f"dtype: got {got}; allowed: {', '.join(map(str, _SMALL))}")
        whole = not dtype.is_floating_point
        info = torch.iinfo(dtype) if whole else torch.finfo(dtype)
        low, high = float(info.min), float(info.max)

        def quantize(o, b, h, q_idx, d, s):
            o = o / s.reshape(())
            return (o.round() if whole else o).clamp(low, high)

        return _ready(epilogues.quantize, (scale, dtype), Epilogue(quantize, (scale,), dtype), ())
