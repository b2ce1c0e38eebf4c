"""Which stream waits for which copy: the books of transfers.py, and a cache whose copies are as late as they may be."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from unit.fake_streams import FakeStreams

from xattn import page_moves
from xattn.paged import PagedKVCache
from xattn.transfers import Streams, Transfers


def waits(streams, since=0):
    return [(who, event) for who, what, event in streams.log[since:] if what == "waits for"]


def flying(transfers):
    return [sorted(t.pages) for t in transfers._flying]


@pytest.fixture
def streams():
    return FakeStreams()


@pytest.fixture
def transfers(streams):
    return Transfers(streams)


# ---------------------------------------------------------------- the books
def test_a_copy_follows_what_was_queued_before_and_ends_with_an_event(streams, transfers):
    done = []
    transfers.run(lambda: done.append(1), (), [3, 4], writes=False)
    assert streams.log == [
        ("main", "records", "main0"),
        ("side", "waits for", "main0"),
        ("side", "works", ""),
        ("side", "records", "side3"),
    ]
    assert not done, "the host waits for nothing"
    assert flying(transfers) == [[3, 4]]


def test_only_who_writes_to_a_page_that_is_being_read_waits(streams, transfers):
    transfers.run(lambda: None, (), [3, 4], writes=False)
    start = len(streams.log)
    transfers.wait()
    transfers.claim([1, 2, 5])
    transfers.claim([])
    assert waits(streams, start) == []
    transfers.claim([4])
    assert waits(streams, start) == [("main", "side3")]


def test_each_stream_waits_once(streams, transfers):
    transfers.run(lambda: None, (), [0], writes=False)
    transfers.claim([0])
    start = len(streams.log)
    transfers.claim([0])
    transfers.wait()
    assert waits(streams, start) == []
    streams.name = "other"
    transfers.wait()
    transfers.wait()
    assert waits(streams, start) == [("other", "side3")]


def test_pages_that_are_written_are_waited_for_at_once(streams, transfers):
    done = []
    transfers.run(lambda: done.append(1), (), [7], writes=True)
    assert waits(streams)[-1] == ("main", "side3") and done
    streams.name = "other"
    transfers.wait()
    assert waits(streams)[-1] == ("other", "side3")


def test_nothing_is_waited_for_or_asked_during_a_capture(streams, transfers):
    transfers.run(lambda: None, (), [0], writes=False)
    streams.captured = True
    start = len(streams.log)
    transfers.claim([0])
    transfers.wait()
    assert streams.log[start:] == []
    streams.captured = False
    transfers.wait()
    assert waits(streams, start) == [("main", "side3")], "it is due still"


def test_copies_that_have_ended_are_forgotten(streams, transfers):
    transfers.run(lambda: None, (), [0], writes=False)
    transfers.run(lambda: None, (), [1], writes=False)
    assert flying(transfers) == [[0], [1]]
    transfers.claim([0])
    transfers.run(lambda: None, (), [2], writes=False)
    assert flying(transfers) == [[1], [2]]


def test_the_host_waits_where_it_is_to_read(streams, transfers):
    done = []
    transfers.run(lambda: done.append(1), (), [0], writes=False)
    transfers.settle()
    assert done and flying(transfers) == []


def test_what_was_queued_before_an_error_is_waited_for():
    class Fails(FakeStreams):
        def queue(self, work, tensors):
            super().queue(lambda: None, tensors)
            raise torch.OutOfMemoryError("no room to gather pages")

    streams = Fails()
    transfers = Transfers(streams)
    with pytest.raises(torch.OutOfMemoryError):
        transfers.run(lambda: None, (), [5], writes=True)
    start = len(streams.log)
    transfers.wait()
    assert waits(streams, start) == [("main", "side3")]


def test_without_streams_all_is_done_when_a_call_returns():
    transfers, done = Transfers(None), []
    transfers.run(lambda: done.append(1), (), [0], writes=False)
    transfers.claim([0])
    transfers.wait()
    transfers.settle()
    assert done == [1] and flying(transfers) == []


def test_torch_is_asked_for_the_streams_of_the_device(monkeypatch):
    """What of torch.cuda is used, and where: no driver is behind it here."""
    device, calls = torch.device("cuda", 1), []

    class Module:
        def Stream(self, on):
            calls.append(("makes", on))
            return "side"

        def current_stream(self, on):
            return ("current", on)

        def is_current_stream_capturing(self):
            return calls[-1] == ("enters", device)

        def _entered(self, what):
            calls.append(("enters", what))
            yield
            calls.append(("leaves", what))

        stream = device = contextlib.contextmanager(_entered)

    class Storage:
        def record_stream(self, stream):
            calls.append(("kept for", stream))

    monkeypatch.setattr(torch, "get_device_module", lambda of: {device: Module()}[of])
    streams = Streams(device)
    assert streams.current() == ("current", device) and streams.capturing() is True
    calls.clear()
    streams.queue(lambda: calls.append("work"), [Storage()])
    assert calls == [("makes", device), ("kept for", "side"), ("enters", "side"), "work", ("leaves", "side")]
    assert streams.side() == "side" and calls.count(("makes", device)) == 1


# ---------------------------------------------------------------- a cache over it
def late_cache(streams, num_pages=6):
    """A cache of pages of 4 tokens, and the calls of a step over it."""
    cache = PagedKVCache(num_pages, 4, 2, 1, 2, dtype=torch.float32)
    cache._transfers = Transfers(streams)
    return cache


def write(cache, ids, n, value):
    cache.reserve(ids, n)
    for layer in range(2):
        new = torch.full((len(ids), n, 1, 2), float(value + layer))
        cache.append(layer, new, -new)
    cache.advance(ids, n)


def values(cache, key):
    pages = list(cache._pool.sequences[key].pages)
    k, v = (t[:, pages].flatten(1, 2)[:, : cache.length(key), 0] for t in (cache.k, cache.v))
    assert torch.equal(k, -v)
    return [layer.unique().tolist() for layer in k]


def test_others_go_on_while_pages_are_saved(streams):
    cache = late_cache(streams)
    write(cache, ["a", "b"], 8, 10)
    cache.swap_out(["a"])
    start = len(streams.log)
    write(cache, ["b"], 8, 20)  # two pages were free before
    assert cache.num_free_pages == 2
    assert waits(streams, start) == [] and len(streams.queued) == 2, "pages being saved are taken last"
    write(cache, ["c"], 4, 30)
    assert waits(streams, start) != []
    cache.free(["b"])
    cache.swap_in(["a"])
    assert values(cache, "a") == [[10], [11]] and values(cache, "c") == [[30], [31]]


def test_a_page_that_stays_with_another_is_written_after_it_was_saved(streams):
    """No page is handed out here: the other's last reference lets it write in place."""
    cache = late_cache(streams)
    write(cache, ["a"], 8, 10)
    cache.fork("a", "b")
    cache.swap_out(["a"])
    cache.truncate("b", 5)
    write(cache, ["b"], 3, 20)
    cache.swap_in(["a"])
    assert values(cache, "a") == [[10], [11]] and values(cache, "b") == [[10, 20], [11, 21]]


