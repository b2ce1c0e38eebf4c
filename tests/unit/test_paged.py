"""Paged caches on every target, at the level of ``attention_paged``: reading, and writing new tokens before that."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import arguments
import cases
import oracle
import pytest
import torch
from torch import Tensor

import xattn
from xattn.inputs import NO_BOUND, Inputs
from xattn.segments import segments


@cases.parametrize("paged")
def test_case(target, case):
    cases.check(cases.make(case, target.device), target)


# ---------------------------------------------------------------- new tokens
def bits(x: Tensor) -> Tensor:
    """Comparable bit for bit, NaN too."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


class Step:
    """A cache with ``old`` tokens of each sequence, and ``new`` ones to be written by the call."""

    def __init__(
        self,
        dtype="fp32",
        page_size=7,
        layout="NHD",
        old=(5, 0, 14),
        new=(3, 3, 3),
        packed=False,
        dims=(16, 16),
        spare=0,
    ):
        self.dtype, self.layout, self.page_size, self.old, self.new, self.packed = (
            dtype,
            layout,
            page_size,
            old,
            new,
            packed,
        )
        lengths = tuple((n, n + m) for n, m in zip(new, old, strict=True))
        base = cases.Case(
            "paged", dtype, dims, (2, 3), lengths=lengths, page_size=page_size, packed=packed, spare=spare
        )
        call = cases.make(replace(base, kv_layout=layout))
        t = self.tensors = call.tensors
        self.other = call.other
        self.caches = [t["k_cache"], t["v_cache"]]
        self.given: list[list[Tensor]] = [[], []]  # by cache and sequence, (tokens, heads, width)
        for cache, given in zip(self.caches, self.given, strict=True):
            for b, (count, first) in enumerate(zip(new, old, strict=True)):
                tokens = []
                for n in range(first, first + count):
                    tokens.append(self.at(cache, b, n).clone())
                    self.at(cache, b, n).view(torch.uint8).fill_(0x7F)  # not yet written
                given.append(torch.stack(tokens) if tokens else cache.new_zeros((0, 2, cache.shape[3])))
        t["seqlens_k"] = torch.tensor(old, dtype=torch.int32)
        for name, given in zip(("k_new", "v_new"), self.given, strict=True):
            wide = [x if x.dtype.itemsize > 1 else x.to(torch.bfloat16) for x in given]
            t[name] = torch.cat(wide) if packed else torch.stack(wide)
        if packed:
            t["cu_seqlens_new"] = torch.tensor([0, *itertools.accumulate(new)])
            t["k_new"], t["v_new"] = (
                torch.cat([t[n], t[n].new_full((spare, *t[n].shape[1:]), torch.nan)]) for n in ("k_new", "v_new")
            )

    def at(self, cache: Tensor, b: int, n: int) -> Tensor:
        """Token n of sequence b in a cache: a view (heads, width)."""
        page, slot = int(self.tensors["page_table"][b, n // self.page_size]), n % self.page_size
        return cache[page, slot] if self.layout == "NHD" else cache[page, :, slot]

    def arguments(self, **more: Any) -> tuple[list, dict]:
        given = self.tensors | self.other | more
        return [given.pop(n) for n in cases.POSITIONAL["paged"]], given

    def run(self, target, **more):
        args, kwargs = self.arguments(**more)
        return xattn.attention_paged(*args, backend=target.backend, **kwargs)

    def expected(self, dtype: torch.dtype, q: Tensor | None = None, **options) -> Tensor:
        """Attention over the caches as they are now, all tokens there."""
        t = self.tensors
        lengths = [n + m for n, m in zip(self.old, self.new, strict=True)]
        q = t["q"].to(dtype) if q is None else q
        caches = (c.to(dtype) for c in self.caches)
        return oracle.paged(
            q, *caches, t["page_table"], lengths, cu_seqlens_q=t.get("cu_seqlens_q"), kv_layout=self.layout, **options
        )[0]


TARGETS = [t for t in cases.targets() if cases.values_for("paged", t)[0]]
per_target = pytest.mark.parametrize("target", [t for t in TARGETS if t.device == "cpu"], ids=str)


@per_target
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_new_tokens_are_written_and_seen(target, packed, layout, page_size, dtype):
    new = (3, 0, 9) if packed else (3, 3, 3)
    step = Step(dtype, page_size, layout, new=new, packed=packed, spare=2 if packed else 0)
    before = [c.clone() for c in step.caches]
    lengths = step.tensors["seqlens_k"].clone()
    out = step.run(target, causal=True)
    for b, (count, first) in enumerate(zip(new, step.old, strict=True)):
        for n in range(count):
            for cache, old, given in zip(step.caches, before, step.given, strict=True):
                assert torch.equal(bits(step.at(cache, b, first + n)), bits(given[b][n]))
                step.at(old, b, first + n).copy_(given[b][n])
    for cache, wanted in zip(step.caches, before, strict=True):
        assert torch.equal(bits(cache), bits(wanted)), "something else was written"
    assert torch.equal(step.tensors["seqlens_k"], lengths)
    truth, plain = (step.expected(d, causal=True) for d in (torch.float64, cases.DTYPES[dtype]))
    oracle.assert_close("out", out, truth, plain)


@per_target
@pytest.mark.parametrize("layout", ["heads first", "every 2nd row", "expanded heads", "last dim"])
def test_strides_of_new_tokens(target, layout):
    plain, step = Step(), Step()
    for name in ("k_new", "v_new"):
        step.tensors[name] = cases.laid_out(step.tensors[name], layout)
        plain.tensors[name] = step.tensors[name].contiguous()
    assert torch.equal(step.run(target), plain.run(target))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(step.caches, plain.caches, strict=True))


@per_target
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 8])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rotary(target, interleaved, width, packed, dtype):
    new = (3, 0, 4) if packed else (3, 3, 3)
    step = Step(dtype, new=new, packed=packed, spare=2 if packed else 0)
    angle = torch.arange(18)[:, None] * 0.7 ** torch.arange(width)  # exactly the positions there are
    cos, sin = angle.cos(), angle.sin()
    positions = [torch.arange(n) + m for n, m in zip(new, step.old, strict=True)]
    turned = {}
    for name in ("q", "k_new"):
        x = step.tensors[name]
        rows = x.split([*new, *([x.shape[0] - sum(new)] if packed else [])]) if packed else x
        for d in (torch.float64, cases.DTYPES[dtype]):
            parts = [oracle.rotate(r.to(d), p, cos, sin, interleaved) for r, p in zip(rows, positions, strict=False)]
            rest = [x[sum(new) :].to(d)] if packed else []
            turned[name, d] = torch.cat(parts + rest) if packed else torch.stack(parts)
    out = step.run(target, causal=True, rotary=xattn.Rotary(cos, sin, interleaved))
    wide, narrow = torch.float64, cases.DTYPES[dtype]
    tokens = [(b, m + n) for b, m in enumerate(step.old) for n in range(new[b])]
    written = torch.stack([step.at(step.caches[0], b, n) for b, n in tokens])
    shape = written.shape
    flat = {d: turned["k_new", d][: sum(new)] if packed else turned["k_new", d].flatten(0, 1) for d in (wide, narrow)}
    oracle.assert_close("written keys", written, flat[wide].view(shape), flat[narrow].view(shape))
    truth, plain = (step.expected(d, turned["q", d], causal=True) for d in (wide, narrow))
    oracle.assert_close("out", out, truth, plain)


