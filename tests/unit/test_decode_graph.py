"""DecodeGraph of compat.transformers, with operations that are recorded and replayed in a graph's stead."""

from __future__ import annotations

from typing import Any

import pytest
import recorded
import torch
from unit.test_compat_transformers import MODELS, SIZES, cache_name, forward, paged

from xattn.compat import transformers as compat
from xattn.compat.transformers import DecodeGraph
from xattn.errors import UnsupportedError

TOKENS = torch.randint(3, SIZES["vocab_size"], (3, 40), generator=torch.Generator().manual_seed(3))
FIRST = 12  # tokens of the prompts


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    compat.register()


def made(name: str) -> Any:
    torch.manual_seed(11)
    return MODELS[name]().eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return made("llama")


@pytest.fixture
def captures(monkeypatch) -> list[torch.device]:
    """What was captured; each is a run of the model's Python."""
    found = []

    def capture(run, device):
        found.append(device)
        return recorded.capture(run, device)

    monkeypatch.setattr("xattn.compat.transformers_graph._cuda_graph", capture)
    return found


def started(model: Any, rows: int = 3, **options: Any) -> Any:
    """A cache that holds the prompts."""
    cache = paged(model, **options)
    forward(model, "xattn", TOKENS[:rows, :FIRST], cache=cache)
    return cache


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_steps_equal_eager(captures, name, kv_layout):
    """Across pages, and out of the window."""
    model = made(name)
    want = forward(model, "eager", TOKENS[:, :32])
    graph = DecodeGraph(model, started(model, kv_layout=kv_layout), max_length=32)
    graph.capture()
    for n in range(FIRST, 32):
        same(graph(TOKENS[:, n]), want[:, n])
    assert len(captures) == 1
    with pytest.raises(ValueError, match="max_length: got 32; allowed: above the 32 tokens that there are"):
        graph(TOKENS[:, 32])


def test_the_model_may_be_called_between_steps(llama, captures):
    """And the cache cropped, and rows exchanged; where the batch is another, the step is captured anew."""
    want = forward(llama, "eager", TOKENS)
    cache = started(llama)
    graph = DecodeGraph(llama, cache, max_length=40)
    for n in range(FIRST, 16):
        same(graph(TOKENS[:, n]), want[:, n])
    same(forward(llama, "xattn", TOKENS[:, 16:21], cache=cache), want[:, 16:21])
    same(graph(TOKENS[:, 21]), want[:, 21])
    cache.crop(-9)
    assert cache.get_seq_length() == 13
    for n in range(13, 16):
        same(graph(TOKENS[:, n]), want[:, n])
    order = torch.tensor([2, 0, 1])
    cache.reorder_cache(order)
    same(graph(TOKENS[order, 16]), want[order, 16])
    assert len(captures) == 1
    cache.batch_select_indices(torch.tensor([1]))  # which was row 0
    same(graph(TOKENS[:1, 17]), want[:1, 17])
    assert len(captures) == 2
    with pytest.raises(ValueError, match=r"tokens: got shape \(3,\); allowed: \(1,\)"):
        graph(TOKENS[:, 18])
    same(graph(TOKENS[:1, 18]), want[:1, 18])


def test_a_step_that_was_got_ready_and_not_taken(llama, captures):
    cache = started(llama)
    graph = DecodeGraph(llama, cache, max_length=40)
    graph.capture()
    assert cache.get_seq_length() == FIRST and cache.pages.lengths([0]) == [FIRST]
    cache.crop(10)
    want = forward(llama, "eager", TOKENS)
    for n in range(10, 14):
        same(graph(TOKENS[:, n]), want[:, n])


def test_what_cannot_be_captured(llama):
    with pytest.raises(UnsupportedError, match="without tokens"):
        DecodeGraph(llama, paged(llama), max_length=40).capture()
    with pytest.raises(UnsupportedError, match="got a model on cpu"):
        DecodeGraph(llama, started(llama), max_length=40).capture()
    mask = torch.ones(3, FIRST, dtype=torch.int64)
    mask[0, :4] = 0
    cache = paged(llama)
    forward(llama, "xattn", TOKENS[:, :FIRST], mask, cache=cache)
    with pytest.raises(UnsupportedError, match="padding"):
        DecodeGraph(llama, cache, max_length=40).capture()
    assert cache_name(llama) == DecodeGraph(llama, cache, 40)._cache_name
