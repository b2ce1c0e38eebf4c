"""Cuts a call into chunks (some rows of a segment and the keys they can see) and drives a function over them.

``forward``, ``backward`` and ``double_backward`` take ``attend(inputs, chunk, tensors) -> (out rows, lse)``, the
meaning of one chunk in differentiable torch operations, and the dtype it computes in. Derivatives come from
torch.func.vjp, which works wherever an op's kernel may run (below autograd, under compiled code).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import masks
from .concurrency import transforms_enabled
from .inputs import Inputs
from .segments import Segment, segments, spare_rows

_vjp: Callable[..., Any] = torch.func.vjp
Attend = Callable[[Inputs, "Chunk", dict[str, Tensor]], tuple[Tensor, Tensor]]


def forward(
    inputs: Inputs, attend: Attend, dtype: torch.dtype, limit: int, with_lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """(out, lse): shapes ``inputs.out_shape`` and ``inputs.lse_shape``, dtypes ``inputs.dtype_out`` and float32."""
    spare = spare_rows(inputs)
    (rows, *width), (*heads, columns) = inputs.out_shape, inputs.lse_shape
    out = torch.zeros((rows + spare, *width), dtype=inputs.dtype_out, device=inputs.q.device)
    lse = None
    if with_lse:
        lse = torch.full((*heads, columns + spare), -math.inf, dtype=torch.float32, device=inputs.q.device)
    for chunk in chunks(inputs, limit):
        o, row_lse = attend(inputs, chunk, chunk.leaves(inputs, dtype))
        chunk.segment.put_rows(out, o, chunk.rows)
        if lse is not None:
            chunk.segment.put_lse(lse, row_lse, chunk.rows)
    return _without(spare, out), None if lse is None else _without_columns(spare, lse)


def backward(
    inputs: Inputs,
    attend: Attend,
    dtype: torch.dtype,
    limit: int,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: list[bool],
) -> list[Tensor]:
    """Gradients of the tensors that ``inputs.differentiable()`` lists and ``wanted`` marks, in that order."""
    total = _Accumulator(inputs, wanted, dtype)
    for chunk in chunks(inputs, limit):
        leaves = chunk.leaves(inputs, dtype)
        names = [n for n in leaves if total.wants(n)]

        def call(*values, leaves=leaves, names=names, chunk=chunk):
            return attend(inputs, chunk, {**leaves, **dict(zip(names, values, strict=True))})

        with transforms_enabled():
            (o, lse), pull = _vjp(call, *(leaves[n] for n in names))
            grads = pull((chunk.segment.rows(dout, chunk.rows).to(o.dtype), chunk.lse_grad(dlse, lse)))
        total.add(chunk, dict(zip(names, grads, strict=True)))
    return total.finish()


def double_backward(
    inputs: Inputs,
    attend: Attend,
    dtype: torch.dtype,
    limit: int,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: list[bool],
    grads_of_grads: list[Tensor | None],
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Gradients of ``backward`` with respect to dout, dlse and every differentiable tensor, given those of its
    results."""
    pairs = inputs.differentiable()
    total = _Accumulator(inputs, [t is not None and t.is_floating_point() for _, t in pairs], dtype)
    seeds = _named(pairs, wanted, grads_of_grads)
    spare = spare_rows(inputs)
    (n, *width), (*heads, columns) = inputs.out_shape, inputs.lse_shape
    d_dout = torch.zeros((n + spare, *width), dtype=total.dtype, device=dout.device)
    d_dlse = torch.zeros((*heads, columns + spare), dtype=total.dtype, device=dout.device)
    for chunk in chunks(inputs, limit):
        leaves = chunk.leaves(inputs, dtype)
        names, seeded = list(leaves), [n for n in leaves if n in seeds]
        rows = chunk.segment.rows(dout, chunk.rows).to(d_dout.dtype)

        def first_order(do, dl, *values, leaves=leaves, names=names, seeded=seeded, chunk=chunk):
            current = {**leaves, **dict(zip(names, values, strict=True))}

            def call(*inner):
                return attend(inputs, chunk, {**current, **dict(zip(seeded, inner, strict=True))})

            _, pull = _vjp(call, *(current[n] for n in seeded))
            return pull((do, dl))

        l_grad = chunk.lse_grad(dlse, torch.empty(chunk.lse_shape(inputs), dtype=d_dout.dtype, device=dout.device))
        seed_slices = chunk.seeds(seeds, total.dtype)
        with transforms_enabled():
            _, pull = _vjp(first_order, rows, l_grad, *(leaves[n] for n in names))
            do2, dl2, *grads = pull(tuple(seed_slices[n] for n in seeded))
        chunk.segment.put_rows(d_dout, do2, chunk.rows)
        chunk.segment.put_lse(d_dlse, dl2, chunk.rows)
        total.add(chunk, dict(zip(names, grads, strict=True)))
    grads = iter(total.finish())
    d_lse = None if dlse is None else _without_columns(spare, d_dlse).to(dlse.dtype)
    return _without(spare, d_dout).to(dout.dtype), d_lse, [next(grads) if w else None for w in total.wanted]


