"""The append kernel, on the CPU as both layers' lanes, against the torch operations that define it: bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from append_cases import BAD, CASES, TANGLED, WIDE, Case, bits, copied, made
from torch import Tensor

import xattn
from xattn import appends, dispatch, launch, repeats, status
from xattn.append_call import Append
from xattn.status import CODES


def compared(x: Append, target: Any) -> None:
    mine, theirs = copied(x), copied(x)
    found = native(mine, target)
    for got, want in zip(found, appends._by_torch(theirs), strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert got.dtype == want.dtype and torch.equal(bits(got), bits(want))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(bits(getattr(mine, name)), bits(getattr(theirs, name))), name


def native(x: Append, target: Any) -> tuple[Tensor | None, Tensor | None]:
    body = dispatch.get(target.backend).append
    assert body is not None and body.check(x) == ()
    ready = appends.prepared(x, target.backend)
    assert ready is not None
    return ready.of(x)


@pytest.fixture(autouse=True)
def word(monkeypatch):
    """The status word of the CPU, which a GPU has and kernels write."""
    found = torch.zeros(len(CODES), dtype=torch.int32)
    monkeypatch.setattr(status, "word", lambda device: found)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_torchs_operations(target, case, word):
    compared(made(case), target)
    assert not word.any()


def test_rotation_alone(target):
    x = made(Case(rotary="16"))
    alone = replace(x, k_new=None, v_new=None)
    lengths, q = native(alone, target)
    assert lengths is None and q is not None
    want = appends._by_torch(alone)[1]
    assert want is not None and torch.equal(bits(q), bits(want))


def test_without_queries_or_lengths(target):
    for x in (replace(made(Case(rotary="16")), q=None), replace(made(Case()), lengths=False)):
        compared(x, target)


def test_strides(target):
    """Of tokens, tables and caches, in which elements alone lie side by side."""
    x = made(Case(rotary="8"))
    wide = lambda t: torch.cat([t, torch.full_like(t, math.nan)], -1)[..., : t.shape[-1]]  # noqa: E731
    first = lambda t: t.transpose(-3, -2).contiguous().transpose(-3, -2)  # noqa: E731
    k_new, v_new, q = x.k_new, x.v_new, x.q
    assert k_new is not None and v_new is not None and q is not None and x.rotary is not None
    tables = xattn.Rotary(wide(x.rotary.cos), wide(x.rotary.sin))
    columns = torch.stack([x.page_table] * 2, 1)[:, 0]
    compared(replace(x, k_new=wide(k_new), v_new=first(v_new), q=first(q), rotary=tables, page_table=columns), target)
    compared(replace(x, k_new=k_new[..., :1, :].expand(k_new.shape), k_cache=wide(x.k_cache)), target)
    both = torch.stack([x.k_cache, x.v_cache], 2)
    mine, theirs = both.clone(), both.clone()
    native(replace(x, k_cache=mine[:, :, 0], v_cache=mine[:, :, 1]), target)
    appends._by_torch(replace(x, k_cache=theirs[:, :, 0], v_cache=theirs[:, :, 1]))
    assert torch.equal(bits(mine), bits(theirs))


def test_values_of_any_kind(target):
    """NaN and infinity are moved as they are; rotated they stay NaN, as torch's operations make them."""
    x = made(Case())
    assert x.k_new is not None and x.v_new is not None
    x.k_new[0, 0, 0, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0]).bfloat16()
    bits(x.v_new).view(-1)[:3] = torch.tensor([0x7FC1, -1, 0x7F81], dtype=torch.int16)  # NaN of other bits
    compared(x, target)


# ---------------------------------------------------------------- what only the device sees
@pytest.mark.parametrize("name", BAD)
def test_bad_values_as_torchs_operations(target, word, monkeypatch, name):
    """What is written, the results, and what is reported."""
    reported = set()
    monkeypatch.setattr(status, "report", lambda code, bad, *rest: reported.update({code} if bad.any() else ()))
    case, change = BAD[name]
    compared(change(made(case)), target)
    assert {code for code, value in zip(CODES, word.tolist(), strict=True) if value} == reported != set()


@pytest.mark.parametrize("name", [*BAD, *TANGLED])
def test_bad_values_write_nothing_else(target, word, name):
    """Each slot that is written is one that the page table names, whatever there is."""
    case, change = (BAD | TANGLED)[name]
    x = made(case)
    bad = copied(change(x))
    native(bad, target)
    assert word.any() or name == "offsets of q at the ends"
    named = torch.zeros(bad.k_cache.shape[:2], dtype=torch.bool)
    for page in bad.page_table.flatten().tolist():
        if 0 <= page < bad.k_cache.shape[0]:
            named[page] = True
    for cache, before in ((bad.k_cache, x.k_cache), (bad.v_cache, x.v_cache)):
        assert torch.equal(bits(cache)[~named], bits(before)[~named])


