"""Threads, forks, and results that do not depend on neighbours in a batch."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import xattn
from xattn import chunks, concurrency, dispatch, segments

trace = importlib.import_module("xattn.fusion.trace")  # the name in the package is the function

THREADS = 8


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def together(function, count: int = THREADS) -> list:
    """function(n) for each n at once, released by a barrier; raises what a thread raised."""
    barrier = threading.Barrier(count)

    def run(n):
        barrier.wait(60)
        return function(n)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Threads of torch's own would make results depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_caches():
    """Threads race to fill them."""
    plans, mods = dict(dispatch._plans), dict(trace._kept)
    dispatch._plans.clear()
    trace._kept.clear()
    yield
    dispatch._plans.update(plans)
    trace._kept.update(mods)


# ---------------------------------------------------------------- calls, each by its number
def dense(n: int, backend: str | None = None) -> list[torch.Tensor]:
    q, k, v = (randn(2, 9 + n, 4, 16, seed=3 * n + i).requires_grad_() for i in range(3))
    slope, base = torch.tensor(0.1 * (n + 1), requires_grad=True), 0.5 * n

    def mod(score, b, h, i, j):
        return score + slope * (i - j).abs() + base * h

    options = {"score_mod": mod} if backend != "sdpa" else {}
    out = xattn.attention(q, k, v, causal=bool(n % 2), backend=backend, **options)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v) + ((slope,) if options else ()))
    return [out.detach(), *grads]


def varlen(n: int, backend: str | None = None) -> list[torch.Tensor]:
    q, k, v = (randn(20 + n, 4, 16, seed=100 + 3 * n + i).requires_grad_() for i in range(3))
    ends = torch.tensor([0, 5, 5, 11 + n, 20 + n])
    out = xattn.attention_varlen(q, k, v, ends, ends, 9 + n, 9 + n, causal=True, backend=backend)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


def paged(n: int, backend: str | None = None) -> list[torch.Tensor]:
    k_cache, v_cache = (randn(12, 4, 2, 16, seed=200 + 2 * n + i) for i in range(2))
    q, k_new, v_new = randn(2, 3, 4, 16, seed=300 + n), randn(2, 3, 2, 16, seed=400 + n), randn(2, 3, 2, 16, seed=500)
    table = torch.randperm(12, generator=torch.Generator().manual_seed(n)).reshape(2, 6)
    lengths = torch.tensor([3 + n, 17 - n])
    out = xattn.attention_paged(
        q, k_cache, v_cache, table, lengths, k_new=k_new, v_new=v_new, causal=True, backend=backend
    )
    return [out, k_cache, v_cache]


CALLS = {"dense": dense, "varlen": varlen, "paged": paged}


# ---------------------------------------------------------------- threads
@pytest.mark.parametrize("backend", ["reference", "sdpa", None])
def test_threads_give_the_serial_results(backend, fresh_caches):
    def work(n):
        return [call(n + r, backend) for r in range(3) for call in CALLS.values()]

    threaded = together(work)
    for n in range(THREADS):
        for got, wanted in zip(threaded[n], work(n), strict=True):
            for x, y in zip(got, wanted, strict=True):
                assert torch.equal(x, y)


def test_backward_in_another_thread():
    q, k, v = (randn(2, 6, 2, 8, seed=i).requires_grad_() for i in range(3))
    losses = [xattn.attention(q, k, v, causal=True).square().sum() for _ in range(THREADS)]
    wanted = torch.autograd.grad(xattn.attention(q, k, v, causal=True).square().sum(), (q, k, v))
    for grads in together(lambda n: torch.autograd.grad(losses[n], (q, k, v))):
        assert all(torch.equal(x, y) for x, y in zip(grads, wanted, strict=True))


def test_one_plan_for_a_problem_asked_from_many_threads(fresh_caches):
    q = randn(1, 4, 2, 8)
    plans = together(lambda n: [str(xattn.explain(q, q, q, causal=True)) for _ in range(20)])
    assert len({text for found in plans for text in found}) == 1
    together(lambda n: [xattn.attention(q, q, q, causal=True) for _ in range(20)])
    assert len(dispatch._plans) == 1


def test_plans_are_bounded_under_threads(fresh_caches, monkeypatch):
    monkeypatch.setattr(dispatch, "_MOST_PLANS", 5)

    def work(n):
        for width in range(1, 30):
            q = torch.ones(1, 2, 1, width)
            assert torch.equal(xattn.attention(q, q, q), q)

    together(work)
    assert 1 <= len(dispatch._plans) <= 5


def test_functions_traced_in_many_threads(fresh_caches):
    """Equal code has one key, however many trace it; each keeps its own captured tensors."""
    q = randn(1, 5, 2, 8)

    def shift(n, r):
        return torch.arange(5) * float(n * 10 + r)

    def call(n, r):
        t = shift(n, r)
        return xattn.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + t[j])

    for n, found in enumerate(together(lambda n: [call(n, r) for r in range(10)])):
        for r, out in enumerate(found):
            wanted = xattn.attention(q, q, q, attn_mask=shift(n, r), backend="reference")
            torch.testing.assert_close(out, wanted)
    assert len(trace._kept) == 1


def test_a_key_is_found_from_another_thread(fresh_caches):
    keys = together(lambda n: trace.trace("mask_mod", lambda b, h, i, j: i >= j + 1, torch.device("cpu"))[0])
    assert len(set(keys)) == 1
    assert all(mod.key == keys[0] for mod in together(lambda n: trace.lookup(keys[0])))


def test_settings_of_a_thread_stay_there():
    """batch_invariant() in one thread is not seen by another; grad mode neither."""
    inside, done = threading.Event(), threading.Event()

    def holder():
        with xattn.batch_invariant():
            inside.set()
            assert done.wait(60)

    thread = threading.Thread(target=holder)
    thread.start()
    assert inside.wait(60)
    try:
        assert not segments.one_by_one.get()
    finally:
        done.set()
        thread.join()


# ---------------------------------------------------------------- processes
def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


FORK = """
import os
import torch
torch.set_num_threads(1)
import xattn

