"""What only a GPU can show of swapping: copies beside other work, events in the right order, and their speed."""

from __future__ import annotations

import time

import pytest
import torch

import xattn
from xattn import transfers

CUDA = torch.device("cuda")
SLEEP = 500_000_000  # cycles, some tenths of a second: a copy comes that late


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def late(monkeypatch):
    """Copies begin late, so that work which does not wait for them comes first."""
    queue = transfers.Streams.queue

    def slowly(self, work, tensors):
        def later():
            torch.cuda._sleep(SLEEP)
            work()

        queue(self, later, tensors)

    monkeypatch.setattr(transfers.Streams, "queue", slowly)


def new_tokens(cache, batch, n, seed):
    generator = torch.Generator(CUDA).manual_seed(seed)
    heads = cache.k.shape[3 if cache.kv_layout == "NHD" else 2]
    shape = (cache.num_layers, batch, n, heads, cache.k.shape[-1])
    return [torch.randn(shape, generator=generator, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]


def step(cache, ids, n, seed):
    """One step of a model without weights: tokens are appended, and each layer attends to all of them."""
    cache.reserve(ids, n)
    k, v = new_tokens(cache, len(ids), n, seed)
    outs = []
    for layer in range(cache.num_layers):
        cache.append(layer, k[layer], v[layer])
        q = k[layer].repeat_interleave(2, 2)
        table, lengths, kw = cache.page_table, cache.seqlens_k + n, {"causal": True, "kv_layout": cache.kv_layout}
        scales = {"k_scale": 1.0, "v_scale": 1.0} if cache.dtype.itemsize == 1 else {}
        outs.append(xattn.attention_paged(q, *cache.layer(layer), table, lengths, backend="reference", **kw, **scales))
    cache.advance(ids, n)
    return torch.stack(outs)


def made(num_pages, layout="NHD", dtype=torch.bfloat16):
    cache = xattn.PagedKVCache(num_pages, 16, 2, 2, 64, dtype=dtype, device=CUDA, kv_layout=layout)
    for t in (cache.k, cache.v):
        t.view(torch.uint8).fill_(0x7F)  # NaN in fp8, a large number in bf16
    torch.cuda.synchronize()  # for other streams
    return cache


def story(cache, swap):
    """``b`` is decoded all the time; ``a`` leaves, ``c`` takes its pages, and ``a`` comes back behind ``c``."""
    outs = [step(cache, ["a"], 40, 1), step(cache, ["b"], 20, 2)]
    if swap:
        cache.swap_out(["a"])
    outs += [step(cache, ["b"], 1, 10 + i) for i in range(6)]
    outs.append(step(cache, ["c"], 45, 3))
    if swap:
        cache.free(["c"])
        cache.swap_in(["a"])
    return outs + [step(cache, ["b", "a"], 1, 20 + i) for i in range(4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_content_survives_and_others_are_unaffected(late, layout, dtype):
    wanted = story(made(16, layout, dtype), swap=False)
    for got, want in zip(story(made(5, layout, dtype), swap=True), wanted, strict=True):
        assert torch.equal(got, want)


def test_others_are_decoded_while_pages_are_saved(late, monkeypatch):
    cache = made(16)
    step(cache, ["a", "b"], 40, 1)
    cache.swap_out(["a"])  # what is loaded at its first use may wait for the device
    step(cache, ["b"], 1, 3)
    cache.swap_in(["a"])
    torch.cuda.synchronize()
    monkeypatch.setitem(globals(), "SLEEP", 10 * SLEEP)  # other tests may run beside this one
    cache.swap_out(["a"])
    (*_, copy) = cache._transfers._flying
    assert not copy.done.query(), "the host waited for the copy"
    step(cache, ["b"], 1, 2)
    torch.cuda.current_stream().synchronize()
    assert not copy.done.query(), "decoding waited for the copy"
    torch.cuda.synchronize()
    assert copy.done.query()


def test_no_swap_synchronises(late, unsynchronised):
    cache = made(16)
    step(cache, ["a", "b"], 40, 1)
    cache.swap_out(["a"])
    cache.swap_in(["a"])
    with unsynchronised():
        cache.swap_out(["a"])
        cache.swap_in(["a"])
        (_, back) = cache._transfers._flying
        assert not back.done.query()


def test_another_stream_and_a_cache_that_goes_first(late):
    cache, streams = made(3), [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(streams[0]):
        step(cache, ["a"], 48, 1)
        pages = list(cache._pool.sequences["a"].pages)
        wanted = cache.k[:, pages].clone()
        cache.swap_out(["a"])
        cache.reserve(["c"], 40)
    streams[1].wait_stream(streams[0])
    with torch.cuda.stream(streams[1]):
        step(cache, ["c"], 40, 2)
        cache.free(["c"])
        cache.swap_in(["a"])
        pages = list(cache._pool.sequences["a"].pages)
        got = cache.k[:, pages].clone()
        cache.swap_out(["a"])
    saved, shape = cache._pool.sequences["a"].host[0], cache.k.shape
    del cache  # memory that is still being read; it may be asked for by others
    noise = [torch.full(shape, 7.0, device=CUDA, dtype=torch.bfloat16) for _ in range(8)]
    torch.cuda.synchronize()
    assert torch.equal(got, wanted) and len(noise) == 8
    assert torch.equal(saved.view(torch.bfloat16), wanted.flatten(2).cpu())


def test_a_graph_is_replayed_after_its_pages_were_swapped(late):
    cache = made(8)
    step(cache, ["a", "b"], 20, 1)
    cache.preallocate(2, 64)
    k, v = new_tokens(cache, 1, 1, 5)
    cache.reserve(["b"], 1)
    cache.append(0, k[0], v[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        cache.append(0, k[0], v[0])
    cache.swap_out(["a"])
    cache.free(["b"])
    for n, key in enumerate(("c", "d", "e")):  # three pages each: they reach those being saved
        cache.reserve([key], 33 if n < 2 else 1)
        graph.replay()
        cache.advance([key], 1)
    torch.cuda.synchronize()
    cache.free(["c", "d", "e"])
    cache.swap_in(["a"])
    wanted = made(8)
    wanted.preallocate(2, 64)
    step(wanted, ["a", "b"], 20, 1)
    assert torch.equal(step(cache, ["a"], 1, 9), step(wanted, ["a"], 1, 9))


def seconds(work, rounds=5):
    """The best of some rounds, the device included; the first round is not counted."""
    best = float("inf")
    for n in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = best if n == 0 else min(best, time.perf_counter() - start)
    return best


def test_swapping_a_gib_timed(record_property):
    """At least 0.8 of the speed of a plain copy of as many bytes to and from pinned memory."""
    size = 1 << 30
    cache = xattn.PagedKVCache(1100, 16, 16, 8, 128, device=CUDA)
    cache.reserve(["a"], 1024 * 16)
    cache.advance(["a"], 1024 * 16)
    assert cache.k[:, 0].numel() * 2 * 2 * 1024 == size
    device, host = torch.empty(size, dtype=torch.uint8, device=CUDA), torch.empty(size, dtype=torch.uint8).pin_memory()
    plain = {
        "out": seconds(lambda: host.copy_(device, non_blocking=True)),
        "in": seconds(lambda: device.copy_(host, non_blocking=True)),
    }
    found: dict[str, list[float]] = {"out": [], "in": []}
    for _ in range(6):
        for way, call in (("out", cache.swap_out), ("in", cache.swap_in)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call(["a"])
            torch.cuda.synchronize()
            found[way].append(time.perf_counter() - start)
    for way, times in found.items():
        ratio = plain[way] / min(times[1:])  # the first one also takes pinned memory from the system
        record_property(f"swap_{way}_gib_s", round(size / 2**30 / min(times[1:]), 2))
        record_property(f"swap_{way}_to_plain", round(ratio, 3))
        assert ratio >= 0.8, f"swap_{way}: {min(times[1:]):.4f} s, a plain copy {plain[way]:.4f} s"
