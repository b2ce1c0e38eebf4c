"""KVLayout and convert_pages against arithmetic in fractions, for every pattern of 8 bits and any layout."""

from __future__ import annotations

import bisect
import copy
import functools
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import xattn
from xattn import KVLayout, convert_page_table, convert_pages, kv_layout

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
E5M2, E5M2FNUZ = torch.float8_e5m2, torch.float8_e5m2fnuz
FP8 = (FN, FNUZ, E5M2, E5M2FNUZ)
WIDE = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*FP8, *WIDE)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(t):
    return t.view(INTEGERS[t.dtype.itemsize])


def patterns(dtype):
    """All 256 patterns as pages (16, 16, 1, 1)."""
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).view(16, 16, 1, 1)


def plain(dtype, scales=None):
    return KVLayout(dtype, "NHD", 16, scales)


def converted(pages, dtype, src=None, dst=None):
    """The stored numbers after a conversion, flat, and the scales."""
    out, layout = convert_pages(pages, plain(pages.dtype, src), plain(dtype, dst))
    assert out.dtype == layout.dtype == dtype
    return out.flatten(), layout.scales


@functools.cache
def grid(dtype):
    """Finite numbers from 0 of a dtype of 8 or 16 bits: as fractions, in order, with their patterns."""
    n = 1 << (8 * dtype.itemsize)
    numbers = torch.arange(n // 2, dtype=torch.int32).to(INTEGERS[dtype.itemsize]).view(dtype).double().tolist()
    return [Fraction(x) for x in numbers if math.isfinite(x)]


def nearest(value, dtype):
    """The pattern without sign of the number nearest to the fraction ``value`` from 0, ties to the even pattern."""
    numbers = grid(dtype)
    at = bisect.bisect_left(numbers, value)
    if at == len(numbers):
        return at - 1
    if at == 0 or numbers[at] == value:
        return at
    below, above = value - numbers[at - 1], numbers[at] - value
    return at - 1 if below < above or (below == above and at % 2) else at


def is_infinity(dtype):
    return dtype in (*WIDE, E5M2)


def expected(x, scale, dtype):
    """What the number ``x`` times the fraction ``scale`` becomes: a float, or None for NaN."""
    if math.isnan(x):
        return None
    top = torch.finfo(dtype).max
    if math.isinf(x):
        return x if is_infinity(dtype) else math.copysign(top, x)
    size = float(grid(dtype)[nearest(abs(Fraction(x)) * scale, dtype)])
    return math.copysign(size, x)


def assert_numbers(found, wanted, signed_zero):
    for got, want in zip(found.double().tolist(), wanted, strict=True):
        assert math.isnan(got) if want is None else got == want, (got, want)
        if want == 0 and signed_zero:
            assert math.copysign(1, got) == math.copysign(1, want)


# ---------------------------------------------------------------- scales that are chosen
def test_e4m3fn_to_fnuz_pattern_by_pattern():
    pages = patterns(FN)
    out, scale = converted(pages, FNUZ, 0.75)
    assert scale == 1.5 and scale.dtype == torch.float32
    wanted = {0x80: 0x00, 0x7F: 0x80, 0xFF: 0x80}
    assert bits(out).tolist() == [wanted.get(b, b) for b in range(256)]
    there = ~pages.flatten().float().isnan()
    assert torch.equal((out.double() * 1.5)[there], (pages.flatten().double() * 0.75)[there])


def test_e4m3fnuz_to_fn_pattern_by_pattern():
    pages = patterns(FNUZ)
    out, scale = converted(pages, FN, 0.75)
    assert scale == 0.375
    wanted = {0x7F: 0x7E, 0xFF: 0xFE}
    assert [b for i, b in enumerate(bits(out).tolist()) if i != 0x80] == [
        wanted.get(b, b) for b in range(256) if b != 0x80
    ]
    assert out.float().isnan().nonzero().tolist() == [[0x80]]
    off = (out.double() * 0.375 != pages.flatten().double() * 0.75).nonzero().flatten().tolist()
    assert off == [0x7F, 0x80, 0xFF]
    kept, _ = converted(pages, FN, 0.75, 0.75)
    off = (kept.double() != pages.flatten().double()) & ~kept.double().isnan()
    assert int(off.sum()) == 16 and float(pages.flatten().double()[off].abs().max()) < 2**-6


def test_e5m2_to_fnuz_pattern_by_pattern():
    pages = patterns(E5M2)
    out, scale = converted(pages, E5M2FNUZ)
    assert scale is None
    numbers = pages.flatten().double()
    assert torch.equal(out.double()[numbers.isfinite()], numbers[numbers.isfinite()])
    assert bits(out)[[0x80, 0x7C, 0xFC]].tolist() == [0x00, 0x7F, 0xFF]
    assert out.double()[[0x7C, 0xFC]].tolist() == [57344, -57344]
    assert out.double().isnan().nonzero().flatten().tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]


