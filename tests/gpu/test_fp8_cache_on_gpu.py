"""Paged caches of 8-bit floats on a GPU, by both launchers: the instructions that widen them, sizes, splits, steps that
append, and scales that change between replays of a graph."""

from __future__ import annotations

import fp8_codes
import pytest
import torch
from gpu.native import CUDA
from gpu.test_append_on_gpu import tables
from gpu.test_native_on_gpu import agree, paged_step, randn

import xattn
from xattn.device import from_arch
from xattn.forward_call import CACHES

ELEMENTS = pytest.mark.parametrize("element", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(scope="module")
def cache():
    """The dtype that kernels read on this device."""
    arch = xattn.devices()[0].arch
    args = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((1, 1, 1, 64), (1, 16, 1, 64))]
    for dtype in CACHES:
        pages = args[1].to(dtype)
        table = torch.empty(1, 1, dtype=torch.int32, device="meta")
        if xattn.explain(args[0], pages, pages, table, table[0], kind="paged", device=from_arch(arch)).native:
            return dtype
    raise AssertionError(f"{arch} reads none of {CACHES}")


def narrow(step, cache, scale=1.0):
    """A step (q, k, v, table, lengths) over a cache of 8 bits."""
    q, k, v, *rest = step
    return q, (k / scale).to(cache), (v / scale).to(cache), *rest


@ELEMENTS
def test_every_code(launcher, backend, cache, element):
    fp8_codes.check_values(backend, "cuda", cache, element)
    fp8_codes.check_keys(backend, "cuda", cache, element)


@ELEMENTS
@pytest.mark.parametrize("d", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("sq, heads", [(1, 8), (1, 2), (5, 8), (40, 8), (300, 6)])
def test_against_the_reference(launcher, backend, cache, element, d, sq, heads):
    q, *rest = narrow(paged_step(sq=sq, h=heads, d=d), cache)
    per_head = 0.5 + torch.rand(3, 2, device=CUDA)
    for seqlens in ([640, 1, 0], [17, 639, 333]):
        rest[3].copy_(torch.tensor(seqlens))
        for options in (
            {"causal": True, "k_scale": per_head, "v_scale": per_head.flip(0)},
            {"window": (70, 3), "softcap": 20.0, "v_scale": torch.tensor(0.3, device=CUDA), "num_splits": 1},
            {"causal": True, "num_splits": 7, "q_scale": per_head, "alibi_slopes": torch.rand(heads, device=CUDA)},
        ):
            agree((q.to(element), *rest), options, backend, xattn.attention_paged)


@pytest.mark.parametrize("page_size", [1, 7, 64, 256])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_pages(launcher, backend, cache, page_size, kv_layout):
    q, k, v, table, lengths = narrow(paged_step(page_size=page_size), cache)
    if kv_layout == "HND":
        k, v = (t.transpose(1, 2).contiguous() for t in (k, v))
    options = {"causal": True, "kv_layout": kv_layout, "sinks": randn(8, dtype=torch.float32)}
    agree((q, k, v, table.long(), lengths.long()), options, backend, xattn.attention_paged)


def test_a_large_batch(launcher, backend, cache):
    x = narrow(paged_step(b=64, h=32, hk=8, room=256), cache)
    agree(x, {"causal": True, "k_scale": torch.tensor(0.7, device=CUDA)}, backend, xattn.attention_paged)


def test_a_graph_replays_with_other_scales_lengths_and_tokens(launcher, backend, cache):
    q, k, v, table, lengths = narrow(paged_step(), cache)
    lengths.copy_(torch.tensor([17, 0, 300]))
    new, scales = [randn(3, 1, 2, 128) for _ in range(2)], [torch.rand(3, 2, device=CUDA) + 0.5 for _ in range(2)]
    rotary = tables(positions=700)

    def step(k, v, backend=backend):
        return xattn.attention_paged(
            *(q, k, v, table, lengths), k_new=new[0], v_new=new[1], k_scale=scales[0], v_scale=scales[1],
            rotary=rotary, causal=True, backend=backend,
        )  # fmt: skip

    step(k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(k, v)
    for n in range(3):
        lengths.add_(n), q.normal_(), scales[0].uniform_(0.3, 2), scales[1].uniform_(0.3, 2)
        for t in new:
            t.normal_()
        mine, theirs = ([t.clone() for t in (k, v)] for _ in range(2))
        graph.replay()
        assert torch.equal(out, step(*mine))
        want = step(*theirs, backend="reference")
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        for a, b, c in zip((k, v), mine, theirs, strict=True):
            a, b, c = (t.view(torch.uint8) for t in (a, b, c))
            assert torch.equal(a, b) and torch.equal(a, c)


def test_half_of_the_bytes_are_read(launcher, backend, cache):
    """A step that is bound by memory takes less time over 8 bits than over 16."""
    step = paged_step(b=32, h=32, hk=8, room=256)
    step[4].fill_(4090)
    times = {}
    for name, x in (("16 bits", step), ("8 bits", narrow(step, cache))):
        for _ in range(3):
            xattn.attention_paged(*x, causal=True, backend=backend)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            xattn.attention_paged(*x, causal=True, backend=backend)
        end.record()
        torch.cuda.synchronize()
        times[name] = start.elapsed_time(end) / 20
    print(times)
    assert times["8 bits"] < times["16 bits"], times
