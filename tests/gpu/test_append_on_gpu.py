"""New tokens on a GPU, by both launchers: what the append kernel writes, bit for bit what torch's operations write
there; whole calls, in graphs, without a synchronisation, and their bad values."""

from __future__ import annotations

import math

import pytest
import torch
from append_cases import BAD, CASES, TANGLED, bits, copied, made, on
from gpu.native import CUDA
from gpu.test_native_on_gpu import PAGED, paged_step, randn

import xattn
from xattn import appends, dispatch, repeats
from xattn.append_call import Append


def native(x: Append, backend: str):
    body = dispatch.get(backend).append
    assert body is not None and body.check(x) == ()
    ready = appends.prepared(x, backend)
    assert ready is not None
    return ready.of(x)


def compared(x: Append, backend: str) -> tuple[str, str]:
    """What was reported by the kernel, and by torch's operations."""
    mine, theirs, said = copied(x), copied(x), []
    results = []
    for run, given in ((lambda g: native(g, backend), mine), (appends._by_torch, theirs)):
        results.append(run(given))
        try:
            xattn.check_errors()
            said.append("")
        except xattn.DeviceValueError as error:
            said.append(str(error))
    for got, want in zip(*results, strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(bits(got), bits(want))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(bits(getattr(mine, name)), bits(getattr(theirs, name)))
    return said[0], said[1]


@pytest.mark.parametrize("backend", PAGED)
@pytest.mark.parametrize("case", [c for c in CASES if not c.view], ids=str)
def test_as_torchs_operations(launcher, backend, case):
    assert compared(on(made(case), "cuda"), backend) == ("", "")


@pytest.mark.parametrize("backend", PAGED)
@pytest.mark.parametrize("name", BAD)
def test_bad_values(launcher, backend, name):
    case, change = BAD[name]
    mine, theirs = compared(on(change(made(case)), "cuda"), backend)
    assert mine == theirs != ""


@pytest.mark.parametrize("backend", PAGED)
@pytest.mark.parametrize("name", TANGLED)
def test_tangled_values_write_nothing_else(launcher, backend, name):
    case, change = TANGLED[name]
    x = on(change(made(case)), "cuda")
    bad = copied(x)
    native(bad, backend)
    torch.cuda.synchronize()
    pages = [p for p in bad.page_table.flatten().tolist() if 0 <= p < bad.k_cache.shape[0]]
    others = [p for p in range(bad.k_cache.shape[0]) if p not in pages]
    assert torch.equal(bits(bad.k_cache[others]), bits(x.k_cache[others]))
    try:
        xattn.check_errors()
    except xattn.DeviceValueError:
        pass


def step(b=3, d=128, lengths=(17, 0, 300)):
    """A step of decoding: q, cache, table, lengths, and the new token of each sequence."""
    q, k, v, table, _ = paged_step(b=b, d=d)
    return (q, k, v, table, torch.tensor(lengths, device=CUDA).int()), {
        "k_new": randn(b, 1, 2, d),
        "v_new": randn(b, 1, 2, d),
    }


def tables(d=128, positions=641):
    angle = torch.arange(positions, device=CUDA)[:, None] * 10000.0 ** (-torch.arange(d // 2, device=CUDA) / (d // 2))
    return xattn.Rotary(angle.cos(), angle.sin())


@pytest.mark.parametrize("backend", PAGED)
@pytest.mark.parametrize("rotary", [False, True])
def test_a_call_against_the_reference(launcher, backend, rotary):
    x, new = step()
    options = {**new, "causal": True, "rotary": tables() if rotary else None}
    for _ in range(3):  # the second time without planning
        caches = [[t.clone() for t in x[1:3]] for _ in range(2)]
        out = xattn.attention_paged(x[0], *caches[0], *x[3:], **options, backend=backend)
        want = xattn.attention_paged(x[0], *caches[1], *x[3:], **options, backend="reference")
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*caches, strict=True))
        x[4].add_(1)
        x[0].normal_(), new["k_new"].normal_()
    xattn.check_errors()


@pytest.mark.parametrize("backend", PAGED)
def test_nothing_synchronises_and_two_kernels_run(launcher, backend, unsynchronised):
    x, new = step()
    call = lambda: xattn.attention_paged(*x, **new, rotary=tables_here, causal=True, backend=backend)  # noqa: E731
    tables_here = tables()
    call()
    for again in (False, True):
        if not again:
            repeats.forget()
        with unsynchronised():
            call()
        if not again:
            repeats.forget()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        kernels = [e.key for e in seen.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert sorted(k for k in kernels if "Memcpy" not in k) == ["xattn_append", "xattn_decode"], kernels


@pytest.mark.parametrize("backend", PAGED)
def test_a_graph_of_a_step_replays_with_other_lengths_and_pages(launcher, backend):
    x, new = step()
    tables_here = tables()
    call = lambda: xattn.attention_paged(*x, **new, rotary=tables_here, causal=True, backend=backend)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ([0, 5, 639], [16, 15, 17], [1, 600, 31]):
        x[4].copy_(torch.tensor(lengths))
        x[3].copy_(torch.randperm(x[1].shape[0], device=CUDA)[: x[3].numel()].view_as(x[3]))
        x[0].normal_(), new["k_new"].normal_(), new["v_new"].normal_()
        x[1].fill_(math.nan), x[2].fill_(math.nan)
        for b, n in enumerate(lengths):  # what came before
            for t in range(n):
                page = x[3][b, t // 16]
                x[1][page, t % 16].normal_(), x[2][page, t % 16].normal_()
        before = [t.clone() for t in x[1:3]]
        graph.replay()
        written = [t.clone() for t in x[1:3]]
        for t, old in zip(x[1:3], before, strict=True):
            t.copy_(old)
        assert torch.equal(out, call()) and all(
            torch.equal(bits(a), bits(b)) for a, b in zip(written, x[1:3], strict=True)
        )
    xattn.check_errors()


@pytest.mark.parametrize("backend", PAGED)
def test_bad_values_of_whole_calls(launcher, backend):
    """Twice: the second time the call is launched without planning."""
    for index, value, words in ((3, -1, "page_table"), (4, 640, "no room"), (4, -2, "negative")):
        x, new = step()
        x = list(x)
        x[index] = x[index].clone()
        x[index].view(-1)[0] = value
        for _ in range(2):
            xattn.attention_paged(*x, **new, causal=True, backend=backend)
            with pytest.raises(xattn.DeviceValueError, match=words):
                xattn.check_errors()


@pytest.mark.parametrize("backend", PAGED)
def test_compiled(launcher, backend):
    x, new = step()
    call = lambda *t, **kw: xattn.attention_paged(*t, **kw, causal=True, backend=backend)  # noqa: E731
    caches = [[t.clone() for t in x[1:3]] for _ in range(2)]
    with torch.no_grad():
        got = torch.compile(call, fullgraph=True)(x[0], *caches[0], *x[3:], **new)
        want = call(x[0], *caches[1], *x[3:], **new)
    assert torch.equal(got, want) and all(torch.equal(bits(a), bits(b)) for a, b in zip(*caches, strict=True))


def test_a_step_of_a_cache(launcher):
    """PagedKVCache.append by the kernel of the device."""
    cache = xattn.PagedKVCache(16, 16, 2, 2, 64, device="cuda")
    ids = ["a", "b"]
    cache.reserve(ids, 5)
    for layer in range(2):
        k = randn(2, 5, 2, 64)
        cache.append(layer, k, k * 2)
        for b in range(2):
            page = int(cache.page_table[b, 0])
            assert torch.equal(cache.k[layer, page, :5], k[b]) and torch.equal(cache.v[layer, page, :5], k[b] * 2)
    cache.advance(ids, 5)