@pytest.mark.parametrize("name", ["page id below 0", "no room", "length below 0"])
def test_what_has_a_place_is_written_all_the_same(target, name):
    case, change = BAD[name]
    bad = copied(change(made(replace(case, rotary=""))))
    native(bad, target)
    lengths, page_size = bad.seqlens_k.tolist(), bad.k_cache.shape[1]
    assert bad.k_new is not None
    count = 0
    for b, first in enumerate(lengths):
        for i in range(bad.k_new.shape[1]):
            column, slot = divmod(first + i, page_size)
            if first + i < 0 or column >= bad.page_table.shape[1]:
                continue
            page = int(bad.page_table[b, column])
            if 0 <= page < bad.k_cache.shape[0]:
                assert torch.equal(bits(bad.k_cache[page, slot]), bits(bad.k_new[b, i]))
                count += 1
    assert 3 <= count < 9


def test_a_position_behind_the_tables_takes_row_0(target, word):
    x = made(WIDE)
    assert x.rotary is not None
    short = replace(x, rotary=xattn.Rotary(x.rotary.cos[:10], x.rotary.sin[:10]))
    mine = copied(short)
    _, q = native(mine, target)
    assert q is not None and word.tolist() == [int(code == "rotary") for code in CODES]
    assert x.q is not None
    assert torch.equal(bits(q[2]), bits(short.rotary.apply(x.q[2], torch.zeros(3, dtype=torch.int64))))


