"""Caches of 8-bit floats on both layers' lanes: every code, its NaN, scales of any kind, and all that is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import append_cases
import cases
import fp8_codes
import pytest
import torch
from host.emulated_backend import DEVICES

import xattn
from xattn import appends, dispatch, launch, status
from xattn.device import from_arch
from xattn.forward_call import CACHES
from xattn.status import CODES

FORMATS = {"sm80": torch.float8_e4m3fn, "cdna": torch.float8_e4m3fnuz}  # what the devices of the targets read
ELEMENTS = pytest.mark.parametrize("element", [torch.bfloat16, torch.float16], ids=str)


@ELEMENTS
def test_every_code(target, element):
    fp8_codes.check_values(target.backend, "cpu", FORMATS[target.backend], element)
    fp8_codes.check_keys(target.backend, "cpu", FORMATS[target.backend], element)


@pytest.mark.parametrize("k_scale", [0.37, -2.0, 0.0, 1e-30, 1e30, math.nan])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"softcap": 2.0**-126}], ids=str)
def test_scales_of_any_sign_and_size(target, k_scale, options, monkeypatch):
    """As the reference takes them. Those that the host would refuse are put where it does not look."""
    cache = FORMATS[target.backend]
    q = torch.randn(2, 3, 4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    k, v = (append_cases.moved(torch.randn(9, 16, 2, 64).to(cache), 0) for _ in range(2))
    table = torch.randperm(9, dtype=torch.int32)[:8].view(2, 4)
    args = (q, k, v, table, torch.tensor([50, 0], dtype=torch.int32))
    scales = {"q_scale": torch.tensor([[0.9, 1.1], [1.0, 1.0]]), "v_scale": torch.tensor(1.7)}
    monkeypatch.setattr(xattn.validate, "finite", lambda *_: None)
    found, want = (
        xattn.attention_paged(
            *args, **scales, **options, k_scale=torch.tensor(k_scale), causal=True, return_lse=True, backend=backend
        )
        for backend in (target.backend, "reference")
    )
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got.float()[:1], expected.float()[:1], rtol=2e-2, atol=2e-2, equal_nan=True)
        empty = 0.0 if got is found[0] else -math.inf
        assert (got[1:] == empty).all()


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-4, 1e5, 1e30, 1e37])
def test_queries_of_any_size(target, size):
    """bf16 holds what products in fp16 do not: rows are brought to a size of their own."""
    cache, g = FORMATS[target.backend], torch.Generator().manual_seed(2)
    q = torch.randn(2, 3, 4, 64, generator=g)
    q[0, 1] *= 2.0 ** -torch.arange(64)  # within a row, too
    q = (q.clamp(-1, 1) * size).bfloat16()
    k, v = (torch.randn(9, 16, 2, 64, generator=g).to(cache) for _ in range(2))
    args = (k, v, torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([50, 33], dtype=torch.int32))
    options = {"softmax_scale": 1 / size, "causal": True, "return_lse": True}
    found = xattn.attention_paged(q, *args, **options, backend=target.backend)
    want = xattn.attention_paged(q.float(), *args, **options, backend="reference")
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)


def test_queries_that_are_not_finite(target):
    """A row of NaN or infinity is NaN, as the reference's is, and no other."""
    cache, g = FORMATS[target.backend], torch.Generator().manual_seed(2)
    q = torch.randn(1, 4, 2, 64, generator=g).bfloat16()
    q[0, 0, 0, 7], q[0, 1, 0, 9], q[0, 2, 1, 63] = math.nan, math.inf, -math.inf
    k, v = (torch.randn(4, 16, 1, 64, generator=g).to(cache) for _ in range(2))
    args = (k, v, torch.arange(4, dtype=torch.int32)[None], torch.tensor([64], dtype=torch.int32))
    found = xattn.attention_paged(q, *args, return_lse=True, backend=target.backend)
    want = xattn.attention_paged(q, *args, return_lse=True, backend="reference")
    assert want[0].isnan().sum() == 3 * 64
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=2e-2, equal_nan=True)


def test_rows_without_keys_take_nothing_from_a_scale(target):
    cache = FORMATS[target.backend]
    k = torch.zeros(2, 16, 1, 64, dtype=torch.uint8).view(cache)
    args = (torch.ones(1, 3, 1, 64).bfloat16(), k, k, torch.tensor([[0]]), torch.tensor([2]))
    scale = torch.tensor(1.5)
    out, lse = xattn.attention_paged(
        *args, causal=True, v_scale=scale, k_scale=scale, return_lse=True, backend=target.backend
    )
    assert (out[:, 0] == 0).all() and lse[0, 0, 0] == -math.inf and lse[0, 0, 1:].isfinite().all()


# ---------------------------------------------------------------- appending
@pytest.fixture
def word(monkeypatch):
    found = torch.zeros(len(CODES), dtype=torch.int32)
    monkeypatch.setattr(status, "word", lambda device: found)
    return found