def test_shared_pages_are_copied_into_pages_that_are_saved_first(streams):
    cache = late_cache(streams, num_pages=4)
    write(cache, ["a"], 6, 10)
    write(cache, ["b"], 6, 20)
    cache.fork("b", "c")
    cache.swap_out(["a"])
    write(cache, ["c"], 1, 20)  # its copy of the half-filled page goes where "a" was
    cache.free(["b"])
    cache.swap_in(["a"])
    assert values(cache, "a") == [[10], [11]] and values(cache, "c") == [[20], [21]]


def test_another_stream_waits_before_it_appends(streams):
    cache = late_cache(streams, num_pages=2)
    write(cache, ["a"], 8, 10)
    cache.swap_out(["a"])
    cache.reserve(["b"], 1)
    for call in (
        lambda: cache.append(0, *[torch.zeros(1, 1, 1, 2)] * 2),
        lambda: cache.page_table,
        lambda: cache.seqlens_k,
    ):
        start, streams.name = len(streams.log), f"stream {len(streams.log)}"
        call()
        assert [who for who, _ in waits(streams, start)] == [streams.name]


def test_a_sequence_that_is_freed_or_comes_back_at_once(streams):
    cache = late_cache(streams)
    write(cache, ["a", "b"], 6, 10)
    cache.swap_out(["a", "b"])
    cache.free(["b"])
    cache.swap_in(["a"])
    assert values(cache, "a") == [[10], [11]]


def test_a_deep_copy_holds_what_was_on_its_way(streams):
    cache = late_cache(streams)
    write(cache, ["a", "b"], 6, 10)
    cache.swap_out(["a"])
    other = copy.deepcopy(cache)
    assert other._transfers is not cache._transfers
    other.swap_in(["a"])
    assert values(other, "a") == [[10], [11]]


def test_nothing_changes_where_a_copy_cannot_be_queued(streams, monkeypatch):
    cache = late_cache(streams)
    write(cache, ["a", "b"], 6, 10)
    cache.swap_out(["b"])

    def fail(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(streams, "queue", fail)
    for call in (lambda: cache.swap_out(["a"]), lambda: cache.swap_in(["b"])):
        with pytest.raises(torch.OutOfMemoryError):
            call()
        assert cache.num_free_pages == 4 and cache.stats().swapped == 1
    monkeypatch.undo()
    cache.swap_out(["a"])
    cache.swap_in(["b", "a"])
    assert values(cache, "a") == values(cache, "b") == [[10], [11]]


# ---------------------------------------------------------------- copies
@pytest.mark.parametrize("dtype, heads", [(torch.float8_e4m3fn, 1), (torch.float8_e5m2, 2), (torch.bfloat16, 3)])
@pytest.mark.parametrize("staged", [1, 40, 1 << 20])
def test_rows_go_to_the_host_and_back_in_parts(dtype, heads, staged, monkeypatch):
    monkeypatch.setattr(page_moves, "_STAGED_BYTES", staged)
    generator = torch.Generator().manual_seed(0)
    raw = [torch.randint(0, 256, (2, 9, 3, heads, w * dtype.itemsize), generator=generator) for w in (1, 5)]
    storages = [t.to(torch.uint8).view(dtype) for t in raw]
    before = [t.view(torch.uint8).clone() for t in storages]
    pages = [4, 0, 8, 1, 2]
    hosts = page_moves.host_rows(storages, len(pages))
    page_moves.save(storages, pages, hosts)
    indices, to = [0, 1, 2, 4, 3, 1], [7, 6, 5, 3, 2, 1]
    page_moves.load(hosts, indices, storages, to)
    for now, was in zip(storages, before, strict=True):
        wanted = was.clone()
        wanted[:, to] = was[:, [pages[i] for i in indices]]
        assert torch.equal(now.view(torch.uint8), wanted)


def test_runs():
    assert list(page_moves._runs([3, 4, 5, 7, 6, 6, 0, 1])) == [(0, 3, 3), (3, 7, 1), (4, 6, 1), (5, 6, 1), (6, 0, 2)]
    assert list(page_moves._runs([])) == []