# ---------------------------------------------------------------- what the kernel does not answer
REFUSED = {
    "another dtype": lambda x: replace(x, k_cache=x.k_cache.float()),
    "fp64 tables": lambda x: replace(x, rotary=xattn.Rotary(x.rotary.cos.double(), x.rotary.sin.double())),
    "strides": lambda x: replace(x, k_new=x.k_new.transpose(-1, -2).contiguous().transpose(-1, -2)),
    "no sequence": lambda x: replace(
        x, page_table=x.page_table[:0], seqlens_k=x.seqlens_k[:0], k_new=x.k_new[:0], v_new=x.v_new[:0], q=x.q[:0]
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(target, name):
    x = REFUSED[name](made(Case(rotary="16")))
    backend = dispatch.get(target.backend)
    assert backend.append is not None and backend.append.check(x) != ()
    at = target.backend
    said = appends.planned(x, xattn.device.of(torch.device("cpu")), at)
    assert said[0][0] == "append" and said[0][1].startswith("torch operations (")


# ---------------------------------------------------------------- whole calls
@pytest.fixture
def launched(monkeypatch):
    """The symbols of what is launched, in order."""
    noted: list[str] = []
    real = launch.prepare

    def prepare(call):
        prepared = real(call)

        def noting(inputs):
            noted.append(call.symbol)
            return prepared(inputs)

        return noting

    monkeypatch.setattr(launch, "prepare", prepare)
    return noted


@pytest.mark.parametrize("rotary", ["", "16", "8i"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_call_is_two_launches(target, launched, rotary, packed):
    case = Case(packed=packed, rotary=rotary, queries=(3, 3, 3))
    x, y = made(case), made(case)

    def call(x: Append, backend: str) -> Tensor:
        options: dict[str, Any] = {"cu_seqlens_q": x.cu_seqlens_q, "max_seqlen_q": 3 if packed else None}
        options |= {"cu_seqlens_new": x.cu_seqlens_new, "rotary": x.rotary, "causal": True, "backend": backend}
        for cache in (x.k_cache, x.v_cache):
            cache.zero_()
        args = (x.q, x.k_cache, x.v_cache, x.page_table, x.seqlens_k)
        found = xattn.attention_paged(*args, k_new=x.k_new, v_new=x.v_new, **options)
        plan = xattn.explain(*args, k_new=x.k_new, v_new=x.v_new, kind="paged", **options)
        own = backend == target.backend
        assert (dict(plan.config)["append"] == f"kernel of {backend}") == own
        return found

    out = call(x, target.backend)
    assert launched == ["xattn_append", "xattn_decode"]
    want = call(y, "reference")
    assert launched == ["xattn_append", "xattn_decode"], "a fallback appends with torch operations"
    assert torch.equal(bits(x.k_cache), bits(y.k_cache)) and torch.equal(bits(x.v_cache), bits(y.v_cache))
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


def test_the_ops_take_the_kernel_of_the_device(target, launched):
    """append_paged, as PagedKVCache calls it; what was written counts as a change."""
    cache = xattn.PagedKVCache(8, 16, 1, 2, 32, device="cpu")
    cache.k.zero_(), cache.v.zero_()
    cache.reserve(["a", "b"], 3)
    k_cache, _ = cache.layer(0)
    version, k = k_cache._version, torch.randn(2, 3, 2, 32).bfloat16()
    cache.append(0, k, k)
    assert launched == ["xattn_append"] and k_cache._version > version
    assert torch.equal(k_cache[int(cache.page_table[1, 0]), :3], k[1])


# ---------------------------------------------------------------- calls that come again
@pytest.fixture
def on_a_gpu(monkeypatch):
    """Tensors pass for those of a GPU, whose calls are looked up."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)


def paged(x: Append, target: Any, **more: Any) -> Tensor:
    options: dict[str, Any] = {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_new": x.cu_seqlens_new, "rotary": x.rotary}
    options |= {"k_new": x.k_new, "v_new": x.v_new, "causal": True, "backend": target.backend, **more}
    if x.cu_seqlens_q is not None:
        options["max_seqlen_q"] = 9
    return xattn.attention_paged(x.q, x.k_cache, x.v_cache, x.page_table, x.seqlens_k, **options)


@pytest.mark.parametrize("case", [Case(), Case(rotary="16i"), Case(packed=True, rotary="8"), Case(view=True)], ids=str)
def test_it_is_not_planned_again(target, launched, on_a_gpu, monkeypatch, case):
    wanted, x = made(case), made(case)
    for given in (wanted, x):
        given.k_cache.fill_(1), given.v_cache.fill_(1)
    first = paged(wanted, target)
    assert launched == ["xattn_append", "xattn_decode"]

    def planned(*_):
        raise AssertionError("planned again")

    monkeypatch.setattr(launch, "prepare", planned)
    monkeypatch.setattr(dispatch, "plan", planned)
    version = x.k_cache._version
    assert torch.equal(paged(x, target), first) and x.k_cache._version > version
    assert launched == ["xattn_append", "xattn_decode"] * 2
    assert torch.equal(bits(x.k_cache), bits(wanted.k_cache)) and torch.equal(bits(x.v_cache), bits(wanted.v_cache))


OTHERS = {
    "no rotation": lambda x: replace(x, rotary=None),
    "interleaved": lambda x: replace(x, rotary=xattn.Rotary(x.rotary.cos, x.rotary.sin, True)),
    "other tables": lambda x: replace(x, rotary=xattn.Rotary(x.rotary.cos.bfloat16(), x.rotary.sin.bfloat16())),
    "fewer tokens": lambda x: replace(x, k_new=x.k_new[:, :2], v_new=x.v_new[:, :2]),
    "other strides": lambda x: replace(x, k_new=x.k_new.transpose(1, 2).contiguous().transpose(1, 2)),
    "another index": lambda x: replace(x, seqlens_k=x.seqlens_k.long()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_question_is_planned(target, launched, on_a_gpu, name):
    paged(made(Case(rotary="16")), target)
    x, y = (OTHERS[name](made(Case(rotary="16"))) for _ in range(2))
    launched.clear()
    out = paged(x, target)
    appends._by_torch(y)
    assert launched == ["xattn_append", "xattn_decode"] and out.shape == x.q.shape
    assert torch.equal(bits(x.k_cache), bits(y.k_cache)) and torch.equal(bits(x.v_cache), bits(y.v_cache))


def test_what_shapes_do_not_tell_is_checked_again(target, launched, on_a_gpu):
    x = made(Case())
    paged(x, target)
    with pytest.raises(ValueError, match="v_new: got a tensor"):
        paged(replace(x, v_cache=x.k_cache), target)
    with torch.inference_mode():
        inside = x.v_cache.clone()
    with pytest.raises(ValueError, match="v_cache: got an inference tensor"):
        paged(replace(x, v_cache=inside), target)
    view = made(Case(view=True))
    paged(view, target)
    with pytest.raises(ValueError, match="v_new: got None"):
        paged(replace(view, v_cache=view.k_cache.clone()), target)
    assert launched == ["xattn_append", "xattn_decode"] * 2


def test_the_attention_alone_is_planned_again_where_it_was_forgotten(target, launched, on_a_gpu):
    x = made(Case())
    x.k_cache.fill_(1), x.v_cache.fill_(1)
    first = paged(x, target)
    for question in [q for q in repeats._known if q[0] == "paged"]:
        del repeats._known[question]
    repeats._latest.pop("paged", None)
    assert torch.equal(paged(x, target), first) and launched == ["xattn_append", "xattn_decode"] * 2