@ELEMENTS
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, 0.003, 77.0])
def test_every_number_is_rounded_as_torch_does(target, word, element, cache, scale):
    """All 65536, NaN and infinity among them."""
    new = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(1, 512, 2, 64).view(element)
    if scale is not None and scale != 1.0:
        new = torch.where(new.isnan(), 0, new)  # which sign NaN has behind a quotient is the processor's affair
    pages = [torch.zeros(32, 16, 2, 64, dtype=torch.uint8).view(cache) for _ in range(2)]
    table = torch.arange(32, dtype=torch.int32)[None]
    factor = None if scale is None else torch.tensor(scale)
    x = appends.Append(table, torch.zeros(1, dtype=torch.int32), *pages, k_new=new, v_new=new.flip(1), k_scale=factor)
    mine, theirs = append_cases.copied(x), append_cases.copied(x)
    ready = appends.prepared(mine, target.backend)
    assert ready is not None
    ready.of(mine), appends._by_torch(theirs)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(*(append_cases.bits(getattr(y, name)) for y in (mine, theirs)))
    assert append_cases.bits(mine.k_cache).unique().numel() > 250 and not word.any()


def test_a_step_is_two_launches_and_not_planned_again(target, monkeypatch):
    """Append, with scales, and attention; the second time neither is planned."""
    cache, launched = FORMATS[target.backend], []
    real = launch._chosen[""].prepare

    def prepare(call):
        run = real(call)

        def noted(inputs):
            launched.append(call.symbol)
            return run(inputs)

        return noted

    monkeypatch.setattr(launch._chosen[""], "prepare", prepare)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    case = append_cases.Case(
        cache=str(cache).removeprefix("torch.float8_"), scales="per head", rotary="16", dims=(64, 64)
    )
    found = []
    for backend, expected in (
        (target.backend, ["xattn_append", "xattn_decode"]),
        (target.backend, ["xattn_append", "xattn_decode"]),
        ("reference", []),
    ):
        x = append_cases.made(case)
        for pages in (x.k_cache, x.v_cache):
            pages.view(torch.uint8).zero_()
        launched.clear()
        if len(found) == 1:
            monkeypatch.setattr(dispatch, "plan", None)
        elif len(found) == 2:
            monkeypatch.undo()
        out = xattn.attention_paged(
            *(x.q, x.k_cache, x.v_cache, x.page_table, x.seqlens_k),
            **{"k_new": x.k_new, "v_new": x.v_new, "rotary": x.rotary, "k_scale": x.k_scale, "v_scale": x.v_scale},
            causal=True,
            backend=backend,
        )
        assert launched == expected
        found.append((out, append_cases.bits(x.k_cache), append_cases.bits(x.v_cache)))
    for n in (1, 2):
        torch.testing.assert_close(found[n][0], found[0][0], rtol=2e-2, atol=2e-2)
        assert all(torch.equal(a, b) for a, b in zip(found[n][1:], found[0][1:], strict=True))
    assert torch.equal(found[0][0], found[1][0])


# ---------------------------------------------------------------- what is answered, and what not
def paged(element=torch.bfloat16, cache=torch.float8_e4m3fn, d=128, dv=128, sq=1):
    tensors = [torch.empty(2, sq, 8, d, dtype=element, device="meta")]
    tensors += [torch.empty(9, 16, 2, n, dtype=cache, device="meta") for n in (d, dv)]
    return *tensors, *(torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((2, 4), (2,)))


ANSWERS = {
    "sm_80": torch.float8_e4m3fn,
    "sm_90": torch.float8_e4m3fn,
    "sm_120": torch.float8_e4m3fn,
    "gfx90a": torch.float8_e4m3fn,
    "gfx942": torch.float8_e4m3fnuz,
    "gfx950": torch.float8_e4m3fn,
}


@pytest.mark.parametrize("arch", ANSWERS)
def test_which_cache_is_answered_natively(arch):
    device = from_arch(arch)
    for cache in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2):
        for sq in (1, 500):
            plan = xattn.explain(*paged(cache=cache, sq=sq), kind="paged", device=device, k_scale=0.5)
            assert plan.native == (cache == ANSWERS[arch]), plan
            assert not plan.native or dict(plan.config)["kernel"] == "decode"
    natively = {"kind": "paged", "device": device}
    good = {"cache": ANSWERS[arch]}
    assert xattn.explain(*paged(torch.float16, d=192, **good), **natively).native
    assert not xattn.explain(*paged(torch.float32, **good), **natively).native
    for dims in ((72, 72), (128, 72), (320, 64)):
        refused = xattn.explain(*paged(d=dims[0], dv=dims[1], **good), **natively)
        assert not refused.native and any(r.field.startswith("head_dim") for _, why in refused.rejected for r in why)


def test_emulated_devices_are_those_of_the_formats():
    assert {name: ANSWERS[device.arch] for name, device in DEVICES.items()} == FORMATS


def test_append_refuses_what_it_does_not_round_to(target):
    x = append_cases.made(append_cases.Case())
    body = dispatch.get(target.backend).append
    assert body is not None
    for k_dtype, v_dtype in (
        (torch.float8_e5m2, torch.float8_e5m2),
        (torch.float8_e4m3fn, torch.float8_e4m3fnuz),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float16, torch.float16),
    ):
        other = replace(x, k_cache=x.k_cache.to(k_dtype), v_cache=x.v_cache.to(v_dtype))
        assert {r.code for r in body.check(other)} == {"dtype"}


def test_all_of_a_longest_sequence_that_is_only_a_bound(target):
    """max_seqlen_q far above the queries there are: as many blocks as for those."""
    case = replace(cases.BASE["paged"], dtype="bf16", packed=True)
    call = cases.make(case)
    call.other["max_seqlen_q"] = 1 << 29
    with xattn.batch_invariant():
        cases.check(call, target)