@per_target
def test_rotary_without_new_tokens_turns_q(target):
    step = Step(new=(0, 0, 0), old=(5, 3, 9))
    q = step.tensors["q"] = torch.randn(3, 2, 6, 16)
    angle = torch.arange(9)[:, None] * 0.7 ** torch.arange(8)
    del step.tensors["k_new"], step.tensors["v_new"]
    out = step.run(target, rotary=xattn.Rotary(angle.cos(), angle.sin()))
    places = torch.tensor(step.old)[:, None] - 2 + torch.arange(2)
    turned = {}
    for d in (torch.float64, torch.float32):
        rows = [oracle.rotate(x.to(d), p, angle.cos(), angle.sin(), False) for x, p in zip(q, places, strict=True)]
        turned[d] = torch.stack(rows)
    oracle.assert_close("out", out, *(step.expected(d, turned[d]) for d in turned))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"])
@pytest.mark.parametrize("scales", [False, True])
def test_fp8_caches_are_scaled_and_clamped(dtype, scales):
    step = Step(f"bf16/{dtype}")
    target = cases.Target("reference", "cpu")
    top = torch.finfo(cases.DTYPES[dtype]).max
    k_new = torch.randn(3, 3, 2, 16, dtype=torch.bfloat16) * top / 2
    k_new[1, 2, 0, 3] = torch.nan
    options = {"k_scale": 0.5 + torch.rand(3, 2), "v_scale": torch.tensor(2.0)} if scales else {}
    step.tensors["k_new"] = k_new
    step.run(target, **options)
    wanted = k_new.float() / (options["k_scale"][:, None, :, None] if scales else 1)
    wanted = wanted.clamp(-top, top).to(cases.DTYPES[dtype])
    for b, n in itertools.product(range(3), range(3)):
        got = step.at(step.caches[0], b, step.old[b] + n)
        assert torch.equal(bits(got)[~got.float().isnan()], bits(wanted[b, n])[~wanted[b, n].float().isnan()])
        assert torch.equal(got.float().isnan(), wanted[b, n].float().isnan())


