"""PagedKVCache against a plain model of it: a list of tokens for each sequence."""

from __future__ import annotations

import copy
import sys
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from unit.fake_streams import FakeStreams

import xattn
from xattn.paged import PagedKVCache
from xattn.transfers import Transfers

LAYOUTS = ("NHD", "HND")


def make(num_pages=8, page_size=4, num_layers=2, num_heads_kv=1, head_dim=2, head_dim_v=3, dtype=torch.float64, **kw):
    """A cache whose storage is NaN wherever nothing was written."""
    cache = PagedKVCache(num_pages, page_size, num_layers, num_heads_kv, head_dim, head_dim_v, dtype, **kw)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache


def new_tokens(cache, *lead, seed=0, dtype=None):
    """Random k and v (layers, *lead, heads, width)."""
    generator = torch.Generator().manual_seed(seed)
    heads = cache.k.shape[3 if cache.kv_layout == "NHD" else 2]
    shapes = [(cache.num_layers, *lead, heads, t.shape[-1]) for t in (cache.k, cache.v)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or cache.dtype) for shape in shapes]


def stored(cache, pages, length):
    """The first ``length`` tokens on ``pages``: k and v (layers, length, heads, width)."""
    found = []
    for storage in (cache.k, cache.v):
        storage = storage if cache.kv_layout == "NHD" else storage.transpose(2, 3)
        rows = [storage[:, pages[i // cache.page_size], i % cache.page_size] for i in range(length)]
        found.append(torch.stack(rows, 1) if rows else storage[:, 0, :0])
    return found


def write(cache, ids, n, seed=0):
    """One whole step; returns what was written, k and v (layers, batch, n, heads, width)."""
    cache.reserve(ids, n)
    k, v = new_tokens(cache, len(ids), n, seed=seed)
    for layer in range(cache.num_layers):
        cache.append(layer, k[layer], v[layer])
    cache.advance(ids, n)
    return k, v


def read(cache, key):
    """The tokens of a sequence, found through the mirrored page table."""
    cache.reserve([key], 0)
    return stored(cache, cache.page_table[0].tolist(), int(cache.seqlens_k[0]))


def books(cache):
    """Everything that a call which raises must leave as it was."""
    pool = cache._pool
    mirrors = (cache._mirror._table.clone(), cache._mirror._lengths.clone())
    pages = (cache.k.nan_to_num(9e9), cache.v.nan_to_num(9e9))
    sequences = {key: (s.length, s.reserved, list(s.pages), id(s.host)) for key, s in pool.sequences.items()}
    return sequences, list(pool.references), list(pool.free_pages), cache._step, *mirrors, *pages


def assert_unchanged(before, cache):
    for was, now in zip(before, books(cache), strict=True):
        assert torch.equal(was, now) if isinstance(was, torch.Tensor) else was == now


def assert_consistent(cache):
    """Each page is free, or held by as many sequences as its count says; each sequence has the pages it needs."""
    pool = cache._pool
    held = Counter(page for s in pool.sequences.values() if s.host is None for page in s.pages)
    assert [held[page] for page in range(cache.num_pages)] == pool.references
    assert sorted(pool.free_pages) == [page for page in range(cache.num_pages) if not held[page]]
    for s in pool.sequences.values():
        assert len(s.pages) == -(-(s.length + s.reserved) // cache.page_size)
        assert s.host is None or not s.reserved
    stats = cache.stats()
    assert stats.free + len(held) == stats.pages == cache.num_pages
    assert stats.free == cache.num_free_pages
    assert stats.shared == sum(n > 1 for n in held.values())
    assert stats.utilisation == pytest.approx(len(held) / cache.num_pages)


# ---------------------------------------------------------------- any interleaving of calls
IDS = (0, 1, "a", "b", ("c", 0), ("c", 1))


CACHES = {
    "page_size": st.sampled_from((1, 2, 3, 7)),
    "num_pages": st.sampled_from((1, 5, 8, 13, 20)),
    "layout": st.sampled_from(LAYOUTS),
    "head_dim_v": st.sampled_from((2, 5)),
}


class CacheMachine(RuleBasedStateMachine):
    """``tokens[id]``: the committed tokens; ``pending[id]``: those appended behind them. A token is its number."""

    @initialize(**CACHES)
    def start(self, page_size, num_pages, layout, head_dim_v):
        self.cache = make(num_pages, page_size, head_dim_v=head_dim_v, kv_layout=layout)
        self.tokens: dict[object, list[int]] = {}
        self.pending: dict[object, list[int]] = {}
        self.reserved: dict[object, int] = {}
        self.swapped: set[object] = set()
        self.step = None
        self.count = 0

    def values(self, numbers):
        """k and v (layers, tokens, heads, width) of numbered tokens: each element is another number."""
        token = torch.tensor(numbers, dtype=torch.float64)[None, :, None, None]
        layer = torch.arange(self.cache.num_layers)[:, None, None, None]
        k, v = (torch.arange(t.shape[-1]) + side for t, side in ((self.cache.k, 0), (self.cache.v, 50)))
        return [token * 1000 + layer * 100 + column for column in (k, v)]

    def some(self, data, keys, least=1):
        keys = sorted(keys, key=str)
        return data.draw(st.lists(st.sampled_from(keys), min_size=least, max_size=4, unique=True)) if keys else []

    def resident(self):
        return set(self.tokens) - self.swapped

    def ended(self, keys):
        if self.step is not None and set(keys) & set(self.step):
            self.step = None

    @rule(data=st.data())
    def reserve(self, data):
        ids = self.some(data, set(IDS) - self.swapped, least=0)
        each = st.integers(0, 2 * self.cache.page_size + 1)
        counts = data.draw(st.one_of(each, st.lists(each, min_size=len(ids), max_size=len(ids))))
        before = books(self.cache)
        try:
            self.cache.reserve(ids, counts)
        except xattn.OutOfPagesError:
            assert_unchanged(before, self.cache)
            return
        self.step = ids
        for i, key in enumerate(ids):
            self.tokens.setdefault(key, [])
            self.pending.setdefault(key, [])
            n = counts if isinstance(counts, int) else counts[i]
            self.reserved[key] = max(self.reserved.get(key, 0), n)
            s = self.cache._pool.sequences[key]
            for page in s.pages[s.length // self.cache.page_size :] if n else ():
                assert self.cache._pool.references[page] == 1, "new tokens would be written into a shared page"

    @precondition(lambda self: self.step and any(self.reserved[key] for key in self.step))
    @rule(data=st.data())
    def append_packed(self, data):
        self.append([data.draw(st.integers(0, self.reserved[key])) for key in self.step], data)

    @rule(data=st.data())
    def whole_step(self, data):
        self.reserve(data)
        if self.step:
            counts = [self.reserved[key] for key in self.step]
            self.append(counts, data)
            self.commit(self.step, counts)

    def append(self, counts, data):
        offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
        padding = data.draw(st.integers(0, 1))
        k, v = self.values(range(self.count, self.count + offsets[-1] + padding))
        form = data.draw(st.sampled_from((list, torch.tensor)))
        for layer in range(self.cache.num_layers):
            self.cache.append(layer, k[layer], v[layer], form(offsets))
        self.appended(counts)

    @precondition(lambda self: self.step and all(self.reserved[key] for key in self.step))
    @rule(data=st.data())
    def append_dense(self, data):
        n = data.draw(st.integers(0, min(self.reserved[key] for key in self.step)))
        batch = len(self.step)
        k, v = (t.unflatten(1, (batch, n)) for t in self.values(range(self.count, self.count + batch * n)))
        for layer in range(self.cache.num_layers):
            self.cache.append(layer, k[layer], v[layer])
        self.appended([n] * batch)

    def appended(self, counts):
        for key, n in zip(self.step, counts, strict=True):
            self.pending[key][:n] = range(self.count, self.count + n)
            self.count += n

    @precondition(lambda self: self.step != [])
    @rule()
    def append_too_much(self):
        before = books(self.cache)
        if self.step is None:
            with pytest.raises(RuntimeError, match="reserve"):
                self.cache.append(0, *(t[0] for t in new_tokens(self.cache, 1, 1)))
        else:
            n = min(self.reserved[key] for key in self.step) + 1
            with pytest.raises(ValueError, match="reserved"):
                self.cache.append(0, *(t[0] for t in new_tokens(self.cache, len(self.step), n)))
        assert_unchanged(before, self.cache)

    @precondition(lambda self: any(self.pending.values()))
    @rule(data=st.data())
    def advance(self, data):
        ids = self.some(data, {key for key in self.resident() if self.pending[key]})
        self.commit(ids, [data.draw(st.integers(0, len(self.pending[key]))) for key in ids])

    def commit(self, ids, counts):
        self.cache.advance(ids, counts)
        for key, n in zip(ids, counts, strict=True):
            self.tokens[key] += self.pending[key][:n]
            self.pending[key] = self.pending[key][n:]
            self.reserved[key] -= n

    @precondition(lambda self: any(self.tokens[key] for key in self.resident()) and set(IDS) - set(self.tokens))
    @rule(data=st.data())
    def fork(self, data):
        src = self.some(data, {key for key in self.resident() if self.tokens[key]})[0]
        for dst in self.some(data, set(IDS) - set(self.tokens)):
            self.cache.fork(src, dst)
            self.tokens[dst], self.pending[dst], self.reserved[dst] = list(self.tokens[src]), [], 0

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        ids = self.some(data, self.tokens)
        self.cache.free(ids)
        for key in ids:
            del self.tokens[key], self.pending[key], self.reserved[key]
        self.swapped -= set(ids)
        self.ended(ids)

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def truncate(self, data):
        for key in self.some(data, self.resident())[:1]:
            length = data.draw(st.integers(0, len(self.tokens[key])))
            self.cache.truncate(key, length)
            self.tokens[key], self.pending[key], self.reserved[key] = self.tokens[key][:length], [], 0
            self.ended([key])

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def swap_out(self, data):
        ids = self.some(data, self.resident())
        self.cache.swap_out(ids)
        self.swapped |= set(ids)
        self.pending |= {key: [] for key in ids}
        self.reserved |= dict.fromkeys(ids, 0)
        self.ended(ids)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        ids = self.some(data, self.swapped)
        before = books(self.cache)
        try:
            self.cache.swap_in(ids)
        except xattn.OutOfPagesError:
            assert_unchanged(before, self.cache)
        else:
            self.swapped -= set(ids)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def use_swapped(self, data):
        (key,) = self.some(data, self.swapped)[:1]
        others = self.some(data, self.resident(), least=0)
        before = books(self.cache)
        calls = (
            lambda: self.cache.reserve([*others, key], 1),
            lambda: self.cache.advance([*others, key], 0),
            lambda: self.cache.fork(key, "new"),
            lambda: self.cache.truncate(key, 0),
            lambda: self.cache.swap_out([*others, key]),
        )
        for call in calls:
            with pytest.raises(ValueError, match="swap"):
                call()
        assert_unchanged(before, self.cache)

    @precondition(lambda self: self.step)
    @rule(seqlen_q=st.integers(1, 3))
    def attend(self, seqlen_q):
        q = torch.randn(len(self.step), seqlen_q, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        table, lengths = self.cache.page_table, self.cache.seqlens_k
        kw = {"causal": True, "softmax_scale": 1e-3}
        for layer in range(self.cache.num_layers):
            cache = self.cache.layer(layer)
            out = xattn.attention_paged(q, *cache, table, lengths, kv_layout=self.cache.kv_layout, **kw)
            for i, key in enumerate(self.step):
                k, v = (t[None, layer] for t in self.values(self.tokens[key]))
                torch.testing.assert_close(out[i : i + 1], xattn.attention(q[i : i + 1], k, v, **kw))

    @invariant()
    def agrees(self):
        cache = self.cache
        assert_consistent(cache)
        assert set(cache.ids) == set(self.tokens)
        assert cache.lengths(list(self.tokens)) == [len(tokens) for tokens in self.tokens.values()]
        stats = cache.stats()
        assert (stats.sequences, stats.swapped) == (len(self.tokens), len(self.swapped))
        assert stats.tokens == sum(len(self.tokens[key]) for key in self.resident())
        for key in self.resident():
            s = cache._pool.sequences[key]
            assert s.reserved == self.reserved[key]
            numbers = self.tokens[key] + self.pending[key]
            for found, wanted in zip(stored(cache, s.pages, len(numbers)), self.values(numbers), strict=True):
                assert torch.equal(found, wanted)

    @invariant()
    def mirrors(self):
        cache, batch = self.cache, len(self.step or ())
        if self.step is None:
            for name in ("page_table", "seqlens_k", "step"):
                with pytest.raises(RuntimeError, match="reserve"):
                    getattr(cache, name)
        else:
            assert cache.step == tuple(self.step)
            assert cache.page_table.dtype == cache.seqlens_k.dtype == torch.int32
            assert cache.page_table.is_contiguous()
            assert cache.seqlens_k.tolist() == [len(self.tokens[key]) for key in self.step]
            for key, row in zip(self.step, cache.page_table.tolist(), strict=True):
                pages = list(cache._pool.sequences[key].pages)
                assert row == pages + [-1] * (len(row) - len(pages))
        assert (cache._mirror._table[batch:] == -1).all()
        assert (cache._mirror._lengths[batch:] == 0).all()


TestAnyInterleaving = CacheMachine.TestCase


class LateCopies(CacheMachine):
    """The same over a stand-in for streams, on which swapped pages are copied as late as they may be, or earlier."""

    @initialize(seed=st.one_of(st.none(), st.integers(0, 99)), **CACHES | {"num_pages": st.integers(2, 6)})
    def start(self, seed, **sizes):
        super().start(**sizes)
        self.cache._transfers = Transfers(FakeStreams(seed))

    @rule(name=st.sampled_from(("main", "other")))
    def switch_stream(self, name):
        self.cache._transfers._streams.name = name

    @precondition(lambda self: any(self.tokens[key] for key in self.resident()))
    @rule(data=st.data())
    def pages_change_hands(self, data):
        """A sequence leaves, others write where it was, and it comes back: what seldom follows by chance."""
        self.swap_out(data)
        self.whole_step(data)
        self.swap_in(data)


TestAnyInterleavingWithLateCopies = LateCopies.TestCase


# ---------------------------------------------------------------- attention over it
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", (1, 7, 16))
@pytest.mark.parametrize("head_dim_v", (8, 24))
@pytest.mark.parametrize("writer", ("append", "attention_paged"))
def test_attention_over_the_cache_is_attention(layout, page_size, head_dim_v, writer):
    lengths, ids = [5, 0, 16], ["x", "y", "z"]
    pages = sum(-(-(n + 2) // page_size) for n in lengths)  # not one to spare
    cache = make(pages, page_size, 2, 2, 8, head_dim_v, kv_layout=layout)
    offsets = [0, 5, 5, 21]
    old_k, old_v = new_tokens(cache, offsets[-1], seed=1)
    cache.reserve(ids, lengths)
    for layer in range(2):
        cache.append(layer, old_k[layer], old_v[layer], offsets)
    cache.advance(ids, lengths)
    cache.reserve(ids, 2)
    assert cache.num_free_pages == 0
    k, v = new_tokens(cache, 3, 2, seed=2)
    q = torch.randn(3, 2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    kw = {"causal": True, "backend": "reference"}
    for layer in range(2):
        caches = cache.layer(layer)
        if writer == "append":
            cache.append(layer, k[layer], v[layer])
            out = xattn.attention_paged(q, *caches, cache.page_table, cache.seqlens_k + 2, kv_layout=layout, **kw)
        else:
            new = {"k_new": k[layer], "v_new": v[layer], "kv_layout": layout}
            out = xattn.attention_paged(q, *caches, cache.page_table, cache.seqlens_k, **new, **kw)
        for b, key in enumerate(ids):
            rows = slice(offsets[b], offsets[b + 1])
            dense_k, dense_v = (torch.cat((old[layer, rows], t[layer, b]))[None] for old, t in ((old_k, k), (old_v, v)))
            torch.testing.assert_close(out[b : b + 1], xattn.attention(q[b : b + 1], dense_k, dense_v, **kw))
            assert cache.length(key) == lengths[b], "nothing is committed before advance"
    cache.advance(ids, 2)
    assert cache.seqlens_k.tolist() == cache.lengths(ids) == [n + 2 for n in lengths]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2))
def test_pages_keep_their_bits(layout, dtype):
    cache = make(6, 4, dtype=dtype, kv_layout=layout)
    given = torch.bfloat16 if dtype.itemsize == 1 else dtype
    k, v = new_tokens(cache, 1, 6, dtype=given)
    cache.reserve(["a"], 6)
    for layer in range(2):
        cache.append(layer, k[layer], v[layer], **({"k_scale": 0.5, "v_scale": 2.0} if dtype.itemsize == 1 else {}))
    cache.advance(["a"], 6)
    scales = (0.5, 2.0) if dtype.itemsize == 1 else (1.0, 1.0)
    wanted = [(t[:, 0].float() / scale).to(dtype).float() for t, scale in zip((k, v), scales, strict=True)]

    cache.fork("a", "b")
    cache.reserve(["b"], 1)  # copies the half-filled page
    cache.swap_out(["a", "b"])
    cache.k.view(torch.uint8).fill_(0xFF)  # NaN in every dtype here
    cache.v.view(torch.uint8).fill_(0xFF)
    cache.swap_in(["b", "a"])
    for key in ("a", "b"):
        for found, token in zip(read(cache, key), wanted, strict=True):
            assert found.dtype == dtype
            assert torch.equal(found.float(), token)


def test_append_applies_rotary_at_the_tokens_positions():
    cache = make(num_layers=1)
    angles = torch.arange(10.0)[:, None]
    rotary = xattn.Rotary(angles.cos(), angles.sin())
    write(cache, ["a"], 3)
    cache.reserve(["a"], 2)
    k, v = new_tokens(cache, 1, 2)
    cache.append(0, k[0], v[0], rotary=rotary)
    cache.advance(["a"], 2)
    found_k, found_v = read(cache, "a")
    assert torch.equal(found_k[:, 3:], rotary.apply(k[0], torch.tensor([[3, 4]])))
    assert torch.equal(found_v[:, 3:], v[0])


# ---------------------------------------------------------------- pages
def test_reserve_is_all_or_nothing():
    cache = make(5, 4)
    write(cache, ["a"], 6)
    before = books(cache)
    with pytest.raises(xattn.OutOfPagesError, match="4 pages are needed, 3 of 5 are free"):
        cache.reserve(["a", "b"], [3, 9])
    assert_unchanged(before, cache)
    assert cache.ids == ("a",)
    cache.reserve(["a", "b"], [2, 9])
    assert cache.num_free_pages == 0


def test_reserve_counts_the_copies():
    cache = make(5, 4)
    write(cache, ["a"], 6)
    for key in "bcd":
        cache.fork("a", key)
    assert cache.num_free_pages == 3
    assert cache.stats().shared == 2
    before = copy.deepcopy(books(cache))
    with pytest.raises(xattn.OutOfPagesError, match="4 pages are needed, 3 of 5 are free"):
        cache.reserve(["a", "b", "c", "d"], [1, 1, 1, 4])
    assert_unchanged(before, cache)
    cache.reserve(["a", "b", "c", "d"], 2)  # three get a copy, and the last one keeps the page
    assert cache.num_free_pages == 0
    assert cache.stats().shared == 1
    assert_consistent(cache)


def test_beams_diverge_behind_a_shared_prefix():
    cache = make(6, 4)
    k, v = write(cache, [0], 5)
    cache.fork(0, 1)
    new_k, new_v = write(cache, [1, 0], 2, seed=1)
    for key, row in ((1, 0), (0, 1)):
        found = read(cache, key)
        for token, old, new in zip(found, (k, v), (new_k, new_v), strict=True):
            assert torch.equal(token, torch.cat((old[:, 0], new[:, row]), 1))
    cache.fork(1, "winner")
    cache.free([0, 1])
    assert torch.equal(read(cache, "winner")[0], torch.cat((k[:, 0], new_k[:, 0]), 1))


def test_a_reservation_lasts_until_it_is_committed_or_truncated():
    cache = make(8, 4)
    cache.reserve(["a"], 9)
    cache.reserve(["a"], 1)
    assert cache.num_free_pages == 5
    k, v = new_tokens(cache, 1, 9)
    cache.append(0, k[0], v[0])
    cache.advance(["a"], 2)  # of nine proposed tokens two were accepted
    with pytest.raises(ValueError, match="8 tokens for 'a'; allowed: up to the 7"):
        cache.append(0, k[0, :, :8], v[0, :, :8])
    cache.truncate("a", 2)
    assert cache.num_free_pages == 7
    cache.truncate("a", 0)
    assert cache.num_free_pages == 8
    assert cache.ids == ("a",)


def test_swapped_sequences_leave_others_alone_and_share_again():
    cache = make(4, 4)
    k, v = write(cache, ["a"], 6)
    cache.fork("a", "b")
    cache.fork("a", "c")
    cache.swap_out(["a", "b"])
    assert cache.num_free_pages == 2
    assert torch.equal(read(cache, "c")[0], k[:, 0])
    cache.swap_in(["a", "b"])
    assert cache.num_free_pages == 0
    assert cache.stats().shared == 2
    for key in "abc":
        assert torch.equal(read(cache, key)[1], v[:, 0])
    cache.swap_out(["a", "b"])
    cache.swap_in(["b"])
    before = books(cache)
    with pytest.raises(xattn.OutOfPagesError, match="2 pages are needed, 0 of 4 are free"):
        cache.swap_in(["a"])
    assert_unchanged(before, cache)
    cache.free(["a", "c"])
    assert torch.equal(read(cache, "b")[0], k[:, 0])


# ---------------------------------------------------------------- mirrors
def test_mirrors_stay_where_they_are():
    cache = make(16, 4)
    cache.preallocate(4, 32)
    write(cache, ["a", "b"], 3)
    table, lengths = cache.page_table, cache.seqlens_k
    assert table.shape == (2, 8)
    write(cache, ["b", "c"], 20)
    assert (cache.page_table.data_ptr(), cache.seqlens_k.data_ptr()) == (table.data_ptr(), lengths.data_ptr())
    assert cache.page_table.stride() == table.stride()
    assert torch.equal(table, cache.page_table), "a captured view shows the later step"
    assert lengths.tolist() == [23, 20]
    cache.reserve(["a"], 0)
    assert table.tolist()[1] == [-1] * 8
    assert lengths.tolist() == [3, 0]
    cache.free(["a"])
    assert (table == -1).all()
    assert (lengths == 0).all()


def test_mirrors_grow_and_can_be_replaced_in_a_step():
    cache = make(16, 1)
    cache.reserve([], 0)
    assert cache.page_table.shape == (0, 0)
    cache.reserve([0, 1, 2], 3)
    assert cache.page_table.shape == (3, 4)
    table = cache.page_table.clone()
    cache.preallocate(0, 10**9)
    assert cache.page_table.shape == (3, 16), "no sequence has more pages than there are"
    assert torch.equal(cache.page_table[:, :4], table)
    assert (cache.page_table[:, 4:] == -1).all()
    cache = make(5, 1)
    cache.reserve(["a"], 5)
    assert cache.page_table.shape == (1, 5)


# ---------------------------------------------------------------- threads
def test_threads_share_a_cache():
    cache = make(64, 2, num_layers=1)
    driving, failures = threading.Lock(), []

    def work(me):
        try:
            for turn in range(30):
                mine, beam = (me, turn), (me, turn, "beam")
                with driving:  # one thread at a time drives a step
                    k, _ = write(cache, [mine], 3, seed=me)
                cache.fork(mine, beam)
                cache.swap_out([beam])
                cache.free([mine])
                cache.stats()
                cache.swap_in([beam])
                with driving:
                    assert torch.equal(read(cache, beam)[0], k[:, 0])
                cache.free([beam])
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert_consistent(cache)
    assert cache.num_free_pages == 64


# ---------------------------------------------------------------- errors
SIZES = {"num_pages": 8, "page_size": 4, "num_layers": 1, "num_heads_kv": 1, "head_dim": 2}


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [({name: 0}, ValueError, f"{name}: got 0; allowed: a whole number from 1") for name in SIZES]
    + [({name: 2.0}, TypeError, f"{name}: got float") for name in SIZES]
    + [
        ({"head_dim_v": -1}, ValueError, "head_dim_v: got -1"),
        ({"num_pages": True}, TypeError, "num_pages: got bool"),
        ({"dtype": torch.int8}, TypeError, "dtype: got torch.int8; allowed: fp64"),
        ({"dtype": "bf16"}, TypeError, "dtype: got bf16"),
        ({"kv_layout": "HDN"}, ValueError, "kv_layout: got 'HDN'; allowed: 'NHD' or 'HND'"),
    ],
)
def test_constructor_errors(changed, error, text):
    with pytest.raises(error, match=text):
        PagedKVCache(**(SIZES | changed))


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"device": "foo"}, ValueError, "device: got 'foo'; allowed: a torch device"),
        ({"device": "cuda:77"}, ValueError, "device: got 'cuda:77'; allowed: .*cpu"),
        ({"device": 1.5}, TypeError, "device: got float; allowed: "),
        ({"dtype": []}, TypeError, r"dtype: got \[\]; allowed: fp64"),
        ({"num_pages": 2**50}, MemoryError, "num_pages.*: got a cache of .* GiB; allowed: what fits"),
        ({"num_layers": 2**62}, MemoryError, "num_pages.*: got a cache of .* GiB; allowed: what fits"),
    ],
)
def test_places_and_sizes_that_are_not_there(changed, error, text):
    with pytest.raises(error, match=text):
        PagedKVCache(**(SIZES | changed))


def test_numbers_of_numpy():
    cache = PagedKVCache(**{name: np.int64(n) for name, n in SIZES.items()})
    assert all(type(n) is int for n in (cache.num_pages, cache.page_size, cache.num_layers))
    cache.reserve([np.int64(1)], np.int32(3))
    cache.append(np.int64(0), torch.zeros(1, 2, 1, 2).bfloat16(), torch.zeros(1, 2, 1, 2).bfloat16())
    cache.advance([1], [np.uint8(2)])
    assert cache.length(1) == 2 and type(cache.length(1)) is int


def test_repr():
    cache = make(8, 4)
    cache.reserve(["a"], 5)
    text = "PagedKVCache(2 layers, 8 pages of 4 tokens, NHD, torch.float64, cpu: 1 sequences, 6 pages free)"
    assert repr(cache) == text


@pytest.mark.parametrize("how", [copy.deepcopy, lambda c: copy.deepcopy(torch.nn.ModuleList([Holder(c)]))[0].cache])
@pytest.mark.parametrize("inference", [False, True])
def test_a_deep_copy_is_a_cache_of_its_own(how, inference):
    class Id:  # equal to itself only
        pass

    cache, me = make(12, 4), Id()
    write(cache, ["a", me, "out"], 6)
    cache.fork("a", "b")
    cache.swap_out(["out"])
    cache.reserve(["a", me], 2)
    before = books(cache)
    with torch.inference_mode(inference):
        other = how(cache)
    assert other.step == ("a", me) and repr(other) == repr(cache)
    assert torch.equal(other.page_table, cache.page_table) and torch.equal(other.seqlens_k, cache.seqlens_k)
    one, two = (read(c, me) for c in (copy.deepcopy(cache), other))
    assert all(map(torch.equal, one, two))
    other.swap_in(["out"])
    write(other, [me, "new"], 3)
    other.free(["a", "b"])
    assert_consistent(other)
    assert_unchanged(before, cache)


class Holder(torch.nn.Module):
    def __init__(self, cache):
        super().__init__()
        self.cache = cache


def test_steps_inside_and_outside_inference_mode():
    with torch.inference_mode():
        inside = make(8, 4)
        write(inside, ["a"], 2)
    for cache in (inside, make(8, 4)):
        for turn, mode in enumerate((True, False, True, False)):
            with torch.inference_mode(mode):
                write(cache, [("x", turn, n) for n in range(turn)] + ["a"], 2)
                cache.free([("x", turn, n) for n in range(turn)])
                cache.preallocate(turn, 8)
        assert_consistent(cache)


def test_defaults():
    cache = PagedKVCache(**SIZES)
    assert cache.k.shape == cache.v.shape == (1, 8, 4, 1, 2)
    assert cache.k.dtype == cache.dtype == torch.bfloat16
    assert PagedKVCache(**SIZES, kv_layout="HND", head_dim_v=3).v.shape == (1, 8, 1, 4, 3)


def tokens(batch, n, dtype=torch.float64):
    return torch.zeros(batch, n, 1, 2, dtype=dtype), torch.zeros(batch, n, 1, 3, dtype=dtype)


def packed(total):
    return tuple(t.squeeze(0) for t in tokens(1, total))


# The cache of these: "a" and "b" with 6 tokens and 2 reserved, the step; "out" swapped out.
ERRORS = {
    "a string for ids": (lambda c: c.reserve("ab", 1), TypeError, "ids: got str"),
    "a number for ids": (lambda c: c.free(3), TypeError, "ids: got int"),
    "a tensor for ids": (lambda c: c.reserve(torch.arange(2), 1), TypeError, "ids: got Tensor"),
    "tensors as ids": (lambda c: c.reserve([torch.tensor(1)], 1), TypeError, "ids: got a tensor"),
    "ids without hash": (lambda c: c.reserve([["a"]], 1), TypeError, "ids: got .* hashable"),
    "an id twice": (lambda c: c.reserve(["a", "a"], 1), ValueError, "ids: got .*each id once"),
    "a fork onto itself": (lambda c: c.fork("a", "a"), ValueError, "each id once"),
    "a negative count": (lambda c: c.reserve(["a"], -1), ValueError, "n: got -1"),
    "a count that is no number": (lambda c: c.reserve(["a"], 1.5), TypeError, "n: got float"),
    "a count too few": (lambda c: c.reserve(["a", "b"], [1]), ValueError, "n: got 1 numbers; allowed: a number, or 2"),
    "reserve swapped out": (lambda c: c.reserve(["a", "out"], 1), ValueError, "ids: got 'out', which is swapped out"),
    "advance swapped out": (lambda c: c.advance(["a", "out"], 1), ValueError, "ids: got 'out', which is swapped out"),
    "fork swapped out": (lambda c: c.fork("out", "new"), ValueError, "src: got 'out', which is swapped out"),
    "truncate swapped out": (lambda c: c.truncate("out", 0), ValueError, "id: got 'out', which is swapped out"),
    "swap out twice": (lambda c: c.swap_out(["a", "out"]), ValueError, "ids: got 'out', which is swapped out"),
    "swap in what is here": (lambda c: c.swap_in(["out", "a"]), ValueError, "ids: got 'a', which is in the cache"),
    "advance unknown": (lambda c: c.advance(["a", "new"], 1), ValueError, "ids: got the unknown id 'new'"),
    "fork unknown": (lambda c: c.fork("new", "newer"), ValueError, "src: got the unknown id 'new'"),
    "fork onto another": (lambda c: c.fork("a", "b"), ValueError, "dst: got 'b', which exists"),
    "fork onto swapped out": (lambda c: c.fork("a", "out"), ValueError, "dst: got 'out', which exists"),
    "free unknown": (lambda c: c.free(["a", "new"]), ValueError, "ids: got the unknown id 'new'"),
    "truncate unknown": (lambda c: c.truncate("new", 0), ValueError, "id: got the unknown id 'new'"),
    "swap in unknown": (lambda c: c.swap_in(["out", "new"]), ValueError, "ids: got the unknown id 'new'"),
    "length of unknown": (lambda c: c.length("new"), ValueError, "ids: got the unknown id 'new'"),
    "advance too far": (lambda c: c.advance(["a", "b"], [1, 3]), ValueError, "n: got 3 tokens for 'b'; .* the 2"),
    "truncate to more": (lambda c: c.truncate("a", 7), ValueError, "length: got 7; allowed: up to the 6 tokens"),
    "truncate below 0": (lambda c: c.truncate("a", -1), ValueError, "length: got -1"),
    "a layer too many": (lambda c: c.append(2, *tokens(2, 1)), ValueError, "layer: got 2; allowed: 0 to 1"),
    "a negative layer": (lambda c: c.layer(-1), ValueError, "layer: got -1"),
    "another batch": (lambda c: c.append(0, *tokens(3, 1)), ValueError, r"k_new: got shape \(3, 1, 1, 2\)"),
    "a batch of one": (lambda c: c.append(0, *tokens(1, 1)), ValueError, r"k_new: got shape .*allowed: \(2, n"),
    "packed, no offsets": (lambda c: c.append(0, *packed(2)), ValueError, "packed with cu_seqlens_new"),
    "too many tokens": (lambda c: c.append(0, *tokens(2, 3)), ValueError, "k_new: got 3 tokens for 'a'; .* the 2"),
    "too many for one": (lambda c: c.append(0, *packed(4), [0, 1, 4]), ValueError, "k_new: got 3 tokens for 'b'"),
    "offsets too few": (lambda c: c.append(0, *packed(4), [0, 2]), ValueError, "cu_seqlens_new: got 2 offsets"),
    "offsets past the end": (lambda c: c.append(0, *packed(3), [0, 2, 4]), ValueError, "cu_seqlens_new: got .* the 3"),
    "offsets that decrease": (lambda c: c.append(0, *packed(4), torch.tensor([0, 2, 1])), ValueError, "never decreas"),
    "offsets not from 0": (lambda c: c.append(0, *packed(4), [1, 2, 4]), ValueError, "cu_seqlens_new: got .* from 0"),
    "offsets as floats": (lambda c: c.append(0, *packed(4), torch.tensor([0.0, 1, 2])), TypeError, "cu_seqlens_new"),
    "offsets as a number": (lambda c: c.append(0, *packed(4), 4), TypeError, "cu_seqlens_new: got int"),
    "another dtype": (lambda c: c.append(0, *tokens(2, 1, torch.float32)), TypeError, "k_new: got torch.float32"),
    "k and v swapped": (lambda c: c.append(0, *tokens(2, 1)[::-1]), ValueError, "k_new: got shape"),
    "no v": (lambda c: c.append(0, tokens(2, 1)[0], None), TypeError, "v_new: got NoneType"),
    "not a rotary": (lambda c: c.append(0, *tokens(2, 1), rotary=1), TypeError, "rotary: got int"),
    "a gradient": (
        lambda c: c.append(0, *(t.requires_grad_() for t in tokens(2, 1))),
        ValueError,
        "k_new: .*no_grad",
    ),
    "a max_batch beyond memory": (lambda c: c.preallocate(2**60, 0), MemoryError, "max_batch, max_seqlen: got mirrors"),
    "a max_seqlen beyond numbers": (lambda c: c.preallocate(2**60, 2**60), MemoryError, "max_batch, max_seqlen: got"),
    "no dimensions": (lambda c: c.append(0, torch.ones(()), torch.ones(()), [0, 1]), ValueError, "k_new: got shape"),
    "a nested tensor": (
        lambda c: c.append(0, torch.nested.nested_tensor([torch.ones(2, 1, 2)] * 2), tokens(2, 1)[1]),
        ValueError,
        "k_new: got a nested tensor; allowed: a dense",
    ),
    "a negative max_batch": (lambda c: c.preallocate(-1, 1), ValueError, "max_batch: got -1"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_change_nothing(name):
    call, error, text = ERRORS[name]
    cache = make(12, 4)
    write(cache, ["a", "b", "out"], 6)
    cache.swap_out(["out"])
    cache.reserve(["a", "b"], 2)
    before = books(cache)
    with pytest.raises(error, match=text):
        call(cache)
    assert_unchanged(before, cache)


@pytest.mark.parametrize(
    "end",
    (
        lambda c: c.free(["b"]),
        lambda c: c.truncate("b", 6),
        lambda c: c.swap_out(["b"]),
    ),
)
def test_a_step_ends_with_one_of_its_sequences(end):
    cache = make(12, 4)
    write(cache, ["a", "b", "c"], 6)
    cache.reserve(["a", "c"], 1)
    cache.fork("b", "b2")
    end(cache)
    assert cache.step == ("a", "c")
    cache.reserve(["a", "b2"], 1)
    cache.free(["b2"])
    for call in (lambda: cache.append(0, *tokens(2, 1)), lambda: cache.page_table, lambda: cache.seqlens_k):
        with pytest.raises(RuntimeError, match=r"calls that follow reserve\(ids, n\)"):
            call()
    cache.reserve(["a", "c"], 1)
    cache.append(0, *tokens(2, 1))