@dataclass(frozen=True)
class Chunk:
    """Some rows of a segment, and the keys that they can see."""

    segment: Segment
    rows: slice
    keys: slice

    def leaves(self, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
        """What this work reads of every differentiable tensor, in the dtype of the computation."""
        others = {n: t for n, t in _flat(inputs).items() if t.is_floating_point() and n not in ("q", "k", "v")}
        return {n: t.to(dtype) for n, t in self.slices({**self.segment.qkv(dtype), **others}).items()}

    def seeds(self, seeds: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The same of given tensors shaped like the arguments they are named after."""
        gather = {"q": self.segment.gather_q, "k": self.segment.gather_k, "v": self.segment.gather_k}
        found = {n: gather[n](t) if n in gather else t for n, t in seeds.items()}
        return {n: t.to(dtype) for n, t in self.slices(found).items()}

    def slices(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of each tensor that this work reads: a view."""
        batch = self.segment.batch
        cut = {}
        for name, t in tensors.items():
            if name == "q":
                t = t[:, self.rows]
            elif name in ("k", "v"):
                t = t[:, self.keys]
            elif name == "attn_mask":
                t = _slice_mask(t, batch, self.rows, self.keys)
            elif name in ("q_scale", "k_scale", "v_scale", "alibi_slopes") and t.dim() == 2:
                t = t[batch]
            cut[name] = t
        return cut

    def bool_mask(self, inputs: Inputs, i: Tensor, j: Tensor) -> Tensor | None:
        mask = inputs.attn_mask
        if mask is None or mask.dtype != torch.bool:
            return None
        if inputs.kind == "paged":
            return self.segment.tree(mask, i, j)
        return _slice_mask(to_4d(mask), self.segment.batch, self.rows, self.keys)

    def lse_shape(self, inputs: Inputs) -> tuple[int, int, int]:
        return (self.segment.batch_idx.shape[0], inputs.num_heads_q, self.rows.stop - self.rows.start)

    def lse_grad(self, dlse: Tensor | None, lse: Tensor) -> Tensor:
        return torch.zeros_like(lse) if dlse is None else self.segment.lse_rows(dlse, self.rows).to(lse.dtype)


def chunks(inputs: Inputs, limit: int) -> Iterator[Chunk]:
    """Chunks of about ``limit`` scores, at least one row."""
    for segment in segments(inputs, limit):
        seqlen_q, seqlen_k = segment.extent_q, segment.extent_k
        row_cost = max(1, segment.batch_idx.shape[0] * inputs.num_heads_q * max(seqlen_k, 1))
        step = max(1, min(seqlen_q, limit // row_cost))
        for i0 in range(0, seqlen_q, step):
            i1 = min(i0 + step, seqlen_q)
            keys = (0, seqlen_k)
            if isinstance(segment.seqlen_q, int) and isinstance(segment.seqlen_k, int):
                keys = masks.key_range(
                    i0, i1, seqlen_q, seqlen_k, inputs.causal, inputs.window_left, inputs.window_right
                )
            yield Chunk(segment, slice(i0, i1), slice(*keys))


class _Accumulator:
    """Sums the gradients of chunks: whole tensors in the computation's dtype, cast to that of the argument at the
    end."""

    def __init__(self, inputs: Inputs, wanted: list[bool], dtype: torch.dtype):
        self.wanted, self.pairs = wanted, inputs.differentiable()
        self.dtype = torch.promote_types(dtype, torch.float32)
        names = _names(self.pairs)
        self.spare = spare = spare_rows(inputs)
        self.sums: dict[str, Tensor] = {}
        for name, (_, t), w in zip(names, self.pairs, wanted, strict=True):
            if w and t is not None:
                shape = tuple(to_4d(t).shape if name == "attn_mask" else t.shape)
                if name in ("q", "k", "v"):
                    shape = (shape[0] + spare, *shape[1:])
                self.sums[name] = torch.zeros(shape, dtype=self.dtype, device=t.device)

    def wants(self, name: str) -> bool:
        return name in self.sums

    def add(self, chunk: Chunk, grads: dict[str, Tensor]) -> None:
        for name, grad in grads.items():
            if name not in self.sums:
                continue
            if name in ("q", "k", "v"):
                put = chunk.segment.add_q if name == "q" else chunk.segment.add_k
                put(self.sums[name], grad, chunk.rows if name == "q" else chunk.keys)
            else:
                chunk.slices({name: self.sums[name]})[name].add_(grad)

    def finish(self) -> list[Tensor]:
        result = []
        for name, (_, t) in zip(_names(self.pairs), self.pairs, strict=True):
            if name in self.sums and t is not None:
                total = self.sums[name]
                total = _without(self.spare, total) if name in ("q", "k", "v") else total.resize_(t.shape)
                result.append(total.to(t.dtype))
        return result


def _without(spare: int, t: Tensor) -> Tensor:
    """A contiguous tensor without its spare rows; in place, since autograd lets nobody write to a view."""
    return t.resize_((t.shape[0] - spare, *t.shape[1:])) if spare else t


def _without_columns(spare: int, t: Tensor) -> Tensor:
    return t[..., :-spare].contiguous() if spare else t


def _names(pairs: list[tuple[str, Tensor | None]]) -> list[str]:
    """Names that tell aux tensors apart."""
    seen: dict[str, int] = {}
    names = []
    for name, _ in pairs:
        number = seen.get(name, 0)
        seen[name] = number + 1
        names.append(f"{name}{number}" if name.endswith("_aux") else name)
    return names


def _flat(inputs: Inputs) -> dict[str, Tensor]:
    pairs = inputs.differentiable()
    found = {n: t for n, (_, t) in zip(_names(pairs), pairs, strict=True) if t is not None}
    if "attn_mask" in found:
        found["attn_mask"] = to_4d(found["attn_mask"])
    return found


def _named(pairs, wanted: list[bool], values: list[Tensor | None]) -> dict[str, Tensor]:
    """The given values by name; ``values`` has one entry for each wanted pair."""
    names = [n for n, w in zip(_names(pairs), wanted, strict=True) if w]
    found = {n: v for n, v in zip(names, values, strict=True) if v is not None}
    if "attn_mask" in found:
        found["attn_mask"] = to_4d(found["attn_mask"])
    return found


def to_4d(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape)


def _slice_mask(mask: Tensor, batch: slice, rows: slice, keys: slice) -> Tensor:
    """(batch, heads, rows, keys) of a mask with broadcast dimensions: those of size 1 stay."""
    for dim, part in ((0, batch), (2, rows), (3, keys)):
        if mask.shape[dim] != 1:
            mask = mask[(slice(None),) * dim + (part,)]
    return mask
