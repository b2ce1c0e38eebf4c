"""What ranks do in tests of data-parallel training: a small model with attention by xattn, trained for two steps."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

HEADS, WIDTH, LAYERS = 2, 16, 2


class Layer(nn.Module):
    """Causal attention with slopes and sinks that are learnt, dense or packed, and what is around it."""

    def __init__(self, packed: bool):
        super().__init__()
        self.packed = packed
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slopes, self.sinks = nn.Parameter(torch.rand(HEADS)), nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        import xattn

        batch, seqlen, _ = x.shape
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        options = {"causal": True, "alibi_slopes": self.slopes, "sinks": self.sinks}
        if self.packed:
            offsets = torch.arange(0, batch * seqlen + 1, seqlen)
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            out = xattn.attention_varlen(q, k, v, offsets, offsets, seqlen, seqlen, **options).unflatten(0, (batch, -1))
        else:
            out = xattn.attention(q, k, v, **options)
        return x + self.mix(out.flatten(2)).tanh()


class Model(nn.Module):
    """``saved``: None, or the checkpoint policy of attention; everything else is computed again."""

    def __init__(self, packed: bool, saved: str | None = None):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(packed) for _ in range(LAYERS))
        self.saved = saved

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.saved is None:
                x = layer(x)
            else:
                policy = functools.partial(_policy, self.saved)
                contexts = functools.partial(create_selective_checkpoint_contexts, policy)
                x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x


def _policy(saved: str, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = op in (torch.ops.xattn.attention.default, torch.ops.xattn.attention_varlen.default)
    return CheckpointPolicy[saved] if ours else CheckpointPolicy.PREFER_RECOMPUTE


def batches(world: int) -> list[Tensor]:
    """The samples of two steps: two for each rank."""
    g = torch.Generator().manual_seed(1)
    return [torch.randn(2 * world, 6, WIDTH, generator=g) for _ in range(2)]


def trained(model: nn.Module, samples: list[Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in samples:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def with_ddp(rank: int, world: int, packed: bool, saved: str | None, static: bool) -> dict[str, Tensor]:
    model = nn.parallel.DistributedDataParallel(Model(packed, saved), static_graph=static, gradient_as_bucket_view=True)
    trained(model, [x.chunk(world)[rank] for x in batches(world)])
    return {n: p.detach().clone() for n, p in model.module.named_parameters()}


def with_fsdp(rank: int, world: int, packed: bool, saved: str | None, reshard: bool) -> dict[str, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    model = Model(packed, saved)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    trained(model, [x.chunk(world)[rank] for x in batches(world)])
    return {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}


def context_parallel_with_ddp(rank: int, world: int) -> dict[str, Tensor]:
    """Each rank holds a shard of every sample, and the gradients of what all hold alike are averaged by DDP."""
    import xattn

    class Sharded(Layer):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
            options = {"causal": True, "alibi_slopes": self.slopes, "sinks": self.sinks}
            return x + self.mix(xattn.context_parallel(q, k, v, **options).flatten(2)).tanh()

    model = Model(packed=False)
    for layer in model.layers:
        layer.__class__ = Sharded
    ddp = nn.parallel.DistributedDataParallel(model)
    assert dist.get_world_size() == world
    # Sequences of 8: an even part for each half of each rank.
    samples = [torch.cat([x, x[:, :2]], 1) for x in batches(world)]
    trained(ddp, [xattn.context_parallel_shard(x) for x in samples])
    return {n: p.detach().clone() for n, p in model.named_parameters()}
