"""What only a GPU can show of the native backends, by the compiled launcher and by the vendor's Python bindings:
streams, graphs, threads, large shapes, calls that come again, what images cost. The cases of tests/unit run there too
(ci/gpu runs them by both)."""

from __future__ import annotations

import itertools
import math
import threading
import time

import pytest
import torch
from gpu.native import BACKENDS, CUDA

import xattn
from xattn import images, jit, launch, repeats
from xattn.backends import REGISTRY


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=CUDA, dtype=dtype)


def qkv(b=2, sq=65, sk=97, h=4, hk=2, d=64, dtype=torch.bfloat16):
    return randn(b, sq, h, d, dtype=dtype), randn(b, sk, hk, d, dtype=dtype), randn(b, sk, hk, d, dtype=dtype)


def agree(args, kwargs, backend, call=xattn.attention):
    """With the reference in float32, and bit for bit with itself."""
    out, lse = call(*args, **kwargs, return_lse=True, backend=backend)
    wide = lambda x: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    exact = {n: wide(x) for n, x in kwargs.items()}
    want, want_lse = call(*map(wide, args), **exact, return_lse=True, backend="reference")
    seen = torch.isfinite(want_lse)
    assert torch.equal(seen, torch.isfinite(lse)) and torch.equal(lse[~seen], want_lse[~seen])
    torch.testing.assert_close(lse[seen], want_lse[seen], rtol=0, atol=3e-3)
    assert ((out.float() - want).norm() <= 8e-3 * want.norm() + 1e-6).item() and not out.isnan().any()
    for _ in range(2):  # the second time without planning
        assert torch.equal(out, call(*args, **kwargs, backend=backend))
        assert torch.equal(lse, call(*args, **kwargs, return_lse=True, backend=backend)[1])


LENGTHS = [(a, b) for a in (1, 2, 63, 64, 65, 129, 300) for b in (0, 1, 63, 64, 65, 128, 129, 500)]


@pytest.mark.parametrize("causal", [False, True])
def test_lengths(launcher, backend, causal):
    for sq, sk in LENGTHS:
        agree(qkv(1, sq, sk, 2, 1, 128), {"causal": causal}, backend)


@pytest.mark.parametrize("dims", [(8, 8), (40, 72), (80, 80), (112, 64), (160, 160), (192, 128), (64, 256), (224, 224)])
def test_head_dims(launcher, backend, dims):
    for dtype in (torch.bfloat16, torch.float16):
        q, k = randn(2, 130, 6, dims[0], dtype=dtype), randn(2, 201, 2, dims[0], dtype=dtype)
        agree((q, k, randn(2, 201, 2, dims[1], dtype=dtype)), {"causal": True}, backend)


def test_strides_and_alignment(launcher, backend):
    k = randn(2, 70, 4, 64)
    both = randn(2, 70, 2, 4, 64)
    flat = randn(1 + 2 * 64 * 4 * 64)
    for q in (
        randn(2, 4, 65, 64).transpose(1, 2),
        flat[1:].view(2, 64, 4, 64),  # not at a multiple of 16 bytes
        randn(2, 64, 64, 4).transpose(2, 3),  # the last stride is not 1
        randn(1, 1, 4, 64).expand(2, 65, 4, 64),
        randn(2, 130, 4, 64)[:, ::2],
    ):
        agree((q, k, k), {}, backend)
        agree((q, both[:, :, 0], both[:, :, 1]), {"causal": True}, backend)


def test_memory_outside_the_valid_range_never_matters(launcher, backend):
    k = randn(2, 97, 2, 64)
    k[:, 50:] = math.nan
    agree((randn(2, 65, 4, 64), k, k), {"seqused_k": torch.tensor([50, 0], device=CUDA)}, backend)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_varlen(launcher, backend, index):
    cu_q, cu_k = (torch.tensor(x, device=CUDA, dtype=index) for x in ([0, 5, 5, 140, 300], [0, 9, 30, 30, 340]))
    q, k, v = randn(305, 6, 128), randn(350, 3, 128), randn(350, 3, 128)
    q[300:] = math.nan
    mask = torch.rand(1, 6, 256, 400, device=CUDA) > 0.3
    sinks, used = randn(6, dtype=torch.float32), torch.tensor([3, 21, 0, 300], device=CUDA)
    for options in (
        {},
        {"causal": True},
        {"window": (20, 3), "alibi_slopes": torch.rand(6, device=CUDA)},
        {"attn_mask": mask, "sinks": sinks, "seqused_k": used},
    ):
        agree((q, k, v, cu_q, cu_k, 256, 400), options, backend, xattn.attention_varlen)