def test_e5m2fnuz_to_e5m2_pattern_by_pattern():
    pages = patterns(E5M2FNUZ)
    out, scale = converted(pages, E5M2)
    assert scale is None
    numbers = pages.flatten().double()
    assert out.double().isnan().nonzero().tolist() == [[0x80]]
    off = (out.double() != numbers) & ~numbers.isnan()
    assert sorted(numbers[off].tolist()) == [n * 2.0**-17 for n in (-7, -5, -3, -1, 1, 3, 5, 7)]
    assert_numbers(out, [expected(x, Fraction(1), E5M2) for x in numbers.tolist()], True)


@pytest.mark.parametrize("src, dst", [(FN, FNUZ), (FNUZ, FN), (E5M2, E5M2FNUZ), (E5M2FNUZ, E5M2)])
def test_no_other_power_of_two_keeps_more_patterns(src, dst):
    """The scale that is chosen is the one nearest to 1 among the best."""
    numbers = [Fraction(x) for x in patterns(src).flatten().double().tolist() if math.isfinite(x)]
    held = set(grid(dst))
    kept = {k: sum(abs(x) * Fraction(2) ** -k in held for x in numbers) for k in range(-3, 4)}
    best = min((k for k in kept if kept[k] == max(kept.values())), key=abs)
    _, scale = converted(patterns(src), dst, 1.0)
    assert scale == 2.0**best


@pytest.mark.parametrize("src, dst", [(FN, FNUZ), (E5M2, E5M2FNUZ)])
def test_there_and_back(src, dst):
    pages = patterns(src)
    there, layout = convert_pages(pages, plain(src, 3.0), plain(dst))
    back, layout = convert_pages(there, layout, plain(src))
    assert layout == plain(src, 3.0)
    finite = pages.double().isfinite()
    assert torch.equal(back.double()[finite], pages.double()[finite])


@pytest.mark.parametrize("src", FP8)
@pytest.mark.parametrize("dst", WIDE)
def test_fp8_to_wider_is_exact(src, dst):
    pages = patterns(src)
    out, scale = converted(pages, dst, 0.3)
    assert scale == torch.tensor(0.3)
    assert torch.equal(out.double().nan_to_num(7e7), pages.flatten().double().nan_to_num(7e7))
    there = ~out.isnan()
    assert torch.equal(out.signbit()[there], pages.flatten().float().signbit()[there])


@pytest.mark.parametrize("src", (torch.float16, torch.bfloat16))
def test_16_bits_to_32_are_exact(src):
    pages = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(src).view(-1, 16, 1, 1)
    out, scale = converted(pages, torch.float32)
    assert scale is None
    out, wanted = (t.nan_to_num(7e7, math.inf, -math.inf) for t in (out, pages.flatten().float()))
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_dtype_keeps_every_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (6, 4, 3, 8 * dtype.itemsize), generator=generator, dtype=torch.uint8)
    pages, scales = noise.view(dtype), torch.tensor([0.1, 1e30, 2.0**-126])
    out, layout = convert_pages(pages, KVLayout(dtype, "NHD", 4, scales), KVLayout(dtype, "HND", 4))
    assert torch.equal(bits(out), bits(pages).transpose(1, 2)) and out.is_contiguous()
    assert layout == KVLayout(dtype, "HND", 4, scales)
    out, layout = convert_pages(pages, KVLayout(dtype, "NHD", 4), KVLayout(dtype, "NHD", 4))
    assert torch.equal(bits(out), bits(pages)) and layout.scales is None
    assert out.data_ptr() != pages.data_ptr(), "a copy, also where nothing is to be done"