def call():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 5, 2, 8, generator=g).requires_grad_(GRAD) for _ in range(3))
    out = xattn.attention(q, k, v, causal=True, score_mod=lambda s, b, h, i, j: s + h)
    grads = torch.autograd.grad(out.sum(), (q, k, v)) if GRAD else ()
    ends = torch.tensor([0, 4, 10])
    packed = xattn.attention_varlen(*(t.flatten(0, 1) for t in (q, k, v)), ends, ends, 6, 6)
    return [t.detach() for t in (out, packed, *grads)]

GRAD = {grad_child}
if {before}:
    GRAD = {grad_parent}
    call()
    GRAD = {grad_child}
pid = os.fork()
if pid == 0:
    code = 1
    try:
        torch.save(call(), {path!r})
        code = 0
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
mine, others = call(), torch.load({path!r})
assert len(mine) == len(others) and all(torch.equal(x, y) for x, y in zip(mine, others))
print("ok")
"""


@pytest.mark.parametrize(
    "before, grad_parent, grad_child",
    [(False, False, True), (True, True, False)],
    ids=["import", "call with gradients"],
)
def test_fork(tmp_path, before, grad_parent, grad_child):
    """torch itself forbids a backward in a child whose parent ran one."""
    path = str(tmp_path / "results.pt")
    script = FORK.format(before=before, grad_parent=grad_parent, grad_child=grad_child, path=path)
    assert run(script) == "ok\n"


def test_fork_while_threads_call(tmp_path):
    """No lock of xattn is left held in the child, by a thread that is not there."""
    assert (
        run(
            """
