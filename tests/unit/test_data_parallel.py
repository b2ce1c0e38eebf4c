"""Training on two gloo ranks, with DistributedDataParallel and fully_shard, gives what one process gives."""

from __future__ import annotations

import parallel_training
import pytest
import ranks
import torch


@pytest.fixture(scope="module")
def pair():
    started = ranks.Ranks(2)
    started.run(ranks.nothing, limit=120)
    yield started
    started.stop()


def on_one(packed: bool, samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model = parallel_training.Model(packed)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    parallel_training.trained(model, samples)
    after = {n: p.detach() for n, p in model.named_parameters()}
    assert all(not torch.equal(after[n], before[n]) for n in after)  # all are trained
    return after


def same(found: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> None:
    for of_rank in found:
        assert of_rank.keys() == wanted.keys()
        for name, p in wanted.items():
            torch.testing.assert_close(of_rank[name], p, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("how", ["with_ddp", "with_fsdp"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("saved", [None, "MUST_SAVE", "MUST_RECOMPUTE"])
@pytest.mark.parametrize("switch", [False, True], ids=["off", "on"])
def test_as_one_process(pair, how, packed, saved, switch):
    """``switch``: static_graph of DDP, reshard_after_forward of fully_shard."""
    found = pair.run(getattr(parallel_training, how), packed, saved, switch)
    same(found, on_one(packed, parallel_training.batches(2)))


def test_context_parallel_under_ddp(pair):
    samples = [torch.cat([x, x[:, :2]], 1) for x in parallel_training.batches(2)]
    same(pair.run(parallel_training.context_parallel_with_ddp), on_one(False, samples))