EXACT = {(src, dst) for src in DTYPES for dst in DTYPES if src == dst or dst == torch.float32}
EXACT |= {(src, dst) for src in FP8 for dst in WIDE}
EXACT |= {(FN, FNUZ), (FNUZ, FN), (E5M2, E5M2FNUZ), (E5M2FNUZ, E5M2)}


@pytest.mark.parametrize("src", DTYPES)
@pytest.mark.parametrize("dst", DTYPES)
def test_which_pairs_have_scales_of_their_own(src, dst):
    pages = torch.zeros(1, 16, 1, 1).to(src)
    if (src, dst) in EXACT:
        converted(pages, dst)
    else:
        with pytest.raises(ValueError, match="dst.scales: got None; allowed: scales"):
            converted(pages, dst)
    converted(pages, dst, dst=1.0)


# ---------------------------------------------------------------- scales that are given
@pytest.mark.parametrize("src", FP8)
@pytest.mark.parametrize("dst", (*FP8, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("scales", [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0), (0.3, 0.1), (1e-30, 1e30), (1e30, 1e-30)])
def test_each_pattern_is_rounded_once(src, dst, scales):
    pages = patterns(src)
    out, scale = converted(pages, dst, *scales)
    one, other = (torch.tensor(s, dtype=torch.float32) for s in scales)
    assert scale == other
    ratio = Fraction(one.item()) / Fraction(other.item())
    wanted = [expected(x, ratio, dst) for x in pages.flatten().double().tolist()]
    assert_numbers(out, wanted, dst not in (FNUZ, E5M2FNUZ))


@settings(max_examples=60)
@given(st.data(), st.sampled_from((*FP8, torch.float16, torch.bfloat16)))
def test_midpoints_and_their_neighbours_are_rounded_once(data, dst):
    """float32 numbers under any scales whose quotient is a midpoint, or beside one by a few units of the source."""
    numbers = grid(dst)
    at = data.draw(st.integers(0, len(numbers) - 2))
    scales = st.floats(2.0**-20, 2.0**20, width=32)
    one, other = data.draw(scales), data.draw(scales)
    ratio = Fraction(one) / Fraction(other)
    middle = (numbers[at] + numbers[at + 1]) / 2
    x = torch.tensor(float(middle / ratio)).repeat(5)
    x = bits(x).add(torch.arange(-2, 3, dtype=torch.int32)).view(torch.float32)
    x = torch.cat((x, -x)).repeat(2)[:16]
    out, _ = converted(x.view(1, 16, 1, 1), dst, one, other)
    assert_numbers(out, [expected(y, ratio, dst) for y in x.double().tolist()], dst not in (FNUZ, E5M2FNUZ))


def test_no_second_rounding_on_the_way():
    """A hair beyond the midpoint of two e4m3 numbers, which float32 would round onto it."""
    x = torch.tensor(17.0).repeat(16).view(1, 16, 1, 1)  # between 16 and 18; even is 16
    hair = torch.tensor(1.0).nextafter(torch.tensor(0.0))
    third = torch.tensor(1 / 3)
    assert converted(x, FN, 1.0, 1.0)[0].float().unique().tolist() == [16]
    for dst in (FN, torch.bfloat16):
        y = x * 2**20 + 1 if dst == torch.bfloat16 else x
        for one, other in ((1.0, hair), (third, third * hair)):
            out, _ = converted(y, dst, one, other)
            ratio = Fraction(float(one)) / Fraction(float(other))
            assert_numbers(out, [expected(v, ratio, dst) for v in y.flatten().double().tolist()], True)
    assert converted(x, FN, 1.0, hair)[0].float().unique().tolist() == [18]


@pytest.mark.parametrize("dst", DTYPES)
def test_clamping(dst):
    top = torch.finfo(dst).max
    numbers = [math.inf, -math.inf, math.nan, 3e38, -3e38, 0.0, -0.0, 1e-3]
    out, _ = converted(torch.tensor(numbers * 2).view(1, 16, 1, 1), dst, 2.0**60, 2.0**-60)
    end = math.inf if is_infinity(dst) else top
    last = torch.tensor(1e-3).to(dst).double().item() * 2.0**120 if dst in WIDE[1:] else top
    wanted = [end, -end, None, top, -top, 0.0, -0.0, last]
    assert_numbers(out[:8], wanted, dst not in (FNUZ, E5M2FNUZ))


@settings(max_examples=40)
@given(st.lists(st.floats(width=32), min_size=16, max_size=16), *[st.floats(2.0**-60, 2.0**60, width=32)] * 2)
def test_float32_under_other_scales(numbers, one, other):
    x = torch.tensor(numbers)
    out, _ = converted(x.view(1, 16, 1, 1), torch.float32, one, other)
    ratio, top = Fraction(one) / Fraction(other), Fraction(torch.finfo(torch.float32).max)
    wanted = []
    for v in x.double().tolist():
        if math.isfinite(v):
            exact = Fraction(v) * ratio
            size = min(abs(exact), top)
            guess = np.float32(float(size))
            near = [guess, np.nextafter(guess, np.float32(0)), np.nextafter(guess, np.finfo(np.float32).max)]
            best = min(near, key=lambda n: (abs(Fraction(float(n)) - size), int(n.view(np.int32)) % 2))
            wanted.append(math.copysign(float(best), v))
        else:
            wanted.append(None if math.isnan(v) else v)
    assert_numbers(out, wanted, True)


def test_the_same_scales_change_nothing():
    x = torch.randn(2, 16, 3, 5, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([0.1, 3e-38, 7e20])
    out, layout = convert_pages(x, plain(torch.float32, scales), plain(torch.float32, scales))
    assert torch.equal(out, x) and layout == plain(torch.float32, scales)


# ---------------------------------------------------------------- order, pages, strides, chunks
def model(pages, src, dst):
    """Token by token: a dict of what each (new page, slot) holds, (heads, head_dim)."""
    found = {}
    numbered = pages if src.kv_layout == "NHD" else pages.transpose(1, 2)
    for token in range(numbered.shape[0] * src.page_size):
        page, slot = divmod(token, src.page_size)
        found[divmod(token, dst.page_size)] = numbered[page, slot]
    return found


def strided(shape, how, dtype):
    generator = torch.Generator().manual_seed(1)
    if how == "contiguous":
        return torch.randn(shape, generator=generator).to(dtype)
    if how == "sliced":
        wide = torch.randn([2 * n + 1 for n in shape], generator=generator).to(dtype)
        return wide[tuple(slice(1, None, 2) for _ in shape)]
    if how == "expanded":
        return torch.randn((shape[0], 1, *shape[2:]), generator=generator).to(dtype).expand(shape)
    return torch.randn(shape[::-1], generator=generator).to(dtype).permute(3, 2, 1, 0)


SIZES = st.sampled_from([(1, 1), (1, 7), (4, 4), (6, 2), (8, 1), (2, 6), (1, 24), (32, 16), (16, 32)])
ORDER = st.sampled_from(("NHD", "HND"))
PAIRS = st.sampled_from([(FN, FN), (FN, FNUZ), (FN, torch.bfloat16), (torch.float32, E5M2), (torch.float16,) * 2])
WAYS = st.sampled_from(("contiguous", "sliced", "expanded", "reversed"))


@settings(max_examples=150)
@given(SIZES, ORDER, ORDER, PAIRS, WAYS, st.sampled_from((1, 7, 50, 1 << 20)), st.integers(0, 3), st.booleans())
def test_any_layout(sizes, order, new_order, dtypes, how, chunk, num, per_head):
    size, new_size = sizes
    heads, width = 3, 2
    scales = torch.tensor([0.5, 3.0, 0.1]) if per_head else 0.25
    src = KVLayout(dtypes[0], order, size, scales)
    dst = KVLayout(dtypes[1], new_order, new_size, None if dtypes[1] != E5M2 else scales)
    num *= max(1, new_size // size)
    pages = strided((num, size, heads, width) if order == "NHD" else (num, heads, size, width), how, dtypes[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_layout, "_CHUNK", chunk)
        out, layout = convert_pages(pages, src, dst)
    assert out.is_contiguous() and (layout.kv_layout, layout.page_size) == (new_order, new_size)
    numbers = num * size // new_size
    assert out.shape == ((numbers, new_size, heads, width) if new_order == "NHD" else (numbers, heads, new_size, width))
    out = out if new_order == "NHD" else out.transpose(1, 2)
    wanted = model(pages, src, dst)
    assert len(wanted) == numbers * new_size
    for (page, slot), token in wanted.items():
        got = out[page, slot].double() * layout.scales.double().unsqueeze(-1)
        want = token.double() * src.scales.double().unsqueeze(-1)
        if dtypes[1] == E5M2:
            torch.testing.assert_close(got, want, rtol=2**-3, atol=0.0)
        else:
            assert torch.equal(got, want)


@pytest.mark.parametrize("dst", [plain(FN), KVLayout(FNUZ, "HND", 16), plain(torch.float16, 0.5)])
@pytest.mark.parametrize("shape", [(4096, 16, 4, 32), (1, 65536, 4, 32)])
def test_memory_is_linear(dst, shape):
    """Nothing is as large as the whole, but for the result: many pages, and one page that is all of it."""

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != pages.untyped_storage().data_ptr():
                if func is torch.ops.aten.empty.memory_format and tuple(out.shape)[-1] == shape[-1]:
                    result.append(out.untyped_storage().data_ptr())
                elif out.untyped_storage().data_ptr() not in result:
                    self.bytes = max(self.bytes, out.untyped_storage().nbytes())
            return out

    result = []
    pages = torch.zeros(shape, dtype=torch.uint8).view(FN)
    src = KVLayout(FN, "NHD", shape[1])
    with Largest() as largest:
        convert_pages(pages, src, KVLayout(dst.dtype, dst.kv_layout, shape[1], dst.scales))
    assert len(result) == 1
    assert largest.bytes <= 8 << 20, "a chunk of 2^20 numbers in float64"


# ---------------------------------------------------------------- page tables
@settings(max_examples=60)
@given(st.data(), st.sampled_from([(16, 16), (32, 16), (6, 1), (16, 32), (1, 6)]))
def test_a_converted_table_finds_the_same_tokens(data, sizes):
    size, new_size = sizes
    r = max(1, new_size // size)
    num = 4 * r
    pages = torch.arange(num * size, dtype=torch.float32).view(num, size, 1, 1)
    rows = []
    for order in data.draw(st.lists(st.permutations(range(4)), min_size=1, max_size=3)):
        length = data.draw(st.integers(0, 4))
        row = [page * r + part for page in order[:length] for part in range(r)]
        row = row[: len(row) - (data.draw(st.integers(0, r - 1)) if row else 0)]
        rows.append(row + [-1] * (num - len(row)))
    table = torch.tensor(rows, dtype=data.draw(st.sampled_from((torch.int32, torch.int64))))
    src, dst = (KVLayout(torch.float32, "NHD", n) for n in sizes)
    out, _ = convert_pages(pages, src, dst)
    new = convert_page_table(table, src, dst)
    assert new.dtype == table.dtype and new.shape == (len(rows), num * size // new_size)
    assert (new >= -1).all() and (new < len(out)).all()
    for row, new_row in zip(rows, new.tolist(), strict=True):
        for position in range(sum(page >= 0 for page in row) * size):
            old_token = pages[row[position // size], position % size]
            assert torch.equal(old_token, out[new_row[position // new_size], position % new_size])
    back = convert_page_table(new, dst, src)
    there = table >= 0
    assert torch.equal(back[there], table[there])


def test_attention_over_converted_pages():
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(6, 8, 2, 16, generator=generator) for _ in range(2))
    q = torch.randn(2, 1, 4, 16, generator=generator).bfloat16()
    table, lengths = torch.tensor([[4, 0, -1], [3, 5, 1]], dtype=torch.int32), torch.tensor([13, 20], dtype=torch.int32)
    scales = torch.tensor([0.01, 0.02])
    src, dst = KVLayout(torch.float32, "NHD", 8), KVLayout(FN, "NHD", 8, scales)
    (k, layout), (v, _) = (convert_pages(t, src, dst) for t in (k, v))
    wanted = xattn.attention_paged(q, k, v, table, lengths, k_scale=scales.expand(2, -1), v_scale=scales.expand(2, -1))
    small = KVLayout(FNUZ, "HND", 2)
    (k, small), (v, _) = (convert_pages(t, layout, small) for t in (k, v))
    table, given_ = convert_page_table(table, layout, small), small.scales.expand(2, -1)
    out = xattn.attention_paged(q, k, v, table, lengths, k_scale=given_, v_scale=given_, kv_layout="HND")
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    "row", [[1, 2], [0, 2], [2, 1], [-1, 1], [0, 0], [2, -1, 0, 1, -1, 5]], ids=lambda row: "_".join(map(str, row))
)
def test_pages_that_cannot_be_joined(row):
    src, dst = KVLayout(FN, "NHD", 16), KVLayout(FN, "NHD", 32)
    with pytest.raises(xattn.DeviceValueError, match="page_table: got .*allowed: 2 pages to be joined"):
        convert_page_table(torch.tensor([[0, 1, 2, 3][: len(row)] + [-1] * max(0, len(row) - 4), row]), src, dst)


def test_page_ids_do_not_wrap():
    src, dst = KVLayout(FN, "NHD", 32), KVLayout(FN, "NHD", 8)
    for dtype in (torch.int32, torch.int64):
        top = torch.iinfo(dtype).max
        table = torch.tensor([[top, top // 4, top // 4 - 1, -7, 1 << 30, 3]], dtype=dtype)
        new = convert_page_table(table, src, dst).view(-1, 4)
        assert (new[[0, 1, 3]] == -1).all()
        assert new[2].tolist() == [(top // 4 - 1) * 4 + i for i in range(4)]
        assert new[4].tolist() == ([-1] * 4 if dtype == torch.int32 else [(1 << 32) + i for i in range(4)])
        assert new[5].tolist() == [12, 13, 14, 15]


# ---------------------------------------------------------------- the layout
def test_layouts_compare_and_show_themselves():
    scales = torch.tensor([1.0, 2.0])
    a, b = (KVLayout(FN, "NHD", np.int64(16), scales) for _ in range(2))
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1 and type(a.page_size) is int
    scales.mul_(2)
    assert a == b and a.scales.tolist() == [1, 2], "a layout keeps what it was given"
    others = [KVLayout(FNUZ, "NHD", 16, a.scales), KVLayout(FN, "HND", 16, a.scales), KVLayout(FN, "NHD", 8, a.scales)]
    others += [KVLayout(FN, "NHD", 16), KVLayout(FN, "NHD", 16, scales), KVLayout(FN, "NHD", 16, 1), 3]
    assert all(a != other for other in others)
    assert KVLayout(FN, "NHD", 16, 1) == KVLayout(FN, "NHD", 16, torch.tensor(1.0))
    assert repr(a) == "KVLayout(torch.float8_e4m3fn, 'NHD', page_size=16, scales=<(2,) on cpu>)"
    assert repr(KVLayout(FN, "HND", 1, 0.1)).endswith("'HND', page_size=1, scales=0.100000001)")
    assert repr(KVLayout(FN, "HND", 1)).endswith("scales=None)")
    for same in (copy.deepcopy(a), copy.copy(a), pickle.loads(pickle.dumps(a))):
        assert same == a
    with pytest.raises(AttributeError):
        a.page_size = 3
    assert KVLayout(dtype=FN, kv_layout="NHD", page_size=2, scales=None) == KVLayout(FN, "NHD", 2)


GOOD = {"dtype": FN, "kv_layout": "NHD", "page_size": 16}


@pytest.mark.parametrize(
    "changed, error, text",
    [
        ({"dtype": torch.float64}, TypeError, "dtype: got torch.float64; allowed: .*e5m2fnuz"),
        ({"dtype": "fp8"}, TypeError, "dtype: got fp8; allowed: torch.float32"),
        ({"dtype": []}, TypeError, r"dtype: got \[\]"),
        ({"kv_layout": "HDN"}, ValueError, "kv_layout: got 'HDN'; allowed: 'NHD' or 'HND'"),
        ({"kv_layout": 1}, ValueError, "kv_layout: got 1"),
        ({"page_size": 0}, ValueError, "page_size: got 0"),
        ({"page_size": 2.0}, TypeError, "page_size: got float"),
        ({"scales": True}, TypeError, "scales: got bool"),
        ({"scales": "1"}, TypeError, "scales: got str; allowed: None, a number"),
        ({"scales": 0}, ValueError, "scales: got 0.0; allowed: finite numbers from 1.18e-38"),
        ({"scales": -1.0}, ValueError, "scales: got -1.0"),
        ({"scales": math.nan}, ValueError, "scales: got nan"),
        ({"scales": 1e39}, ValueError, "scales: got 1e\\+39"),
        ({"scales": torch.tensor([1.0, 1e-39])}, ValueError, r"scales: got \[1.0, "),
        ({"scales": torch.tensor([1.0, math.inf])}, ValueError, r"scales: got \[1.0, inf"),
        ({"scales": torch.ones(2, 2)}, ValueError, r"scales: got shape \(2, 2\)"),
        ({"scales": torch.ones(2).to_sparse()}, ValueError, "scales: got shape .*sparse"),
        ({"scales": torch.ones(2).double()}, TypeError, "scales: got torch.float64; allowed: torch.float32"),
        ({"scales": torch.ones(2, requires_grad=True)}, ValueError, "scales: got a tensor that requires a gradient"),
    ],
)
def test_layout_errors(changed, error, text):
    with pytest.raises(error, match=text):
        KVLayout(**(GOOD | changed))


# ---------------------------------------------------------------- errors of a conversion
def pages_of(*shape, dtype=FN):
    return torch.zeros(shape).to(dtype)


S = KVLayout(FN, "NHD", 16)
ERRORS = {
    "not pages": (lambda: ([1], S, S), TypeError, "pages: got list; allowed: a torch.Tensor"),
    "no src": (lambda: (pages_of(1, 16, 1, 1), FN, S), TypeError, "src: got dtype; allowed: an xattn.KVLayout"),
    "no dst": (lambda: (pages_of(1, 16, 1, 1), S, None), TypeError, "dst: got NoneType"),
    "another dtype": (lambda: (pages_of(1, 16, 1, 1, dtype=E5M2), S, S), TypeError, "pages: got torch.float8_e5m2;"),
    "another page size": (lambda: (pages_of(1, 8, 16, 1), S, S), ValueError, r"pages: got shape \(1, 8, 16, 1\)"),
    "another order": (
        lambda: (pages_of(1, 16, 2, 1), KVLayout(FN, "HND", 16), S),
        ValueError,
        r"pages: got shape .*\(num_pages, heads_kv, page_size, head_dim\), page_size 16",
    ),
    "three dimensions": (lambda: (pages_of(16, 16, 1), S, S), ValueError, "pages: got shape"),
    "no heads": (lambda: (pages_of(1, 16, 0, 1), S, S), ValueError, "heads_kv and head_dim from 1"),
    "sparse pages": (
        lambda: (torch.zeros(1, 16, 1, 1).to_sparse(), plain(torch.float32), plain(torch.float32)),
        ValueError,
        "pages: got torch.sparse_coo",
    ),
    "sizes that do not divide": (
        lambda: (pages_of(3, 16, 1, 1), S, KVLayout(FN, "NHD", 24)),
        ValueError,
        "dst.page_size: got 24; allowed: a multiple or a divisor of src.page_size, 16",
    ),
    "a page left over": (
        lambda: (pages_of(5, 16, 1, 1), S, KVLayout(FN, "NHD", 64)),
        ValueError,
        "pages: got 5 pages; allowed: a multiple of 4",
    ),
    "scales of other heads": (
        lambda: (pages_of(1, 16, 3, 1), plain(FN, torch.ones(2)), S),
        ValueError,
        r"src.scales: got shape \(2,\); allowed: \(\) or \(3,\)",
    ),
    "new scales of other heads": (
        lambda: (pages_of(1, 16, 3, 1), S, plain(FN, torch.ones(1))),
        ValueError,
        r"dst.scales: got shape \(1,\)",
    ),
    "scales elsewhere": (
        lambda: (pages_of(1, 16, 2, 1), S, plain(FN, torch.ones(2, device="meta"))),
        ValueError,
        "dst.scales: got device meta; allowed: the device of pages, cpu",
    ),
    "no exact scales": (
        lambda: (pages_of(1, 16, 1, 1, dtype=torch.bfloat16), plain(torch.bfloat16), S),
        ValueError,
        "dst.scales: got None; allowed: .*bfloat16 to torch.float8_e4m3fn",
    ),
    "scales that cannot be doubled": (
        lambda: (pages_of(1, 16, 1, 1), plain(FN, 3e38), plain(FNUZ)),
        ValueError,
        "src.scales: got .*also when multiplied by 2",
    ),
    "scales that cannot be halved": (
        lambda: (pages_of(1, 16, 1, 1, dtype=FNUZ), plain(FNUZ, 2.0**-126), S),
        ValueError,
        "src.scales: got .*also when multiplied by 0.5",
    ),
    "a gradient": (
        lambda: (torch.zeros(1, 16, 1, 1, requires_grad=True), plain(torch.float32), plain(torch.bfloat16, 1.0)),
        ValueError,
        "pages: got a tensor that requires a gradient; allowed: a detached",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    make, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        convert_pages(*make())


@pytest.mark.parametrize(
    "table, src, dst, error, text",
    [
        ([[1]], S, S, TypeError, "page_table: got list"),
        (torch.zeros(2, dtype=torch.int32), S, S, ValueError, r"page_table: got shape \(2,\)"),
        (torch.zeros(2, 1), S, S, TypeError, "page_table: got torch.float32"),
        (torch.zeros(2, 1, dtype=torch.int64), S, 16, TypeError, "dst: got int"),
        (torch.zeros(2, 1, dtype=torch.int64), S, KVLayout(FN, "NHD", 10), ValueError, "dst.page_size: got 10"),
    ],
)
def test_table_errors(table, src, dst, error, text):
    with pytest.raises(error, match=text):
        convert_page_table(table, src, dst)


def test_no_derivative_is_lost():
    x, layout, new = torch.zeros(1, 16, 1, 1), plain(torch.float32), plain(torch.bfloat16, 1.0)
    with torch.no_grad():
        out, _ = convert_pages(x.clone().requires_grad_(), layout, new)
    assert not out.requires_grad
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(ValueError, match="pages: got a tensor with a tangent"):
            convert_pages(dual, layout, new)
    for transform in (torch.func.vmap, torch.func.grad, lambda f: lambda t: torch.func.jvp(f, (t,), (t,))):
        with pytest.raises(xattn.UnsupportedError, match="torch.func transform"):
            transform(lambda t: convert_pages(t, layout, new)[0].sum())(x)


def test_inference_mode_and_meta():
    with torch.inference_mode():
        out, layout = convert_pages(patterns(FN), plain(FN, 2.0), plain(FNUZ))
    assert not out.is_inference() and not layout.scales.is_inference()
    pages = torch.empty(4, 16, 2, 8, dtype=FN, device="meta")
    out, layout = convert_pages(pages, plain(FN, 2.0), KVLayout(FNUZ, "HND", 32))
    assert (out.shape, out.device.type) == ((2, 2, 32, 8), "meta")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_pages_are_converted_in_a_compiled_function(backend):
    src, dst = KVLayout(torch.float32, "NHD", 4), KVLayout(torch.float32, "HND", 2)
    pages = torch.randn(6, 4, 2, 16)
    compiled = torch.compile(lambda x: convert_pages(x, src, dst)[0], backend=backend)
    assert torch.equal(compiled(pages), convert_pages(pages, src, dst)[0])
