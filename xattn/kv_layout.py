"""KVLayout says how a cache stores keys or values in pages; convert_pages moves pages from one layout to another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import autograd, places, status, validate
from .errors import UnsupportedError
from .inputs import DTYPES
from .validate import fail

LAYOUT_DTYPES = tuple(dtype for dtype in DTYPES if dtype != torch.float64)
_NAMES = ", ".join(str(dtype) for dtype in LAYOUT_DTYPES)
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
_PAIRS = (
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz},
    {torch.float8_e5m2, torch.float8_e5m2fnuz},
)
# What a scale is multiplied by where no scale is given for the new pages; 1 for every other pair. A bit pattern of
# e4m3fnuz means half of what it means in e4m3fn. e5m2fnuz holds every finite value of e5m2, so nothing is gained there.
_FACTORS = {
    (torch.float8_e4m3fn, torch.float8_e4m3fnuz): 2.0,
    (torch.float8_e4m3fnuz, torch.float8_e4m3fn): 0.5,
}
# Elements that are converted at once, up to one token of all heads: what a call needs beside pages and result.
_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False, repr=False)
class KVLayout:
    """How a cache tensor holds keys or values: a number of the sequence is ``stored * scales``.

    Layouts with equal fields are equal; comparing scales on a GPU waits for it. The hash looks at no value.

    Args:
        dtype: float16, bfloat16, float32, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2 or float8_e5m2fnuz.
        kv_layout: "NHD", pages are (num_pages, page_size, heads_kv, head_dim), or "HND", (num_pages, heads_kv,
            page_size, head_dim).
        page_size: tokens in a page.
        scales: None, a number, or a float32 tensor, () or (heads_kv,). In the pages that ``convert_pages`` reads, None
            is 1; for those it makes, None asks for scales under which the conversion is exact. Kept as a copy. From
            1.18e-38, the first normal float32, on; on a GPU the host does not look.
    """

    dtype: torch.dtype
    kv_layout: str
    page_size: int
    scales: Tensor | None = None

    def __init__(self, dtype: torch.dtype, kv_layout: str, page_size: int, scales: float | Tensor | None = None):
        if not isinstance(dtype, torch.dtype) or dtype not in LAYOUT_DTYPES:
            fail("dtype", dtype, _NAMES, TypeError)
        if not isinstance(kv_layout, str) or kv_layout not in ("NHD", "HND"):
            fail("kv_layout", repr(kv_layout), "'NHD' or 'HND'")
        fields = {"dtype": dtype, "kv_layout": kv_layout, "page_size": validate.count("page_size", page_size, 1)}
        for name, value in (fields | {"scales": _checked_scales(scales)}).items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVLayout):
            return NotImplemented
        if hash(self) != hash(other) or self._fields != other._fields:
            return False
        a, b = self.scales, other.scales
        return a is b or (a is not None and b is not None and a.device == b.device and torch.equal(a, b))

    def __hash__(self) -> int:
        return hash(self._fields)

    @property
    def _fields(self) -> tuple[Any, ...]:
        shape = None if self.scales is None else tuple(self.scales.shape)
        return self.dtype, self.kv_layout, self.page_size, shape

    def __repr__(self) -> str:
        scales: object = self.scales
        if isinstance(scales, Tensor):
            on_host = scales.dim() == 0 and scales.device.type == "cpu"
            scales = f"{scales.item():.9g}" if on_host else f"<{tuple(scales.shape)} on {scales.device}>"
        return f"KVLayout({self.dtype}, {self.kv_layout!r}, page_size={self.page_size}, scales={scales})"


def convert_pages(pages: Tensor, src: KVLayout, dst: KVLayout) -> tuple[Tensor, KVLayout]:
    """Pages of layout ``src`` as pages of layout ``dst``: order, dtype, page size and scales.

    **Page size.** One size must divide the other. A page p of r * n tokens becomes the r pages p * r to p * r + r - 1
    of n tokens, in the order of the tokens; the other way round, r pages p * r, ... of n tokens become page p.
    ``convert_page_table`` does the same to a page table. Lengths stay.

    **Scales.** Where ``dst.scales`` is given, each number ``stored * src.scales / dst.scales`` is rounded once, to the
    nearest of the new dtype, ties to even. Numbers beyond its range become its largest; infinities stay where it has
    them (float8_e5m2, float16, bfloat16, float32), else they become its largest; NaN stays NaN. ``scales=1.0`` so asks
    for plain numbers.

    Where ``dst.scales`` is None, scales are chosen under which the conversion is exact, and are part of the layout that
    is returned. They are those of ``src``, except between float8_e4m3fn and float8_e4m3fnuz:

    - *Same dtype*: bits are moved, NaN payloads too.
    - *To a wider dtype* (fp8 to 16 or 32 bits, 16 bits to float32): every number is exact.
    - *e4m3fn to e4m3fnuz*: scales doubled, bits kept, exact for all numbers (448 under s is 224 under 2 s). Of the 256
      patterns 3 change: 0x80 (-0) to 0x00, as fnuz has no -0; 0x7f and 0xff (NaN) to 0x80.
    - *e4m3fnuz to e4m3fn*: scales halved, bits kept, exact but for 0x7f and 0xff (240 and -240), for which e4m3fn has
      no pattern (480): they become 0x7e and 0xfe, 224 and -224 in the old scale. 0x80 (NaN) becomes a NaN. Under
      ``dst.scales`` equal to ``src.scales`` 240 is exact, and the 16 odd multiples of 2^-10 below 2^-6 are rounded.
    - *e5m2 to e5m2fnuz*: same scales, exact for all finite numbers. -0 (0x80) becomes 0x00, the 6 NaN (0x7d to 0x7f,
      0xfd to 0xff) 0x80, the infinities (0x7c, 0xfc) 57344 and -57344 (0x7f, 0xff).
    - *e5m2fnuz to e5m2*: same scales, exact but for the 8 odd multiples of 2^-17 below 2^-14, which are rounded to
      multiples of 2^-16. 0x80 (NaN) becomes a NaN.
    - *Any other pair* has no exact scales: ValueError asks for ``dst.scales``.

    Args:
        pages: (num_pages, page_size, heads_kv, head_dim) or as ``src.kv_layout`` says, any strides, any device.
        src, dst: scales of one element may be on the CPU; others are on the device of ``pages``.

    Returns:
        New contiguous pages, which share nothing with ``pages``, and their layout: ``dst`` with scales on the device of
        ``pages``, None where ``src`` has none and they are 1. Per-head scales go to ``attention_paged`` as
        ``scales.expand(batch, -1)``. Beside the result, memory for some MiB of numbers is used.

    Raises (before anything is converted):
        TypeError, ValueError: an argument is wrong, a size does not divide, a gradient or a tangent would be lost.
        UnsupportedError: under a torch.func transform.
    """
    _check(pages, src, dst)
    source = _numbered(pages.detach(), src.kv_layout)
    num_pages = source.shape[0] * src.page_size // dst.page_size
    factor = _FACTORS.get((src.dtype, dst.dtype), 1.0)
    old, new = (s if s is None else s.to(pages.device, non_blocking=True) for s in (src.scales, dst.scales))
    made = replace(dst, scales=_own(old, factor, pages.device) if new is None else new)
    heads, width = source.shape[2:]
    order = (dst.page_size, heads) if dst.kv_layout == "NHD" else (heads, dst.page_size)
    with torch.no_grad():
        with torch.inference_mode(False):  # what is made may be written in a step outside inference mode
            out = torch.empty(num_pages, *order, width, dtype=dst.dtype, device=pages.device)
        target = _numbered(out, dst.kv_layout)
        tokens = min(src.page_size, dst.page_size)
        source, target = (_split(t, tokens, max(src.page_size, dst.page_size)) for t in (source, target))
        if src.dtype == dst.dtype and dst.scales is None:
            _bits(target).copy_(_bits(source))
            return out, made
        for at in _chunks(source.shape):
            numbers = source[at].float() / factor if new is None else _rescaled(source[at], old, new)
            _bits(target)[at] = _bits(_nearest(numbers, dst.dtype))
    return out, made


def convert_page_table(page_table: Tensor, src: KVLayout, dst: KVLayout) -> Tensor:
    """The page table for what ``convert_pages`` made, of the same dtype and on the same device.

    Pages that become r smaller ones: column c becomes the columns c * r to c * r + r - 1, page p the pages p * r, ...
    Where r pages become one: columns c * r, ... must hold the pages p * r, p * r + 1, ... in this order, and become
    column c, page p. The last of them may hold no page, so the width is rounded up.

    Entries that are negative hold no page, and stay so (-1); no entry behind a sequence may be anything else where
    pages are joined.

    Args:
        page_table: (batch, max_pages) int32 or int64.

    Raises:
        TypeError, ValueError: an argument is wrong, one page size does not divide the other.
        DeviceValueError: pages to be joined do not lie so. On a GPU their entry is -1, and ``xattn.check_errors``
            raises.
    """
    validate.tensor("page_table", page_table, optional=False)
    _check_layouts(src, dst)
    if page_table.dtype not in (torch.int32, torch.int64):
        fail("page_table", page_table.dtype, "torch.int32 or torch.int64", TypeError)
    if page_table.dim() != 2 or page_table.layout is not torch.strided:
        fail("page_table", f"shape {tuple(page_table.shape)}, {page_table.layout}", "(batch, max_pages), dense")
    batch, width = page_table.shape
    if src.page_size >= dst.page_size:
        r = src.page_size // dst.page_size
        known = (page_table >= 0) & (page_table <= torch.iinfo(page_table.dtype).max // r - 1)  # no product wraps
        first = torch.where(known, page_table * r, -1)[..., None]
        part = torch.arange(r, dtype=page_table.dtype, device=page_table.device)
        return torch.where(first < 0, first, first + part).flatten(1)
    r = dst.page_size // src.page_size
    groups = torch.nn.functional.pad(page_table, (0, -width % r), value=-1).unflatten(1, (-1, r))
    first = groups[..., :1]
    part = torch.arange(r, dtype=page_table.dtype, device=page_table.device)
    there = groups >= 0
    ordered = torch.where(there, (groups - first == part) & (first % r == 0), part > 0)
    no_gap = ~there[..., 1:] | there[..., :-1]
    good = (ordered & torch.nn.functional.pad(no_gap, (1, 0), value=True)).all(-1) & there[..., 0]
    allowed = f"{r} pages to be joined one after the other, the first a multiple of {r}; -1 behind a sequence"
    status.report("page_table", there.any(-1) & ~good, "page_table", first[..., 0], allowed)
    return torch.where(good, first[..., 0] // r, -1)


# ---------------------------------------------------------------- checks
def _checked_scales(value: Any) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, Real):
            fail("scales", type(value).__name__, "None, a number, or a float32 tensor () or (heads_kv,)", TypeError)
        top = torch.finfo(torch.float32).max
        value = torch.full((), validate.number("scales", value, -top, top), dtype=torch.float32, device="cpu")
    validate.tensor("scales", value)
    if value.layout is not torch.strided or value.dim() > 1:
        fail("scales", f"shape {tuple(value.shape)}, {value.layout}", "() or (heads_kv,), dense")
    if value.dtype != torch.float32:
        fail("scales", value.dtype, "torch.float32", TypeError)
    _without_gradient("scales", value)
    _in_range("scales", value)
    with torch.inference_mode(False):
        return value.detach().clone()


def _in_range(name: str, scales: Tensor, factor: float = 1.0) -> None:
    """Where the host sees them, on the CPU: finite and normal, also once they are multiplied by ``factor``."""
    if scales.device.type != "cpu" or not places.readable(scales):
        return
    made = scales * factor
    if not bool((made.isfinite() & (made >= _SMALLEST_SCALE)).all()):
        beyond = "" if factor == 1.0 else f", also when multiplied by {factor:g}"
        top = torch.finfo(torch.float32).max
        fail(name, scales.tolist(), f"finite numbers from {_SMALLEST_SCALE:.3g} to {top:.3g}{beyond}")


def _without_gradient(name: str, t: Tensor) -> None:
    if torch.is_grad_enabled() and t.requires_grad:
        fail(name, "a tensor that requires a gradient", "a detached tensor, or this call under torch.no_grad()")
    if autograd.forward_mode() and forward_ad.unpack_dual(t).tangent is not None:
        fail(name, "a tensor with a tangent", "a tensor without: this call has no derivative")


def _check_layouts(src: Any, dst: Any) -> None:
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, KVLayout):
            fail(name, type(layout).__name__, "an xattn.KVLayout", TypeError)
    if src.page_size % dst.page_size and dst.page_size % src.page_size:
        fail("dst.page_size", dst.page_size, f"a multiple or a divisor of src.page_size, {src.page_size}")


def _check(pages: Any, src: Any, dst: Any) -> None:
    _check_layouts(src, dst)
    if autograd.transforms_active():
        raise UnsupportedError("convert_pages: got a call under a torch.func transform; allowed: a call outside")
    validate.tensor("pages", pages, optional=False)
    if pages.layout is not torch.strided:
        fail("pages", str(pages.layout), "a dense (strided) tensor")
    if pages.dtype != src.dtype:
        fail("pages", pages.dtype, f"the dtype of src, {src.dtype}", TypeError)
    _without_gradient("pages", pages)
    axes = ("page_size", "heads_kv") if src.kv_layout == "NHD" else ("heads_kv", "page_size")
    shape, wanted = tuple(pages.shape), f"(num_pages, {', '.join(axes)}, head_dim), page_size {src.page_size}"
    if pages.dim() != 4 or shape[1 if src.kv_layout == "NHD" else 2] != src.page_size or 0 in shape[1:]:
        fail("pages", f"shape {shape}", f"{wanted}, heads_kv and head_dim from 1")
    if shape[0] * src.page_size % dst.page_size:
        joined = dst.page_size // src.page_size
        fail("pages", f"{shape[0]} pages", f"a multiple of {joined}, as {joined} of them become one")
    heads = shape[2 if src.kv_layout == "NHD" else 1]
    for name, scales in (("src.scales", src.scales), ("dst.scales", dst.scales)):
        if scales is None:
            continue
        if scales.dim() and tuple(scales.shape) != (heads,):
            fail(name, f"shape {tuple(scales.shape)}", f"() or ({heads},), one for each kv head")
        if scales.device != pages.device and (scales.dim() or scales.device.type != "cpu"):
            fail(name, f"device {scales.device}", f"the device of pages, {pages.device}")
    if dst.scales is None:
        pair = {src.dtype, dst.dtype}
        wider = dst.dtype == torch.float32 or (src.dtype.itemsize == 1 and dst.dtype.itemsize == 2)
        if not (wider or len(pair) == 1 or pair in _PAIRS):
            fail("dst.scales", None, f"scales: no choice makes {src.dtype} to {dst.dtype} exact")
        if src.scales is not None:
            _in_range("src.scales", src.scales, _FACTORS.get((src.dtype, dst.dtype), 1.0))


def _own(scales: Tensor | None, factor: float, device: torch.device) -> Tensor | None:
    """The scales of the old pages times ``factor``; None where there are none and the factor is 1."""
    if scales is not None:
        return scales * factor
    return None if factor == 1.0 else torch.full((), factor, dtype=torch.float32, device=device)


# ---------------------------------------------------------------- views
def _numbered(pages: Tensor, kv_layout: str) -> Tensor:
    """As (num_pages, page_size, heads_kv, head_dim)."""
    return pages if kv_layout == "NHD" else pages.transpose(1, 2)


def _split(pages: Tensor, small: int, large: int) -> Tensor:
    """As (large pages, small pages in each, tokens of a small page, heads_kv, head_dim); a view for any strides."""
    dim = 1 if pages.shape[1] == large else 0
    return pages.unflatten(dim, (-1, large // small) if dim == 0 else (large // small, small))


def _chunks(shape: torch.Size) -> Iterator[tuple[slice, ...]]:
    """Slices of the first three dimensions that hold about ``_CHUNK`` elements, at least one token, each."""
    room, steps = max(1, _CHUNK // (shape[3] * shape[4])), []
    for n in (shape[2], shape[1], shape[0]):
        steps.append(max(1, min(n, room)))
        room //= max(1, n)
    sides = zip(shape[:3], reversed(steps), strict=True)
    yield from itertools.product(*([slice(i, i + step) for i in range(0, n, step)] for n, step in sides))


def _bits(t: Tensor) -> Tensor:
    """As what it is moved as: not every operation knows fp8."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


