"""Appends to paged caches, as records for the kernel and for the torch operations that define it: boundary values, and
bad values that only the device sees."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import xattn
from xattn.append_call import Append

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CACHES = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
INT_MAX = 2**31 - 1


def bits(x: Tensor) -> Tensor:
    """Comparable, NaN too."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


@dataclass(frozen=True)
class Case:
    """``new``: new tokens of each sequence, behind ``old`` of them; ``queries``: of each sequence, the newest.

    ``rotary``: pairs that are rotated, "i" where they are interleaved; ``tables``: the dtype of cos and sin. ``shift``:
    elements by which tensors do not lie at multiples of 16 bytes. ``view``: v_cache is a part of k_cache. ``cache``:
    its dtype, where it has one of its own.
    """

    dtype: str = "bf16"
    page_size: int = 16
    kv_layout: str = "NHD"
    heads: tuple[int, int] = (2, 2)  # heads_kv, gqa_ratio
    dims: tuple[int, int] = (32, 32)
    old: tuple[int, ...] = (5, 0, 37)
    new: tuple[int, ...] = (3, 3, 3)
    queries: tuple[int, ...] = (3, 3, 3)
    packed: bool = False
    index: torch.dtype = torch.int32
    rotary: str = ""
    tables: str = "fp32"
    scales: str = ""
    shift: int = 0
    view: bool = False
    causal: bool = False
    spare: int = 0
    cache: str = ""

    def __str__(self) -> str:
        return ",".join(f"{n}={v}" for n, v in vars(self).items() if v != getattr(Case, n)) or "plain"


