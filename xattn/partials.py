"""What one rank computes in context parallelism: its queries against some shard of keys, as calls of ``attention``
whose results are merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import api
from .agreement import Said
from .inputs import present
from .ranks import Ranks, wide
from .shards import Block, Piece, blocks, pieces, row_groups


@dataclass
class Call:
    """One call without its tensors. ``numbers``: options as they are passed on; ``names``: of the tensors behind q, k,
    v, before those that user functions capture."""

    ranks: Ranks
    sharding: str
    seqlens: tuple[int, int]
    left: int | None
    right: int | None
    numbers: dict[str, Any]
    functions: dict[str, Callable[..., Any]]
    captured: tuple[Tensor, ...]
    alibi: bool
    return_lse: bool
    invariant: bool
    dtype_out: torch.dtype
    said: Said
    names: tuple[str, ...] = ()

    @cached_property
    def apart(self) -> bool:
        return self.alibi or self.numbers["dropout_p"] > 0 or bool(self.functions)

    @property
    def shift(self) -> int:
        """seqlen_k - seqlen_q of the whole."""
        return self.ranks.world * (self.seqlens[1] - self.seqlens[0])

    def blocks(self, owner: int | None) -> list[Block]:
        """This rank's queries against the keys of ``owner``, or against all of them, in order."""
        world, (seqlen_q, seqlen_k) = self.ranks.world, self.seqlens
        queries = pieces(self.sharding, self.ranks.rank, world, seqlen_q)
        keys = (Piece(0, world * seqlen_k),) if owner is None else pieces(self.sharding, owner, world, seqlen_k)
        return blocks(queries, keys, self.shift, self.left, self.right, self.apart)


def members_of(
    call: Call, found: list[Block], seqlen: int, own: bool, sinks: bool
) -> list[tuple[slice, list[Block], Block | None]]:
    """(rows, their blocks, which of these takes the sinks), of the rows that see a key, with ``own`` of all. A block
    without keys makes up what is missing: rows that see none, sinks that no block can take; so autograd knows of q, k
    and v on every rank."""
    result = []
    for rows, members in row_groups(found, seqlen):
        if not members and not own:
            continue
        lone = Block(rows, slice(0, 0), call.shift, 0)
        taker = None
        if own and sinks:
            taker = next((b for b in members if b.rows == rows and not (b.side and call.alibi)), lone)
        needed = [*members, lone] if not members or taker is lone else members
        result.append((rows, needed, taker))
    return result


def partials(
    call: Call,
    found: list[Block],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: dict[str, Tensor],
    own: bool,
    with_lse: bool = True,
) -> list[tuple[slice, Tensor, Tensor | None]]:
    """(rows, out, lse) of the rows that see some of these keys, differentiable; out of wider dtype where it was merged.
    ``own``: of all rows, and with the sinks, which one part of the keys must have."""
    results = []
    sinks = tensors.get("sinks")
    for rows, members, taker in members_of(call, found, q.shape[1], own, sinks is not None):
        states: list[Any] = []
        for block in members:
            needs_lse = with_lse or len(members) > 1
            out, lse = _attend(call, block, q, k, v, tensors, sinks if block is taker else None, needs_lse)
            before, behind = block.rows.start - rows.start, rows.stop - block.rows.stop
            if before or behind:
                out = F.pad(out, (0, 0, 0, 0, before, behind))
                lse = F.pad(present(lse), (before, behind), value=-torch.inf)
            states.append((out, lse))
        if len(states) > 1:
            outs, lses = zip(*states, strict=True)
            states = [api.merge_states([wide(o) for o in outs], lses)]
        results.append((rows, *states[0]))
    return results


def _attend(
    call: Call,
    block: Block,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: dict[str, Tensor],
    sinks: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    options, level = options_of(call, block, q, tensors)
    rows, keys = block.rows, block.keys
    result = api.attention(q[:, rows], k[:, keys], v[:, keys], sinks=sinks, return_lse=with_lse, **options)
    if not isinstance(result, tuple):
        return result, None
    return result[0], result[1] if level is None else result[1] + level


def options_of(call: Call, block: Block, q: Tensor, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor | None]:
    """The options of a block's call, and what its lse lacks."""
    options = call.numbers | {"causal": block.causal, "window": block.window}
    options |= {n: tensors[n] for n in ("q_scale", "k_scale", "v_scale") if n in tensors}
    level = None
    if call.alibi and block.side:
        options["attn_mask"], level = _distances(tensors["alibi_slopes"], block)
    elif call.alibi:
        options["alibi_slopes"] = tensors["alibi_slopes"]

    def number(n: int) -> Tensor:  # by a kernel, not by a copy that the host waits for
        return torch.full((), n, dtype=torch.int64, device=q.device)

    starts = (block.q_start - call.shift, block.k_start)
    if call.numbers["dropout_p"]:
        options["dropout_rng"] = torch.cat([tensors["dropout_rng"], *(number(n)[None] for n in starts)])
    for role, fn in call.functions.items():
        options[role] = _moved(role, fn, *map(number, starts))
    return options, level


def _distances(slopes: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """ALiBi where keys are all on one side of their queries: -slope * |i - j| is a sum of a part of the key, an added
    mask (1 or batch, heads_q, 1, keys), and one of the query (1 or batch, heads_q, rows), which only shifts its lse."""
    slopes = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
    slopes = slopes[None, :, None] if slopes.dim() == 1 else slopes[..., None]
    num_rows, num_keys = (s.stop - s.start for s in (block.rows, block.keys))
    i = torch.arange(num_rows, device=slopes.device) + block.q_start
    j = torch.arange(num_keys, device=slopes.device) + block.k_start
    nearest = block.k_start + num_keys - 1 if block.side < 0 else block.k_start
    of_key, of_query = (slopes * (-block.side * (at - nearest)) for at in (j, i))
    return of_key[..., None, :], -of_query.float()


def _moved(role: str, fn: Callable[..., Any], q_start: Tensor, k_start: Tensor) -> Callable[..., Any]:
    """A user's function for a part of the sequence."""
    if role == "mask_mod":
        return lambda b, h, q_idx, kv_idx: fn(b, h, q_idx + q_start, kv_idx + k_start)
    return lambda s, b, h, q_idx, kv_idx: fn(s, b, h, q_idx + q_start, kv_idx + k_start)
