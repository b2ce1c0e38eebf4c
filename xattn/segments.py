"""Cuts a call into segments, groups of sequences in dense form, for code that computes on whole tensors.

A segment looks at the call's tensors as (sequences, rows, heads, head_dim). Where the host knows the lengths (dense
calls, the CPU) that is a view and exact. On a GPU, packed sequences and pages are gathered up to the longest length the
host knows, without reading any value; rows that belong to no sequence go to one spare row behind the packed tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .inputs import Inputs, present

# Set by xattn.batch_invariant(): every sequence is a segment of its own, so that its result does not depend on the
# others.
one_by_one: ContextVar[bool] = ContextVar("xattn_one_by_one", default=False)
traced: list[bool] = []  # the same inside a compiled function, where torch.compile cannot follow a ContextVar


def invariant() -> bool:
    """Whether the caller is within xattn.batch_invariant()."""
    return bool(traced) if torch.compiler.is_compiling() else one_by_one.get()


# Heads of all sequences in one segment on a GPU: beyond a grid's 65535, backward kernels of torch read outside their
# tensors.
_MOST_HEADS = 32768

# Elements of K and V gathered at once, as a multiple of the limit of scores.
_GATHER = 4


def spare_rows(inputs: Inputs) -> int:
    """Rows that a packed result needs behind its end for what belongs to no sequence."""
    return int(inputs.packed and inputs.q.device.type != "cpu")


@dataclass
class Segment:
    """Sequences ``batch`` of a call. Lengths are numbers, or tensors (sequences,) where only the device knows them.

    ``rows_q`` and ``rows_k`` say how to find the rows in a tensor: a slice of sequences (dense), a slice of tokens (one
    packed sequence), or an index (sequences, extent) into tokens. ``pages`` is (page, slot, layout) of every key of a
    paged cache.
    """

    inputs: Inputs
    batch: slice
    extent_q: int
    extent_k: int
    seqlen_q: int | Tensor
    seqlen_k: int | Tensor
    rows_q: slice | Tensor
    rows_k: slice | Tensor | None = None
    pages: tuple[Tensor, Tensor] | None = None
    valid_keys: Tensor | None = None  # (sequences, extent_k): False where a key does not exist
    batch_idx: Tensor = field(init=False)
    _cast: dict[torch.dtype, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch_idx = torch.arange(self.batch.start, self.batch.stop, device=self.inputs.q.device)

    # ---- reading
    def qkv(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """q (sequences, extent_q, heads_q, head_dim), k and v (sequences, extent_k, heads_kv, ...) in ``dtype``."""
        if dtype not in self._cast:
            x = self.inputs
            found = {"q": self.gather_q(x.q), "k": self.gather_k(x.k), "v": self.gather_k(x.v)}
            self._cast[dtype] = {n: t.to(dtype) for n, t in found.items()}
        return self._cast[dtype]

    def gather_q(self, x: Tensor) -> Tensor:
        return self._find(x, self.rows_q)

    def gather_k(self, x: Tensor) -> Tensor:
        if self.pages is None:
            assert self.rows_k is not None
            return self._find(x, self.rows_k)[:, : self.extent_k]
        page, slot = self.pages
        return x[page, :, slot] if self.inputs.kv_layout == "HND" else x[page, slot]

    def rows(self, x: Tensor, rows: slice) -> Tensor:
        """(sequences, rows, heads, width) of a tensor shaped like out."""
        return self.gather_q(x)[:, rows]

    def lse_rows(self, lse: Tensor, rows: slice) -> Tensor:
        """(sequences, heads_q, rows) of a tensor shaped like lse."""
        if not self.inputs.packed:
            return lse[self.batch][:, :, rows]
        return self.gather_q(lse.t()[..., None])[:, rows, :, 0].transpose(1, 2)

    # ---- writing
    def put_rows(self, dst: Tensor, values: Tensor, rows: slice) -> None:
        if isinstance(self.rows_q, Tensor):
            dst[self.rows_q[:, rows]] = values.to(dst.dtype)
        else:
            self.gather_q(dst)[:, rows] = values.to(dst.dtype)

    def put_lse(self, dst: Tensor, values: Tensor, rows: slice) -> None:
        """Values (sequences, heads_q, rows) into a tensor shaped like lse."""
        if not self.inputs.packed:
            dst[self.batch][:, :, rows] = values.to(dst.dtype)
        else:
            self.put_rows(dst.t()[..., None], values.transpose(1, 2)[..., None], rows)

    def add_q(self, dst: Tensor, values: Tensor, rows: slice) -> None:
        if isinstance(self.rows_q, Tensor):  # each row belongs to one sequence and one chunk: nothing to add to
            self.put_rows(dst, values, rows)
        else:
            self.gather_q(dst)[:, rows] += values

    def add_k(self, dst: Tensor, values: Tensor, keys: slice) -> None:
        if isinstance(self.rows_k, Tensor):
            index = self.rows_k[:, keys]
            dst[index] = dst[index] + values.to(dst.dtype)
        else:
            self.gather_k(dst)[:, keys] += values

    # ---- masks
    def tree(self, mask: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """A tree mask (total_q, max_seqlen_q) over the new tokens, as (sequences, 1, rows, keys); older keys are
        visible."""
        if isinstance(self.rows_q, Tensor):
            row = self.rows_q[:, i[:, 0]]
        elif self.inputs.packed:
            row = self.rows_q.start + i[:, 0][None]
        else:
            row = self.batch_idx[:, None] * self.extent_q + i[:, 0]
        length_q, length_k = (
            n[:, None, None, None] if isinstance(n, Tensor) else n for n in (self.seqlen_q, self.seqlen_k)
        )
        token = j - (length_k - length_q)
        columns = token.clamp(0, mask.shape[1] - 1).long()
        return (token < 0) | mask[row.clamp(max=mask.shape[0] - 1)[:, None, :, None], columns]

    def _find(self, x: Tensor, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, Tensor):
            return x[rows.clamp(max=x.shape[0] - 1)] if x.shape[0] else x.new_zeros((*rows.shape, *x.shape[1:]))
        return x[rows][None] if x.dim() == 3 else x[rows]


def segments(inputs: Inputs, limit: int) -> Iterator[Segment]:
    """The segments of a call, each of about ``limit`` scores or one sequence."""
    if inputs.q.shape[-2] == 0 or inputs.batch == 0:
        return
    if inputs.kind == "paged":
        yield from _paged(inputs, limit)
    elif inputs.kind == "varlen":
        yield from _varlen(inputs, limit)
    else:
        yield from _dense(inputs, limit)


def _dense(x: Inputs, limit: int) -> Iterator[Segment]:
    seqlen_q, seqlen_k = x.q.shape[1], x.k.shape[1]
    for batch in _groups(x, limit, seqlen_q, seqlen_k):
        length: int | Tensor = seqlen_k
        valid = None
        if x.seqused_k is not None:
            length = used = x.seqused_k[batch].long().clamp(0, seqlen_k)
            valid = torch.arange(seqlen_k, device=x.q.device) < used[:, None]
        yield Segment(x, batch, seqlen_q, seqlen_k, seqlen_q, length, batch, batch, valid_keys=valid)


def _varlen(x: Inputs, limit: int) -> Iterator[Segment]:
    cu_seqlens_q, cu_seqlens_k = present(x.cu_seqlens_q), present(x.cu_seqlens_k)
    if x.q.device.type == "cpu":
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        used = None if x.seqused_k is None else x.seqused_k.tolist()
        for b in range(x.batch):
            seqlen_k = starts_k[b + 1] - starts_k[b]
            seqlen_k = seqlen_k if used is None else min(used[b], seqlen_k)
            tokens_q = slice(starts_q[b], starts_q[b + 1])
            tokens_k = slice(starts_k[b], starts_k[b] + seqlen_k)
            seqlen_q = tokens_q.stop - tokens_q.start
            yield Segment(x, slice(b, b + 1), seqlen_q, seqlen_k, seqlen_q, seqlen_k, tokens_q, tokens_k)
        return
    for batch in _groups(x, limit, x.max_seqlen_q, x.max_seqlen_k):
        rows_q, seqlen_q = _token_index(cu_seqlens_q, batch, x.max_seqlen_q, x.q.shape[0])
        rows_k, seqlen_k = _token_index(cu_seqlens_k, batch, x.max_seqlen_k, x.k.shape[0])
        if x.seqused_k is not None:
            seqlen_k = torch.minimum(seqlen_k, x.seqused_k[batch].long().clamp(min=0))
        valid = torch.arange(x.max_seqlen_k, device=x.q.device) < seqlen_k[:, None]
        yield Segment(x, batch, x.max_seqlen_q, x.max_seqlen_k, seqlen_q, seqlen_k, rows_q, rows_k, valid_keys=valid)


def _paged(x: Inputs, limit: int) -> Iterator[Segment]:
    on_cpu = x.q.device.type == "cpu"
    page_table, seqlens_k = present(x.page_table), present(x.seqlens_k)
    starts_q = present(x.cu_seqlens_q).tolist() if x.packed and on_cpu else None
    room = page_table.shape[1] * x.page_size
    rows_q: slice | Tensor
    seqlen_q: int | Tensor
    groups = (
        _groups(x, limit, x.seqlen_q, x.seqlen_k) if starts_q is None else (slice(b, b + 1) for b in range(x.batch))
    )
    for batch in groups:
        seqlen_k = seqlens_k[batch].long().clamp(0, room)
        extent_k = int(seqlen_k.max()) if on_cpu else x.seqlen_k
        if starts_q is not None:
            rows_q = slice(starts_q[batch.start], starts_q[batch.stop])
            extent_q = seqlen_q = rows_q.stop - rows_q.start
        elif x.packed:
            rows_q, seqlen_q = _token_index(present(x.cu_seqlens_q), batch, x.max_seqlen_q, x.q.shape[0])
            extent_q = x.max_seqlen_q
        else:
            rows_q, extent_q, seqlen_q = batch, x.q.shape[1], x.q.shape[1]
        position = torch.arange(extent_k, device=x.q.device)
        page = page_table[batch].long()[:, position // x.page_size]
        valid = (position < seqlen_k[:, None]) & (page >= 0) & (page < x.k.shape[0])
        pages = (torch.where(valid, page, 0), (position % x.page_size).expand_as(page))
        if not x.k.shape[0]:
            pages, extent_k, valid = (pages[0][:, :0], pages[1][:, :0]), 0, valid[:, :0]
        if on_cpu and bool(valid.all()):  # one length for all, known to the host
            yield Segment(x, batch, extent_q, extent_k, seqlen_q, extent_k, rows_q, pages=pages)
        else:
            yield Segment(x, batch, extent_q, extent_k, seqlen_q, seqlen_k, rows_q, pages=pages, valid_keys=valid)


def _groups(x: Inputs, limit: int, seqlen_q: int, seqlen_k: int) -> Iterator[slice]:
    scores = max(1, x.num_heads_q * seqlen_q * seqlen_k)
    elements = max(1, seqlen_k * x.num_heads_kv * (x.head_dim + x.head_dim_v))
    most = x.batch if x.q.device.type == "cpu" else _MOST_HEADS // x.num_heads_q
    alone = x.batch_invariant or one_by_one.get()
    size = 1 if alone else max(1, min(limit // scores, _GATHER * limit // elements, most, x.batch))
    for start in range(0, x.batch, size):
        yield slice(start, min(start + size, x.batch))


def _token_index(cu_seqlens: Tensor, batch: slice, longest: int, total: int) -> tuple[Tensor, Tensor]:
    """(index (sequences, longest) of each token, ``total`` where there is none; lengths (sequences,)), whatever the
    values are."""
    ends = cu_seqlens.long().clamp(0, total)
    start, length = ends[batch], (ends[1:] - ends[:-1])[batch].clamp(0, longest)
    position = torch.arange(longest, device=cu_seqlens.device)
    return torch.where(position < length[:, None], start[:, None] + position, total), length