def test_bad_values_are_reported_by_the_kernel(launcher, backend):
    q = randn(75, 2, 64)
    cu = torch.tensor([0, 50, 20, 1 << 30], device=CUDA, dtype=torch.int32)
    for _ in range(2):  # the second time the call is launched without planning
        assert torch.isfinite(xattn.attention_varlen(q, q, q, cu, cu, 75, 75, backend=backend)[:20]).all()
        with pytest.raises(xattn.DeviceValueError, match="cu_seqlens"):
            xattn.check_errors()
    xattn.check_errors()
    q, k, v = qkv()
    xattn.attention(q, k, v, seqused_k=torch.tensor([98, 3], device=CUDA), backend=backend)
    with pytest.raises(xattn.DeviceValueError, match="seqused_k"):
        xattn.check_errors()


def test_no_call_synchronises_or_allocates_what_grows_with_the_square(launcher, backend, unsynchronised):
    q, k, v = qkv(1, 4096, 4096, 2, 2, 64)
    cu = torch.tensor([0, 4096], device=CUDA)

    def calls():
        xattn.attention(q, k, v, causal=True, backend=backend)
        xattn.attention_varlen(q[0], k[0], v[0], cu, cu, 4096, 4096, return_lse=True, backend=backend)

    calls()
    repeats.forget()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with unsynchronised():
        for _ in range(2):
            calls()
    assert torch.cuda.max_memory_allocated() - before <= 2 * (q.numel() * 2 + 4096 * 2 * 4) + 4096


def test_current_stream(launcher, backend):
    q, k, v = qkv(4, 2048, 2048)
    for _ in range(2):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            out = xattn.attention(q * 2, k, v, causal=True, backend=backend)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(out, xattn.attention(q * 2, k, v, causal=True, backend=backend))


@pytest.mark.gpu(count=2)
def test_the_tensors_device_is_used(launcher, backend):
    for n in (1, 0, 1):
        q, k, v = (t.to(f"cuda:{n}") for t in qkv(1, 8, 2048, 32, 32, 128, torch.float16))
        agree((q, k, v), {}, backend)


def test_graph_replays_with_other_contents(launcher, backend):
    q, k, v = qkv()
    xattn.attention(q, k, v, causal=True, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = xattn.attention(q, k, v, causal=True, return_lse=True, backend=backend)
        again, _ = xattn.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    for _ in range(3):
        q.normal_()
        graph.replay()
        want = xattn.attention(q, k, v, causal=True, return_lse=True, backend=backend)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1]) and torch.equal(again, want[0])


PAGED = [b for b in BACKENDS if b != "sm90"] or ["sm80"]  # those that read pages


def paged_step(b=3, sq=1, h=8, hk=2, d=128, room=40, page_size=16):
    """q, a cache, and a step of ``b`` sequences that each have up to ``room`` pages."""
    pages = b * room + 3
    cache = [randn(pages, page_size, hk, d) for _ in range(2)]
    table = torch.randperm(pages, device=CUDA)[: b * room].view(b, room).int()
    return randn(b, sq, h, d), *cache, table, torch.randint(0, room * page_size, (b,), device=CUDA).int()


@pytest.mark.parametrize("backend", PAGED)
@pytest.mark.parametrize("sq, heads", [(1, 8), (1, 2), (5, 8), (40, 8)])
@pytest.mark.parametrize("splits", [None, 1, 7])
def test_paged(launcher, backend, sq, heads, splits):
    x = paged_step(sq=sq, h=heads)
    for seqlens in ([640, 1, 0], [17, 639, 333]):
        x[4].copy_(torch.tensor(seqlens))
        agree(x, {"causal": True, "num_splits": splits}, backend, xattn.attention_paged)