import os, sys, threading
import torch
torch.set_num_threads(1)
import xattn
import xattn.fusion
trace = sys.modules["xattn.fusion.trace"]

stop = threading.Event()

def work():
    while not stop.is_set():
        trace.intern(trace.lookup(key))

key = trace.trace("mask_mod", lambda b, h, i, j: i >= j, torch.device("cpu"))[0]
threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
for t in threads:
    t.start()
try:
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            import signal
            signal.alarm(3)  # a lock left held would wait for ever
            trace.lookup(key)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
finally:
    stop.set()
    for t in threads:
        t.join()
print("ok")
"""
        )
        == "ok\n"
    )


def test_fork_while_a_thread_holds_a_cache():
    """The child finds the cache's lock free, and it is the child's: taken again where it is held."""
    assert (
        run(
            """
import os, signal, threading
import xattn
cache = xattn.PagedKVCache(4, 4, 1, 1, 8)
held, done = threading.Event(), threading.Event()

def hold():
    with cache._lock:
        held.set()
        done.wait(60)

thread = threading.Thread(target=hold)
thread.start()
held.wait(60)
pid = os.fork()
if pid == 0:
    signal.alarm(5)  # a lock left held would wait for ever
    cache.reserve(["a"], 3)
    cache.advance(["a"], 3)
    os._exit(0 if cache.page_table.shape[0] == 1 and cache.lengths(["a"]) == [3] else 1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
done.set()
thread.join()
print("ok" if status == 0 else status)
"""
        )
        == "ok\n"
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_locks_go_with_their_owners(reentrant):
    lock = concurrency.ForkSafeLock(reentrant)
    with lock:
        pass
    gone = weakref.ref(lock)
    del lock
    gc.collect()
    assert gone() is None


def test_import_in_a_thread():
    assert (
        run(
            """
import threading
import torch
found = []

def work():
    import xattn
    q = torch.ones(1, 2, 1, 4)
    found.append(xattn.attention(q, q, q))

threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads:
    t.start()
for t in threads:
    t.join()
import xattn
assert len(found) == 8 and all(torch.equal(x, torch.ones(1, 2, 1, 4)) for x in found), found
print("ok")
"""
        )
        == "ok\n"
    )


# ---------------------------------------------------------------- batch invariance
LENGTHS = [(5, 9), (1, 33), (16, 16), (3, 70), (0, 4), (7, 0)]
backends = pytest.mark.parametrize("backend", ["reference", "sdpa"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def invariant(function, *args, **kwargs):
    with xattn.batch_invariant():
        return function(*args, **kwargs)


@backends
@dtypes
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(6, 16, 16), (6, 1, 77), (6, 40, 130)])
def test_dense_rows_do_not_depend_on_the_batch(backend, dtype, causal, sizes):
    batch, seqlen_q, seqlen_k = sizes
    q = randn(batch, seqlen_q, 4, 32, seed=1, dtype=torch.float32).to(dtype)
    k, v = (randn(batch, seqlen_k, 2, 32, seed=i).to(dtype) for i in (2, 3))
    options = {"causal": causal, "backend": backend}
    whole = invariant(xattn.attention, q, k, v, **options)
    for b in range(batch):
        one = slice(b, b + 1)
        assert torch.equal(invariant(xattn.attention, q[one], k[one], v[one], **options), whole[one])
    some = torch.tensor([4, 0, 3])
    assert torch.equal(invariant(xattn.attention, q[some], k[some], v[some], **options), whole[some])


@backends
@dtypes
def test_dense_rows_do_not_depend_on_other_lengths(backend, dtype):
    q, k, v = (randn(4, 24, 4, 32, seed=i).to(dtype) for i in range(3))
    used = torch.tensor([24, 3, 0, 17])
    whole = invariant(xattn.attention, q, k, v, seqused_k=used, causal=True, backend=backend)
    for b in range(4):
        one = slice(b, b + 1)
        alone = invariant(xattn.attention, q[one], k[one], v[one], seqused_k=used[one], causal=True, backend=backend)
        assert torch.equal(alone, whole[one])


@backends
@dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows_do_not_depend_on_the_batch(backend, dtype, causal):
    ends = [torch.tensor([0, *torch.tensor([n[i] for n in LENGTHS]).cumsum(0).tolist()]) for i in range(2)]
    q = randn(int(ends[0][-1]), 4, 32, seed=1).to(dtype)
    k, v = (randn(int(ends[1][-1]), 2, 32, seed=i).to(dtype) for i in (2, 3))
    options = {"causal": causal, "backend": backend}
    whole = invariant(xattn.attention_varlen, q, k, v, *ends, 16, 70, **options)
    for b, (n, m) in enumerate(LENGTHS):
        rows, keys = slice(int(ends[0][b]), int(ends[0][b + 1])), slice(int(ends[1][b]), int(ends[1][b + 1]))
        own = torch.tensor([0, n]), torch.tensor([0, m])
        alone = invariant(xattn.attention_varlen, q[rows], k[keys], v[keys], *own, n, m, **options)
        assert torch.equal(alone, whole[rows])


@backends
@dtypes
@pytest.mark.parametrize("packed", [False, True])
def test_paged_rows_do_not_depend_on_the_batch(backend, dtype, packed):
    k_cache, v_cache = (randn(40, 8, 2, 32, seed=i).to(dtype) for i in (1, 2))
    q = randn(5, 3, 4, 32, seed=3).to(dtype)
    table = torch.randperm(40, generator=torch.Generator().manual_seed(0)).reshape(5, 8)
    lengths = torch.tensor([3, 64, 17, 8, 40])

    def call(which):
        given = {"causal": True, "backend": backend}
        x = q[which]
        if packed:
            given |= {"cu_seqlens_q": torch.arange(len(x) + 1) * 3, "max_seqlen_q": 3}
            x = x.flatten(0, 1)
        out = invariant(xattn.attention_paged, x, k_cache, v_cache, table[which], lengths[which], **given)
        return out.reshape(-1, 3, 4, 32)

    whole = call(torch.arange(5))
    for b in range(5):
        assert torch.equal(call(torch.tensor([b])), whole[b : b + 1])
    assert torch.equal(call(torch.tensor([4, 1])), whole[[4, 1]])


@backends
@dtypes
def test_gradients_of_a_row_do_not_depend_on_the_batch(backend, dtype):
    q, k, v = (randn(4, 19, 4, 32, seed=i).to(dtype).requires_grad_() for i in range(3))

    def grads(which):
        leaves = [t.detach()[which].requires_grad_() for t in (q, k, v)]
        out = invariant(xattn.attention, *leaves, causal=True, backend=backend)
        return invariant(torch.autograd.grad, out.square().sum(), leaves)

    whole = grads(slice(0, 4))
    for b in range(4):
        for alone, all_of_them in zip(grads(slice(b, b + 1)), whole, strict=True):
            assert torch.equal(alone, all_of_them[b : b + 1])


def test_batch_invariant_is_close_to_the_plain_result():
    q, k, v = (randn(3, 19, 4, 32, seed=i) for i in range(3))
    torch.testing.assert_close(invariant(xattn.attention, q, k, v), xattn.attention(q, k, v))


def test_batch_invariant_nests_and_restores():
    assert not segments.one_by_one.get()
    with xattn.batch_invariant():
        assert segments.one_by_one.get()
        with xattn.batch_invariant():
            assert segments.one_by_one.get()
        assert segments.one_by_one.get()
        with pytest.raises(ZeroDivisionError), xattn.batch_invariant():
            raise ZeroDivisionError
        assert segments.one_by_one.get()
    assert not segments.one_by_one.get()


@pytest.fixture
def seen(monkeypatch):
    """The sequences of each segment that calls are cut into."""
    seen = []
    original = chunks.segments

    def spy(inputs, limit):
        for segment in original(inputs, limit):
            seen.append(segment.batch)
            yield segment

    monkeypatch.setattr(chunks, "segments", spy)
    return seen


def test_batch_invariant_cuts_a_call_by_sequence(seen):
    """What it does: one segment for each sequence, and again all in one behind it."""
    q = randn(4, 3, 2, 8)
    for inside, wanted in ((False, 1), (True, 4), (False, 1)):
        seen.clear()
        invariant(xattn.attention, q, q, q) if inside else xattn.attention(q, q, q)
        assert len(seen) == wanted


def of_each_kind(kind: str, q: torch.Tensor) -> torch.Tensor:
    if kind == "attention":
        return xattn.attention(q, q, q)
    offsets = torch.tensor([0, 3, 6, 9, 12])
    if kind == "varlen":
        return xattn.attention_varlen(*(q.flatten(0, 1),) * 3, offsets, offsets, 3, 3)
    pages = torch.arange(4)[:, None]
    return xattn.attention_paged(q, q, q, pages, torch.full((4,), 3))


def within(kind, q):
    with xattn.batch_invariant():
        first = of_each_kind(kind, q)
        with xattn.batch_invariant():
            pass
        return first + of_each_kind(kind, 2 * q)


def beside(kind, q):
    first = of_each_kind(kind, q)
    with xattn.batch_invariant():
        first = first + of_each_kind(kind, 2 * q)
    return first + of_each_kind(kind, 3 * q)


@xattn.batch_invariant()
def decorated(kind, q):
    return of_each_kind(kind, q)


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q):
        return self.function("attention", q)


CAPTURES = {
    "aot_eager": lambda f, q: torch.compile(f, fullgraph=True, backend="aot_eager"),
    "eager": lambda f, q: torch.compile(f, fullgraph=True, backend="eager"),
    "make_fx": lambda f, q: make_fx(f)(q),
    "jit.trace": lambda f, q: torch.jit.trace(f, (q,)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("kind", ["attention", "varlen", "paged"])
@pytest.mark.parametrize("function, wanted", [(within, 8), (beside, 6), (decorated, 4)])
def test_batch_invariant_inside_what_is_captured(seen, capture, kind, function, wanted):
    torch._dynamo.reset()
    q = randn(4, 3, 2, 8)
    eager = function(kind, q)
    wanted = len(seen) if kind == "varlen" else wanted  # the CPU cuts packed calls by sequence as it is
    captured = CAPTURES[capture](lambda q: function(kind, q), q)
    captured(q)
    seen.clear()
    assert torch.equal(captured(q), eager)
    assert len(seen) == wanted
    assert not segments.traced and not segments.one_by_one.get()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
def test_batch_invariant_inside_an_exported_module(seen, strict):
    q = randn(4, 3, 2, 8)
    module = torch.export.export(Module(beside), (q,), strict=strict).module()
    seen.clear()
    module(q)
    assert len(seen) == 6


@pytest.mark.parametrize("compiled", [False, True])
def test_batch_invariant_holds_for_a_backward_outside_it(seen, compiled):
    torch._dynamo.reset()
    q = randn(4, 3, 2, 8).requires_grad_()
    function = torch.compile(decorated, fullgraph=True, backend="aot_eager") if compiled else decorated
    out = function("attention", q)
    seen.clear()
    out.sum().backward()
    assert len(seen) == 4


def test_batch_invariant_around_a_compiled_function(seen):
    torch._dynamo.reset()
    q = randn(4, 3, 2, 8)
    compiled = torch.compile(lambda q: xattn.attention(q, q, q), fullgraph=True, backend="aot_eager")
    for inside, wanted in ((False, 1), (True, 4), (False, 1)):
        seen.clear()
        invariant(compiled, q) if inside else compiled(q)
        assert len(seen) == wanted