@per_target
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_v_cache_that_is_a_view_of_k_cache_needs_no_v_new(target, layout):
    step = Step(layout=layout, dims=(24, 24))
    step.caches[1] = step.tensors["v_cache"] = step.caches[0][..., :16]
    step.tensors["v_new"] = None
    out = step.run(target, causal=True)
    truth, plain = (step.expected(d, causal=True) for d in (torch.float64, torch.float32))
    oracle.assert_close("out", out, truth, plain)


@per_target
def test_nothing_new(target):
    step = Step(new=(0, 0, 0), old=(5, 3, 9))
    step.tensors["q"] = torch.randn(3, 2, 6, 16)
    before = [c.clone() for c in step.caches]
    out = step.run(target)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(step.caches, before, strict=True))
    oracle.assert_close("out", out, step.expected(torch.float64), step.expected(torch.float32))


# ---------------------------------------------------------------- bad values raise before anything is written
def _change(name, index, value):
    def change(step):
        step.tensors[name] = step.tensors[name].clone()
        step.tensors[name][index] = value

    return change


def _narrow(step):
    step.tensors["page_table"] = step.tensors["page_table"][:, :2]


def _short_rotary(step):
    step.other["rotary"] = xattn.Rotary(torch.ones(16, 2), torch.ones(16, 2))


BAD_VALUES = {
    "no room": (_narrow, "room"),
    "page id below 0": (_change("page_table", (0, 1), -1), "page id"),
    "page id too large": (_change("page_table", (2, 2), 9999), "page id"),
    "old page id bad": (_change("page_table", (2, 0), -7), "page id"),
    "length below 0": (_change("seqlens_k", 1, -1), "seqlens_k"),
    "length below 0, nothing left": (_change("seqlens_k", 1, -3), "seqlens_k"),
    "length too large": (_change("seqlens_k", 1, 10**6), "room"),
    "rotary too short": (_short_rotary, "rotary"),
}


@per_target
@pytest.mark.parametrize("change, words", BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values(target, change, words):
    step = Step()
    change(step)
    before = [c.clone() for c in step.caches]
    with pytest.raises(xattn.DeviceValueError, match=words):
        step.run(target)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(step.caches, before, strict=True)), "the cache was written"


@per_target
@pytest.mark.parametrize(
    "name, value",
    [
        ("cu_seqlens_new", [0, 4, 3, 9]),
        ("cu_seqlens_new", [1, 3, 6, 9]),
        ("cu_seqlens_new", [0, 3, 6, 99]),
        ("cu_seqlens_q", [0, 4, 3, 9]),
        ("cu_seqlens_q", [0, 3, 6, 99]),
        ("max_seqlen_q", 2),
    ],
)
def test_bad_offsets(target, name, value):
    step = Step(packed=True)
    before = [c.clone() for c in step.caches]
    with pytest.raises(xattn.DeviceValueError):
        step.run(target, **{name: torch.tensor(value) if isinstance(value, list) else value})
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(step.caches, before, strict=True)), "the cache was written"


@per_target
def test_a_refusal_writes_nothing(target):
    step = Step()
    before = [c.clone() for c in step.caches]
    backend = "cdna"
    with pytest.raises(xattn.UnsupportedError):
        step.run(cases.Target(backend, "cpu"))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(step.caches, before, strict=True)), "the cache was written"