@pytest.mark.parametrize("backend", PAGED)
@pytest.mark.parametrize("sq", [1, 40])
def test_paged_graph_replays_with_other_lengths_and_pages(launcher, backend, sq):
    q, k, v, table, seqlens = paged_step(sq=sq)
    call = lambda: xattn.attention_paged(q, k, v, table, seqlens, causal=True, return_lse=True, backend=backend)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for _ in range(3)]
    for lengths in ([640, 5, 0], [0, 0, 1], [77, 640, 640], [16, 17, 15]):
        q.normal_()
        seqlens.copy_(torch.tensor(lengths))
        table.copy_(torch.randperm(k.shape[0], device=CUDA)[: table.numel()].view_as(table))
        table[0, -(-lengths[0] // 16) :] = -7  # behind the end
        for out, lse in results:
            out.fill_(math.nan), lse.fill_(math.nan)
        graph.replay()
        want = call()
        assert all(torch.equal(t, w) for result in results for t, w in zip(result, want, strict=True))
    xattn.check_errors()


@pytest.mark.parametrize("backend", PAGED)
def test_paged_launches_beside_each_other(launcher, backend):
    """Splits that count in one place would merge each other's parts."""
    steps = [paged_step(b=2, room=100) for _ in range(3)]
    want = [xattn.attention_paged(*x, causal=True, backend=backend) for x in steps]
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()
    found = [[] for _ in steps]
    for _ in range(50):
        for stream, x, outs in zip(streams, steps, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(xattn.attention_paged(*x, causal=True, backend=backend))
    torch.cuda.synchronize()
    assert all(torch.equal(out, w) for outs, w in zip(found, want, strict=True) for out in outs)


def test_threads_on_streams_of_their_own(launcher, backend):
    x = [qkv(2, 64 + n, 97) for n in range(4)]
    want = [xattn.attention(*t, causal=True, backend=backend) for t in x]
    torch.cuda.synchronize()
    failed = []

    def work(n):
        with launch.using(launcher), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                if not torch.equal(xattn.attention(*x[n], causal=True, backend=backend), want[n]):
                    failed.append(n)

    threads = [threading.Thread(target=work, args=(n % 4,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed


def test_a_call_that_comes_again_is_told_apart(launcher, backend):
    """Whatever the answer depends on is part of the question."""
    q, k, v = qkv(2, 66, 66, 4, 4)
    used = torch.tensor([30, 66], device=CUDA)
    mask = torch.rand(66, 66, device=CUDA) > 0.3
    variants = [
        dict(zip(("causal", "softmax_scale", "softcap"), values, strict=True))
        for values in itertools.product((False, True), (None, 0.3, -0.2, 1), (0.0, 5.0))
    ]
    variants += [{"window": w} for w in (None, (3, None), (None, 2), (0, 0))]
    variants += [{"seqused_k": used}, {"attn_mask": mask}, {"attn_mask": mask[:1]}, {"attn_mask": mask.float()}]
    variants += [{"sinks": randn(4, dtype=torch.float32)}, {"alibi_slopes": torch.rand(4, device=CUDA)}]
    for _ in range(2):
        for options in variants:
            agree((q, k, v), options, backend)
            agree((q.transpose(1, 2).contiguous().transpose(1, 2), k, v), options, backend)


def test_a_call_that_comes_again_in_another_state_takes_the_long_way(launcher, backend):
    q, k, v = qkv()
    call = lambda *x, **kw: xattn.attention(*x, causal=True, **kw)  # noqa: E731
    want = call(q, k, v, backend=backend)
    assert torch.equal(call(q, k, v, backend=backend), want)
    shifted = torch.empty(q.numel() + 1, device=CUDA, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    assert torch.equal(call(shifted, k, v, backend=backend), want)
    leaf = q.clone().requires_grad_()
    call(q, k, v)
    call(leaf, k, v).float().sum().backward()
    assert leaf.grad is not None
    with torch.autocast("cuda", torch.float16):
        assert call(q, k, v, backend=backend).dtype == torch.float16
    with torch.inference_mode():
        assert torch.equal(call(q, k, v, backend=backend), want)
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for n in (65, 33):
        part = q[:, :n]
        assert torch.equal(compiled(part, k, v, backend=backend), call(part, k, v, backend=backend))
    batched = torch.vmap(lambda x: call(x, k, v))(torch.stack([q, q]))
    torch.testing.assert_close(batched[1], want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["attention", "varlen"])
def test_opcheck(launcher, backend, kind):
    q, k, v = qkv(1, 33, 33, 2, 2)
    args, op = ((q, k, v), torch.ops.xattn.attention)
    if kind == "varlen":
        cu = torch.tensor([0, 33], device=CUDA)
        args, op = (q[0], k[0], v[0], cu, cu, 33, 33), torch.ops.xattn.attention_varlen
    torch.library.opcheck(op, args, {"causal": True, "return_lse": True, "backend": backend})


@pytest.mark.parametrize("packed", [False, True])
def test_launches_beside_each_other_each_do_all_their_tiles(launcher, backend, packed):
    """More tiles than multiprocessors, on several streams and in graphs that are replayed beside them."""
    if packed:
        lengths = torch.randint(0, 700, (40,))
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(CUDA)
        total, longest = int(lengths.sum()), int(lengths.max())
        q, k, v = randn(total, 12, 64), randn(total, 4, 64), randn(total, 4, 64)
        args, call = (q, k, v, cu, cu, longest, longest), xattn.attention_varlen
    else:
        args, call = qkv(3, 2100, 1500, 8, 4), xattn.attention
    want = call(*args, causal=True, backend=backend)
    agree(args, {"causal": True}, backend, call)
    streams, graphs, outs = [torch.cuda.Stream() for _ in range(3)], [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs += [call(*args, causal=True, backend=backend) for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(4):
        found = []
        for stream, graph in zip(streams, (*graphs, None), strict=True):
            with torch.cuda.stream(stream):
                found += [call(*args, causal=True, backend=backend) for _ in range(2)]
                if graph:
                    graph.replay()
                found.append(call(*args, causal=True, backend=backend))
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in (*found, *outs))
        for out in outs:
            out.zero_()
        torch.cuda.synchronize()  # other streams do not wait for this one


def test_large_shapes(launcher, backend):
    """An explicit mask of more than 2^32 elements, a batch beyond the grid's limit in y, offsets beyond 2^31."""
    s = 73728
    q, k, v = (randn(1, s, 1, 64, dtype=torch.float16) for _ in range(3))
    mask = torch.ones(s, s, dtype=torch.bool, device=CUDA)
    mask[:, s // 2 :] = False
    out = xattn.attention(q, k, v, attn_mask=mask, backend=backend)
    want = xattn.attention(q[:, -64:].float(), k[:, : s // 2].float(), v[:, : s // 2].float(), backend="reference")
    torch.testing.assert_close(out[:, -64:].float(), want, rtol=2e-3, atol=2e-3)
    del mask
    q, k, v = (randn(65536, 8, 8, 64, dtype=torch.float16) for _ in range(3))  # 2^31 elements each
    q, k, v = (torch.cat([t, t[:2]]) for t in (q, k, v))
    out = xattn.attention(q, k, v, backend=backend)
    want = xattn.attention(q[-3:].float(), k[-3:].float(), v[-3:].float(), backend="reference")
    torch.testing.assert_close(out[-3:].float(), want, rtol=2e-3, atol=2e-3)
    del q, k, v, out
    torch.cuda.empty_cache()


def test_an_image_is_compiled_in_seconds_and_found_in_milliseconds(backend, tmp_path, record_property):
    arch = next(d.arch for d in xattn.devices() if d.vendor != "cpu")
    images_of = next(b for b in REGISTRY if b.name == backend).images
    found = [*images_of(arch), *images_of(f"{arch}a")]  # sm_90a: Hopper's own instructions
    spec = next(s for s in found if dict(s.config).get("head_dim") == 128)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        jit.get(spec, images.Store(shipped=(), cache=tmp_path))
        times.append(time.perf_counter() - start)
    record_property("cold and warm, s", times)
    print(f"{spec.name()}: compiled in {times[0]:.2f} s, found in {times[1] * 1e3:.1f} ms")
    assert times[0] < 3 and times[1] < 0.05