# ---------------------------------------------------------------- numbers
def _rescaled(stored: Tensor, src: Tensor | None, dst: Tensor) -> Tensor:
    """stored * src / dst in float64, (..., heads_kv, head_dim).

    The product of two float32 is exact there. A quotient of 48 by 24 bits that is no midpoint of the new dtype is
    further from each than float64 rounds, so that rounding it again is rounding once.
    """
    product = stored.double()
    if src is not None:
        product = product * src.double()[..., None]
    return product / dst.double()[..., None]


def _nearest(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded once, to nearest even; beyond the range the largest, but for infinities of a dtype that has them."""
    top = torch.finfo(dtype).max
    clamped = numbers.clamp(-top, top)  # NaN stays NaN
    if dtype.itemsize > 1 or dtype == torch.float8_e5m2:
        clamped = torch.where(numbers.isinf(), numbers, clamped)
    if clamped.dtype == torch.float64 and dtype != torch.float32:
        clamped = _to_odd(clamped)
    return clamped.to(dtype)


def _to_odd(numbers: Tensor) -> Tensor:
    """float64 as float32, rounded to odd: what is not exact ends on an odd bit, so that a second rounding, which torch
    does on the way to 8 and 16 bits, finds no tie where there was none.

    Source: S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Trans. Computers 57 (2008).
    """
    near = numbers.float()
    bits = near.view(torch.int32)
    beyond = (near.double().abs() > numbers.abs()).to(torch.int32)
    inexact = (near.double() != numbers) & ~numbers.isnan()
    return torch.where(inexact, (bits - beyond) | 1, bits).view(torch.float32)