# ---------------------------------------------------------------- dropout
def dropout_cache(batch: int, seqlen: int, page_size: int, device: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v of whole sequences, and a page table for k and v cut into pages."""
    columns = -(-seqlen // page_size)
    g = torch.Generator().manual_seed(seqlen)
    q = torch.randn(batch, seqlen, 4, 16, generator=g).to(device)
    k, v = (torch.randn(batch, columns * page_size, 2, 16, generator=g).to(device) for _ in range(2))
    return q, k, v, torch.arange(batch * columns, device=device).view(batch, columns)


by_reference = pytest.mark.parametrize("target", [t for t in cases.targets() if t.backend == "reference"], ids=str)


@by_reference
@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (4, 0)}], ids=str)
@pytest.mark.parametrize("new", [1, 4, 11])
def test_dropout_follows_positions(target, p, options, new):
    """Whole or token by token, paged or dense: the same weights are dropped."""
    q, k, v, table = dropout_cache(2, 11, 4, target.device)
    rng = torch.tensor([5, 6], device=target.device)
    given = {"dropout_p": p, "dropout_rng": rng, "backend": "reference", **options}
    want = xattn.attention(q, k[:, :11], v[:, :11], **given)
    pages = [t.reshape(-1, 4, 2, 16) for t in (k, v)]
    lengths = torch.full((2,), 11, device=target.device)
    got = xattn.attention_paged(q[:, 11 - new :], *pages, table, lengths, **given)
    torch.testing.assert_close(got, want[:, 11 - new :], rtol=1e-5, atol=1e-5)


@by_reference
@pytest.mark.parametrize("append", [False, True])
def test_dropout_is_drawn_from_torchs_generator(target, append):
    q, k, v, table = dropout_cache(2, 8, 4, target.device)
    pages = [t.reshape(-1, 4, 2, 16) for t in (k, v)]
    lengths = torch.full((2,), 7 if append else 8, device=target.device)
    new = {"k_new": k[:, 7:], "v_new": v[:, 7:]} if append else {}
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(
            xattn.attention_paged(q[:, :1], *pages, table, lengths, dropout_p=0.5, backend=target.backend, **new)
        )
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bound, extent", [(NO_BOUND, 32), (0, 0), (9, 9), (99, 32)])
def test_what_is_gathered_ends_at_the_bound(packed, bound, extent):
    """Where the host does not know the lengths."""
    shape = (4, 6, 16) if packed else (2, 2, 6, 16)
    index = {"page_table": (2, 8), "seqlens_k": (2,), **({"cu_seqlens_q": (3,)} if packed else {})}
    x = Inputs(
        kind="paged",
        q=torch.empty(shape, device="meta"),
        **{n: torch.empty(16, 4, 3, 16, device="meta") for n in "kv"},
        **{n: torch.empty(s, dtype=torch.int32, device="meta") for n, s in index.items()},
        kv_layout="NHD",
        max_seqlen_q=2,
        max_seqlen_k=bound,
    )
    found = list(segments(x, 1 << 20))
    assert [s.extent_k for s in found] == [extent]
    assert found[0].gather_k(x.k).shape == (2, extent, 3, 16)


def test_a_cache_of_float64_keeps_its_precision_under_a_scale():
    given = arguments.made("paged")
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in given.items()}
    del wide["rotary"]
    arguments.call("paged", wide | {"k_scale": 3.0, "v_scale": torch.full((2, 2), 7.0)})
    at = (given["page_table"][0, 1].long(), 1)  # the sixth token
    assert torch.equal(wide["k_cache"][at], wide["k_new"][0, 0] / 3)
    assert torch.equal(wide["v_cache"][at], wide["v_new"][0, 0] / 7)


@pytest.mark.parametrize("bound", [0, 4])
def test_a_bound_below_the_lengths_is_an_error(bound):
    given = arguments.made("paged")
    with pytest.raises(xattn.DeviceValueError, match=f"max_seqlen_k: got {bound}; allowed: at least the longest"):
        arguments.call("paged", given | {"max_seqlen_k": bound})


def test_the_plan_names_the_kernel_that_answers():
    """Within batch_invariant() that does not depend on the longest sequence."""
    meta = {"device": "meta", "dtype": torch.bfloat16}
    q, cache = torch.empty(40, 4, 64, **meta), torch.empty(16, 16, 2, 64, **meta)
    table, used, offsets = (torch.empty(shape, device="meta", dtype=torch.int32) for shape in ((2, 4), (2,), (3,)))

    def kernel(longest):
        packed = {"cu_seqlens_q": offsets, "max_seqlen_q": longest}
        plan = xattn.explain(q, cache, cache, table, used, kind="paged", device="sm_80", **packed)
        return dict(plan.config).get("kernel")

    assert (kernel(39), kernel(1)) == (None, "decode")
    with xattn.batch_invariant():
        assert (kernel(39), kernel(1)) == ("decode", "decode")
