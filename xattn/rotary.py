"""Rotary position embedding (Su et al., "RoFormer", 2021), in float32, of the first dimensions of a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import status


@dataclass(frozen=True)
class Rotary:
    """Tables of the angles. ``cos``, ``sin``: (positions, rotary_dim / 2), float.

    Of each head, the first rotary_dim channels are rotated and the rest stay. Pairs are (i, i + rotary_dim / 2), or
    with ``interleaved`` (2i, 2i + 1). A token at position p takes row p. At a negative position, where queries stand
    that are more than their sequence has tokens, it takes row -p, and the rotation is the opposite one.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name, t in (("cos", self.cos), ("sin", self.sin)):
            if not isinstance(t, Tensor):
                raise TypeError(f"{name}: got {type(t).__name__}; allowed: a torch.Tensor")
            if t.is_nested or t.layout is not torch.strided:
                got = "a nested tensor" if t.is_nested else t.layout
                raise ValueError(f"{name}: got {got}; allowed: a dense (strided) tensor")
            if not t.is_floating_point():
                raise TypeError(f"{name}: got {t.dtype}; allowed: a float dtype")
            if t.device != self.cos.device:
                raise ValueError(f"{name}: got device {t.device}; allowed: that of cos, {self.cos.device}")
            if t.dim() != 2 or t.shape != self.cos.shape or t.shape[1] < 1:
                raise ValueError(
                    f"{name}: got shape {tuple(t.shape)}; allowed: (positions, rotary_dim / 2), for cos and sin alike"
                )
        if type(self.interleaved).__name__ not in ("bool", "bool_"):  # numpy's too
            raise TypeError(f"interleaved: got {type(self.interleaved).__name__}; allowed: True or False")
        object.__setattr__(self, "interleaved", bool(self.interleaved))

    def check(self, x: Tensor) -> None:
        """Raises where the tables do not fit ``x`` (..., heads, head_dim)."""
        for name, t in (("cos", self.cos), ("sin", self.sin)):
            if t.device != x.device:
                raise ValueError(f"rotary: got {name} on {t.device}; allowed: the device of q, {x.device}")
        if 2 * self.cos.shape[1] > x.shape[-1]:
            allowed = f"up to head_dim, {x.shape[-1]}"
            raise ValueError(f"rotary: got rotary_dim {2 * self.cos.shape[1]}; allowed: {allowed}")

    def check_positions(self, x: Tensor, positions: Tensor) -> None:
        """Raises where ``positions`` are not those of the tokens of ``x`` (..., heads, head_dim), or ``check`` does."""
        if not x.is_floating_point():
            raise TypeError(f"x: got {x.dtype}; allowed: a float dtype")
        if x.dim() < 2:
            raise ValueError(f"x: got shape {tuple(x.shape)}; allowed: (..., heads, head_dim)")
        self.check(x)
        if positions.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"positions: got {positions.dtype}; allowed: torch.int32 or torch.int64")
        if positions.device != x.device:
            raise ValueError(f"positions: got device {positions.device}; allowed: that of x, {x.device}")
        if positions.shape != x.shape[:-2]:
            raise ValueError(f"positions: got shape {tuple(positions.shape)}; allowed: {tuple(x.shape[:-2])}")

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` (..., heads, head_dim) rotated as tokens at ``positions`` (...): a new tensor of the dtype of x.

        A negative position turns the other way: cos and -sin of its absolute value.
        """
        self.check_positions(x, positions)
        last, width = self.cos.shape
        positions = positions.long()
        outside = (positions >= last) | (positions <= -last)
        allowed = f"positions below {last}, the rows of cos and sin, and above {-last}"
        status.report("rotary", outside, "rotary", positions, allowed)
        at = torch.where(outside, 0, positions).abs()
        cos, sin = (t[at].float()[..., None, :] for t in (self.cos, self.sin))
        sin = torch.where((positions < 0)[..., None, None], -sin, sin)
        head, tail = x[..., : 2 * width].float(), x[..., 2 * width :]
        if self.interleaved:
            a, b = head[..., ::2], head[..., 1::2]
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        else:
            a, b = head[..., :width], head[..., width:]
            turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        return torch.cat((turned.to(x.dtype), tail), -1)
