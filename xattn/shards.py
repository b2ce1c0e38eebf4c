"""How a sequence is shared out among the ranks of a group, and what one shard's queries see of another's keys, as
attention calls. Numbers only.

Positions are counted on the keys' axis: query i stands at i + seqlen_k - seqlen_q, as in every other call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

SHARDINGS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Piece:
    """``length`` neighbours of the sequence from ``start`` on, which lie from ``offset`` on in a shard."""

    start: int
    length: int
    offset: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length

    def cut(self, start: int, end: int) -> Piece:
        """The part that lies in [start, end)."""
        first, last = max(start, self.start), min(end, self.end)
        return Piece(first, max(0, last - first), self.offset + first - self.start)


def pieces(sharding: str, rank: int, world: int, seqlen: int) -> tuple[Piece, ...]:
    """A rank's shard of ``seqlen`` tokens. "contiguous": the rank-th of ``world`` parts. "zigzag": parts ``rank`` and
    2 * world - 1 - rank of 2 * world, so that under a causal mask every rank has as many scores (Zhu,
    "ring-flash-attention", 2024; Llama 3, 2024, section 3.3.2)."""
    if sharding == "contiguous":
        return (Piece(rank * seqlen, seqlen),)
    half = seqlen // 2
    if rank == world - 1:  # its two parts are neighbours
        return (Piece(rank * half, seqlen),)
    return Piece(rank * half, half), Piece((2 * world - 1 - rank) * half, half, half)


@dataclass(frozen=True)
class Block:
    """Queries ``rows`` of one shard against ``keys`` of another, as one call: ``causal`` and ``window`` are aligned to
    the last of both, as calls align them.

    ``q_start``, ``k_start``: positions of the first query and key on the keys' axis. ``side``: where the keys are by
    distance: -1 none behind its query, 1 none before it, 0 mixed, and then the last query and the last key stand at one
    position.
    """

    rows: slice
    keys: slice
    q_start: int
    k_start: int
    causal: bool = False
    left: int | None = None
    right: int | None = None
    side: int = 0

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        return None if self.left is None and self.right is None else (self.left, self.right)

    @property
    def whole(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.window is None


def blocks(
    queries: Iterable[Piece],
    keys: Iterable[Piece],
    shift: int,
    left: int | None,
    right: int | None,
    apart: bool = False,
) -> list[Block]:
    """The calls that answer queries against keys under a window (``right`` 0 where causal). ``shift``: seqlen_k -
    seqlen_q of the whole. ``apart``: positions count in the scores, so that pieces stay for themselves, and are cut
    where a key passes its query."""
    found = []
    for q in queries:
        at = replace(q, start=q.start + shift)
        for k in keys:
            parts = _by_side(at, k) if apart else [(at, k, 0)]
            found += [b for a, c, side in parts if (b := _block(a, c, left, right, side)) is not None]
    return found if apart else _joined(found)


def row_groups(found: Iterable[Block], seqlen: int) -> list[tuple[slice, list[Block]]]:
    """Blocks by the rows they have in common, in order; rows of no block are a group without one."""
    groups: list[tuple[slice, list[Block]]] = []
    stop = 0
    for block in sorted(found, key=lambda b: b.rows.start):
        if block.rows.start > stop:
            groups.append((slice(stop, block.rows.start), []))
        if groups and groups[-1][1] and block.rows.start < stop:
            rows, members = groups.pop()
            groups.append((slice(rows.start, max(stop, block.rows.stop)), [*members, block]))
        else:
            groups.append((block.rows, [block]))
        stop = groups[-1][0].stop
    return [*groups, (slice(stop, seqlen), [])] if stop < seqlen or not groups else groups


def _by_side(q: Piece, k: Piece) -> list[tuple[Piece, Piece, int]]:
    """The pair cut such that keys are before their queries, behind them, or both with one end."""
    if k.end <= q.start + 1:
        return [(q, k, -1)]
    if k.start >= q.end - 1:
        return [(q, k, 1)]
    end = min(q.end, k.end)
    parts = [(q.cut(q.start, end), k.cut(k.start, end), 0)]
    if q.end > end:
        parts.append((q.cut(end, q.end), k, -1))
    if k.end > end:
        parts.append((q, k.cut(end, k.end), 1))
    return parts


def _block(q: Piece, k: Piece, left: int | None, right: int | None, side: int) -> Block | None:
    """The pair without the queries and keys that see and are seen by none; None where nothing is left."""
    i0, i1, j0, j1 = q.start, q.end, k.start, k.end
    if right is not None:
        i0, j1 = max(i0, j0 - right), min(j1, i1 + right)
    if left is not None:
        i1, j0 = min(i1, j1 + left), max(j0, i0 - left)
    if i0 >= i1 or j0 >= j1:
        return None
    ahead = i1 - j1  # of the call's own diagonal; the cuts above leave no distance below 0
    left = None if left is None or i1 - 1 - left <= j0 else left - ahead
    right = None if right is None or i0 + right >= j1 - 1 else right + ahead
    rows, keys = slice(i0, i1), slice(j0, j1)
    rows, keys = (_in_shard(s, p) for s, p in ((rows, q), (keys, k)))
    causal = right == 0
    return Block(rows, keys, i0, j0, causal, left, None if causal else right, side)


def _in_shard(positions: slice, piece: Piece) -> slice:
    first = piece.offset - piece.start
    return slice(positions.start + first, positions.stop + first)


def _joined(found: list[Block]) -> list[Block]:
    """Neighbours that one call answers as well."""
    done: list[Block] = []
    for block in found:
        while done and (one := _join(done[-1], block)) is not None:
            block = one
            done.pop()
        done.append(block)
    return done


def _join(a: Block, b: Block) -> Block | None:
    same_keys, same_rows = a.keys == b.keys, a.rows == b.rows
    if same_keys and a.rows.stop == b.rows.start and a.whole and b.whole:
        return replace(a, rows=slice(a.rows.start, b.rows.stop))
    if same_rows and a.keys.stop == b.keys.start and a.whole and b.left is None:
        return replace(b, keys=slice(a.keys.start, b.keys.stop))
    return None