def moved(x: Tensor, shift: int) -> Tensor:
    """The values of x, ``shift`` elements behind a multiple of 16 bytes."""
    flat = torch.full((x.numel() + shift + 16,), math.nan).to(x.dtype)
    start = (-flat.data_ptr() // x.itemsize) % (16 // x.itemsize) + shift
    found = flat[start : start + x.numel()].view(x.shape)
    found.copy_(x)
    return found


def made(case: Case) -> Append:
    g = torch.Generator().manual_seed(sum(case.old) + case.page_size)
    dtype = DTYPES[case.dtype]

    def randn(*shape: int) -> Tensor:
        return moved(torch.randn(shape, generator=g).to(dtype), case.shift)

    (heads, ratio), (d, dv), batch = case.heads, case.dims, len(case.old)
    used = [-(-(n + m) // case.page_size) for n, m in zip(case.old, case.new, strict=True)]
    order = torch.randperm(sum(used) + 2, generator=g)
    table = torch.full((batch, max(used) + 1), -12345678, dtype=case.index)
    table[:, 1::2] = INT_MAX
    for b, pages in enumerate(order[: sum(used)].split(used)):
        table[b, : len(pages)] = pages
    sizes = (case.page_size, heads) if case.kv_layout == "NHD" else (heads, case.page_size)
    of = CACHES.get(case.cache, dtype)
    k_cache = moved(torch.full((len(order), *sizes, d), math.nan).to(of), case.shift)
    v_cache = k_cache[..., :dv] if case.view else moved(torch.full((len(order), *sizes, dv), math.nan).to(of), 0)
    lead: dict[str, tuple[int, ...]] = {"new": (batch, case.new[0]), "q": (batch, case.queries[0])}
    offsets: dict[str, Tensor | None] = {"new": None, "q": None}
    if case.packed:
        for name, counts in (("new", case.new), ("q", case.queries)):
            offsets[name] = torch.tensor([0, *itertools.accumulate(counts)], dtype=case.index)
            lead[name] = (sum(counts) + case.spare,)
    rotary = None
    if case.rotary:
        width = int(case.rotary.rstrip("i"))
        angle = torch.randn(max(map(sum, zip(case.old, case.new, strict=True))) + 1, width, generator=g)
        tables = {"fp32": torch.float32, "fp64": torch.float64, **DTYPES}[case.tables]
        cos, sin = (moved(x.to(tables), case.shift) for x in (angle.cos(), angle.sin()))
        rotary = xattn.Rotary(cos, sin, case.rotary.endswith("i"))
    shape = {"": None, "0-d": (), "per head": (batch, heads)}[case.scales]
    scales = [None if shape is None else 0.5 + torch.rand(shape, generator=g) for _ in range(2)]
    return Append(
        page_table=table,
        seqlens_k=torch.tensor(case.old, dtype=case.index),
        k_cache=k_cache,
        v_cache=v_cache,
        kv_layout=case.kv_layout,
        k_new=randn(*lead["new"], heads, d),
        v_new=None if case.view else randn(*lead["new"], heads, dv),
        cu_seqlens_new=offsets["new"],
        k_scale=scales[0],
        v_scale=scales[1],
        q=randn(*lead["q"], heads * ratio, d),
        cu_seqlens_q=offsets["q"],
        rotary=rotary,
        causal=case.causal,
    )


def copied(x: Append) -> Append:
    """The same call of caches of its own, v_cache a part of k_cache where it was."""
    k_cache = x.k_cache.clone()
    part = x.v_cache.untyped_storage().data_ptr() == x.k_cache.untyped_storage().data_ptr()
    return replace(x, k_cache=k_cache, v_cache=k_cache[..., : x.v_cache.shape[-1]] if part else x.v_cache.clone())


def on(x: Append, device: str) -> Append:
    """The same call on a device, where tensors lie as they did; v_cache is no part of k_cache any more."""
    moved_there = {name: _there(t, device) for name, t in vars(x).items() if isinstance(t, Tensor)}
    if x.rotary is not None:
        tables = (_there(t, device) for t in (x.rotary.cos, x.rotary.sin))
        moved_there["rotary"] = xattn.Rotary(*tables, x.rotary.interleaved)
    return replace(x, **moved_there)


def _there(t: Tensor, device: str) -> Tensor:
    shift = t.data_ptr() % 16 // t.itemsize
    flat = torch.zeros(t.numel() + shift, dtype=t.dtype, device=device)
    return flat[shift:].view(t.shape).copy_(t)


PLAIN = Case()
FP8_OPTIONS = [("", ""), ("0-d", "16"), ("per head", "16i"), ("per head", "")]
FP8_DIMS = [(128, 64), (40, 72), (17, 9)]
CASES = [
    PLAIN,
    *(Case(page_size=n, kv_layout=layout) for n in (1, 3, 16, 64) for layout in ("NHD", "HND")),
    *(Case(dtype, rotary=r) for dtype in DTYPES for r in ("16", "16i", "8", "4i", "5", "3i", "1", "1i")),
    *(Case(dtype, rotary=r, tables=dtype) for dtype in DTYPES for r in ("16", "8i", "3")),
    *(Case(dims=dims, rotary="8") for dims in ((128, 64), (40, 72), (17, 9), (576, 512))),
    *(Case(heads=heads, rotary="8i") for heads in ((1, 1), (1, 12), (5, 3))),
    *(Case(packed=True, new=(3, 0, 9), queries=(3, 0, 9), rotary="16", index=i) for i in (torch.int32, torch.int64)),
    Case(packed=True, new=(0, 0, 4), queries=(2, 1, 1), rotary="16i", spare=3),
    Case(packed=True, new=(0, 0, 0), queries=(0, 0, 0), rotary="16"),
    Case(new=(0, 0, 0), queries=(1, 1, 1), rotary="16", index=torch.int64),
    Case(queries=(9, 9, 9), rotary="16", causal=True),
    Case(queries=(9, 9, 9), rotary="16i"),
    Case(packed=True, queries=(7, 2, 60), rotary="16", causal=True),
    *(Case(dtype, scales=s, rotary=r) for dtype in DTYPES for s in ("0-d", "per head") for r in ("", "16")),
    Case(packed=True, scales="per head", new=(3, 0, 9), queries=(0, 0, 9)),
    *(Case(shift=n, rotary=r) for n in (1, 4) for r in ("", "16", "16i")),
    Case(view=True, dims=(48, 32), rotary="8"),
    Case(view=True, dims=(48, 32), kv_layout="HND"),
    Case(old=(700, 3), new=(200, 200), queries=(200, 200), rotary="16", page_size=64),
    *(Case(dtype, cache=c, scales=s, rotary=r) for dtype in DTYPES for c in CACHES for s, r in FP8_OPTIONS),
    *(Case(cache=c, shift=n, rotary="16", scales="0-d") for c in CACHES for n in (1, 4, 8)),
    *(Case(cache=c, dims=dims, page_size=7, kv_layout="HND", rotary="8i") for c in CACHES for dims in FP8_DIMS),
    Case(cache="e4m3fn", packed=True, scales="per head", new=(3, 0, 9), queries=(0, 0, 9), index=torch.int64),
    Case(cache="e4m3fn", view=True, dims=(48, 32), rotary="8"),
]


# ---------------------------------------------------------------- what only the device sees
def changed(name: str, value: Any, index: Any = slice(None)):
    def change(x: Append) -> Append:
        t = getattr(x, name).clone()
        t[index] = torch.as_tensor(value, dtype=t.dtype)
        return replace(x, **{name: t})

    return change


ENDS = [2**63 - 1, -(2**63), 2**63 - 1, -(2**63)]
PACKED = Case(packed=True, new=(3, 0, 9), queries=(3, 0, 9), rotary="16", spare=1, index=torch.int64)
WIDE = Case(rotary="16", index=torch.int64)
BAD = {
    "page id below 0": (WIDE, changed("page_table", -1, (0, 0))),
    "page id too large": (WIDE, changed("page_table", 9999, (2, 2))),
    "page id beyond 32 bits": (WIDE, changed("page_table", (1 << 32) + 1, (0, 0))),
    "no room": (WIDE, changed("seqlens_k", 62, 2)),
    "length below 0": (WIDE, changed("seqlens_k", -2, 1)),
    "length far below 0": (replace(WIDE, causal=True), changed("seqlens_k", -99, 1)),
    "lengths at the ends": (WIDE, changed("seqlens_k", [2**40, -(2**40), 2**31])),
    "offsets start late": (PACKED, changed("cu_seqlens_new", [1, 3, 3, 12])),
    "offsets leave": (PACKED, changed("cu_seqlens_new", [0, 3, 3, 99])),
    "offsets of q leave": (PACKED, changed("cu_seqlens_q", [0, 3, 3, 99])),
}
TANGLED = {  # where torch's search finds other sequences than the kernel's
    "offsets fall": (PACKED, changed("cu_seqlens_new", [0, 5, 3, 12])),
    "offsets at the ends": (PACKED, changed("cu_seqlens_new", ENDS)),
    "offsets of q at the ends": (PACKED, changed("cu_seqlens_q", ENDS)),
    "lengths beyond all numbers": (WIDE, changed("seqlens_k", ENDS[:3])),
}
