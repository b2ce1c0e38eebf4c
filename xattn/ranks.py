"""The ranks of a process group, and how sharded tensors travel between them: round the ring, or to all and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from . import agreement, settings, validate
from .shards import pieces

KEYS, GRADIENTS = 0, 1  # tags of messages


def _collective(*names: str) -> Any:
    """(output, input, group), by its first name that torch has: they were renamed in 2.13."""
    return next((getattr(dist, name) for name in names if hasattr(dist, name)), None)


_all_gather = _collective("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")


@dataclass(frozen=True)
class Ranks:
    """The calling rank in its group, and the numbers of the group's ranks in the world."""

    group: Any
    rank: int
    world_ranks: tuple[int, ...]

    @staticmethod
    def of(group: Any) -> Ranks:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        group = dist.group.WORLD if group is None else group
        if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
            validate.fail("group", "a group that this rank is no member of", "a group of this rank's")
        if not isinstance(group, dist.ProcessGroup):
            allowed = "a torch.distributed.ProcessGroup (of a DeviceMesh: mesh.get_group()), or None"
            validate.fail("group", type(group).__name__, allowed, TypeError)
        rank = dist.get_rank(group)
        if rank < 0:
            validate.fail("group", "a group that this rank is no member of", "a group of this rank's")
        return Ranks(group, rank, tuple(dist.get_process_group_ranks(group)))

    @property
    def world(self) -> int:
        return len(self.world_ranks)

    def fail(self, error: Exception) -> NoReturn:
        if self.world > 1:
            agreement.tell(self.group, self.rank, error)
        raise error

    def compare(self, said: agreement.Said, device: torch.device) -> None:
        if self.world > 1:
            every_time = device.type == "cpu" or settings.validate_on_device()
            agreement.compare(self.group, self.rank, self.world, said, every_time)


def wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


# ---------------------------------------------------------------- round the ring
def rotation(ranks: Ranks, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(rank, keys, values) of every rank's shard, the own first; the next one comes in meanwhile."""
    own = torch.cat([_bytes(k), _bytes(v)]) if ranks.world > 1 else None
    held: tuple[Tensor, ...] = (k, v)
    for step in range(ranks.world):
        last = step + 1 == ranks.world
        coming = None if last or own is None else pass_on(ranks, own, KEYS)
        yield (ranks.rank - step) % ranks.world, held[0], held[1]
        if coming is not None:
            own = coming()
            size = k.numel() * k.element_size()
            held = tuple(part.view(t.dtype).view(t.shape) for part, t in ((own[:size], k), (own[size:], v)))


def pass_on(ranks: Ranks, sent: Tensor, tag: int) -> Callable[[], Tensor]:
    """Sends to the next rank while it receives from the one before; what it returns waits, and gives what came."""
    if ranks.world == 1:
        return lambda: sent
    came = torch.empty_like(sent)
    after, before = (ranks.world_ranks[(ranks.rank + n) % ranks.world] for n in (1, -1))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, after, ranks.group, tag),
            dist.P2POp(dist.irecv, came, before, ranks.group, tag),
        ]
    )

    def wait(kept: Tensor = sent) -> Tensor:  # what is being sent stays alive
        for work in works:
            work.wait()
        return came

    return wait


def _bytes(t: Tensor) -> Tensor:
    """Any dtype as bytes, which every communication library carries."""
    return t.detach().reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------- to all, and back
class Gather(torch.autograd.Function):
    """(ranks, sharding, dim, shard) -> the whole, in its order."""

    @staticmethod
    def forward(ctx, ranks: Ranks, sharding: str, dim: int, shard: Tensor) -> Tensor:
        ctx.how = ranks, sharding, dim, shard.dtype
        if ranks.world == 1:
            return shard.clone()
        sent = _bytes(shard)
        gathered = sent.new_empty(ranks.world * sent.numel())
        _all_gather(gathered, sent, ranks.group)
        shards = gathered.view(shard.dtype).view(ranks.world, *shard.shape)
        order = sorted(
            (p.start, r, p) for r in range(ranks.world) for p in pieces(sharding, r, ranks.world, shard.shape[dim])
        )
        return torch.cat([shards[r].narrow(dim, p.offset, p.length) for _, r, p in order], dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None, None, ReduceScatter.apply(*ctx.how, grad)


class ReduceScatter(torch.autograd.Function):
    """(ranks, sharding, dim, dtype, whole) -> the sum over the ranks of this rank's shard of it."""

    @staticmethod
    def forward(ctx, ranks: Ranks, sharding: str, dim: int, dtype: torch.dtype, whole: Tensor) -> Tensor:
        ctx.how = ranks, sharding, dim
        if ranks.world == 1:
            return whole.clone()
        seqlen = whole.shape[dim] // ranks.world
        parts = [
            torch.cat(
                [wide(whole.narrow(dim, p.start, p.length)) for p in pieces(sharding, r, ranks.world, seqlen)], dim
            )
            for r in range(ranks.world)
        ]
        total = torch.empty_like(parts[0])
        _reduce_scatter(total.view(-1), torch.cat([p.reshape(-1) for p in parts]), group=ranks.group)
        return total.to(dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None, None, None, Gather.apply(*ctx.how, grad)
