"""The one validation layer. Everything the host can see is checked before anything is launched or written (contract
12).

``number``, ``flag``, ``window`` and the like normalise Python arguments; ``call`` checks the tensors of a call against
each other, on real and on fake tensors; ``values`` checks what only the device holds: at once on the CPU, by the status
word on a GPU.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import places, status
from .inputs import DTYPES, FP8, NO_BOUND, Inputs, address, dtype_name, present

_LARGEST = 2**63 - 1
_SMALLEST, _LARGEST_FACTOR = 2.0**-126, 1e30  # the first normal number of float32; and far from its last
_INT = (torch.int32, torch.int64)
_FLOAT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OUT = (*DTYPES, torch.int8, torch.uint8)


def fail(name: str, got: object, allowed: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: got {got}; allowed: {allowed}")


# ---------------------------------------------------------------- Python arguments
def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):  # numpy's scalars are
            fail(name, type(value).__name__, "a number", TypeError)
        value = operator.index(value) if isinstance(value, numbers.Integral) else float(value)
    if not (low <= value <= high and -math.inf < value < math.inf):
        below, above = "" if low == -math.inf else f" from {low:g}", "" if high == math.inf else f" to {high:g}"
        fail(name, value, f"a finite number{below}{above}")
    try:
        return float(value)
    except OverflowError:
        fail(name, value, "a number that a float can hold")


def factor(name: str, value: Any) -> float:
    """softmax_scale or softcap: kernels multiply by it and divide by it in float32, in which nothing then overflows."""
    got = number(name, value, low=0.0 if name == "softcap" else -math.inf)
    if got and not _SMALLEST <= abs(got) <= _LARGEST_FACTOR:
        fail(name, value, f"0, or a number of a size from {_SMALLEST:.3g} to {_LARGEST_FACTOR:g}")
    return got


def flag(name: str, value: Any) -> bool:
    """A bool; numpy's become Python's."""
    if not isinstance(value, bool):
        if type(value).__module__ != "numpy" or type(value).__name__ not in ("bool", "bool_"):
            fail(name, type(value).__name__, "True or False", TypeError)
        value = bool(value)
    return value


def count(name: str, value: Any, low: int = 0) -> int:
    """A whole number, concrete or symbolic; numpy's become Python's."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            fail(name, type(value).__name__, "a whole number", TypeError)
        value = operator.index(value)
    if value < low:
        fail(name, value, f"a whole number from {low}")
    if isinstance(value, int) and value > _LARGEST:
        fail(name, value, f"a whole number up to {_LARGEST}")
    return value


def window(value: Any) -> tuple[int | None, int | None]:
    """(left, right), inclusive distances; None on a side is unbounded."""
    if value is None:
        return None, None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        fail("window", repr(value), "None or (left, right), each None or a distance from 0", TypeError)
    sides: list[int | None] = []
    for side in value:
        if side is None:
            sides.append(None)
            continue
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt, numbers.Integral)):
            fail("window", f"{type(side).__name__} in {value!r}", "distances from 0, or None for unbounded", TypeError)
        if side < 0:
            fail("window", tuple(value), "distances from 0; use None, not a negative number, for a side without bound")
        sides.append(count("window", side))
    return sides[0], sides[1]


def tensor(name: str, value: Any, optional: bool = True) -> Tensor | None:
    if value is None and optional:
        return None
    if not isinstance(value, Tensor):
        fail(name, type(value).__name__, "a torch.Tensor" + (" or None" if optional else ""), TypeError)
    if value.is_nested:
        fail(name, "a nested tensor", "a dense (strided) tensor; packed sequences go to attention_varlen")
    return value


def alike(name: str, t: Tensor, first: Tensor, device: torch.device) -> None:
    """A float tensor of the shape and dtype of ``first``, on ``device``."""
    if t.layout is not torch.strided:
        fail(name, str(t.layout), "dense (strided) tensors")
    if (t.shape, t.dtype, t.device) != (first.shape, first.dtype, device) or t.dtype not in _FLOAT:
        got = f"shape {tuple(t.shape)}, {t.dtype}, {t.device}"
        dtype = first.dtype if first.dtype in _FLOAT else "a float dtype of 16 or more bits"
        fail(name, got, f"shape {tuple(first.shape)}, {dtype}, {device}: all alike")


def writable(name: str, t: Tensor) -> None:
    """A tensor that can be written to: no two elements in one place, no inference tensor outside inference mode."""
    if not torch.compiler.is_compiling() and t.is_inference() and not torch.is_inference_mode_enabled():
        fail(name, "an inference tensor", "a tensor made outside torch.inference_mode(), or this call within it")
    dims = [(s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] if t.numel() else []
    for i, (stride, _) in enumerate(dims):  # each must step beyond all that those of smaller strides reach
        reach = 0
        for j, (s, n) in enumerate(dims):  # sizes may be symbols here, which cannot be sorted
            if i != j and s <= stride:
                reach += s * (n - 1)
        if stride <= reach:
            fail(name, f"strides {t.stride()} for shape {tuple(t.shape)}", "a tensor whose elements do not overlap")


def scale(name: str, value: Any, like: Tensor) -> Tensor | None:
    """A scale as a float32 tensor on the device of ``like``: a number becomes 0-d."""
    if value is None or isinstance(value, Tensor):
        return tensor(name, value)
    top = torch.finfo(torch.float32).max
    return torch.full((), number(name, value, -top, top), dtype=torch.float32, device=like.device)


def finite(name: str, value: Tensor | None) -> None:
    """A scale of finite numbers, where the host sees them: on the CPU."""
    if value is None or value.device.type != "cpu" or not value.is_floating_point() or address(value) is None:
        return
    if not bool(value.isfinite().all()):
        fail(name, value.tolist(), "finite numbers")


# ---------------------------------------------------------------- tensors of a call
def call(x: Inputs, grads: Sequence[str] = ()) -> None:
    """Checks one call. Raises ValueError or TypeError that names the argument, what was got and what is allowed."""
    for field, t in x.tensors().items():
        name = _given_as(x, field)
        if t.layout is not torch.strided:
            fail(name, str(t.layout), "a dense (strided) tensor")
        if t.device != x.q.device:
            fail(name, f"device {t.device}", f"the device of q, {x.q.device}")
    _dtypes(x)
    {"attention": _dense, "varlen": _varlen, "paged": _paged}[x.kind](x)
    _heads(x)
    _masks(x)
    _numbers(x)
    if grads:
        if x.kind == "paged":
            fail(
                _given_as(x, grads[0].removesuffix("_aux")),
                "a tensor that requires a gradient",
                "attention_paged has no gradient: call it under torch.no_grad()",
            )
        if x.dtype_out not in _FLOAT:
            fail("out_dtype", x.dtype_out, "a dtype of 16 or more bits where a gradient is asked for")


def _given_as(x: Inputs, field: str) -> str:
    """What the caller calls a field of the record."""
    return f"{field}_cache" if x.kind == "paged" and field in ("k", "v") else field


def _dtypes(x: Inputs) -> None:
    q, k, v = (dtype_name(t.dtype) for t in (x.q, x.k, x.v))
    name_k, name_v = (_given_as(x, n) for n in "kv")
    for name, got in (("q", q), (name_k, k), (name_v, v)):
        if got not in DTYPES.values():
            fail(name, got, ", ".join(DTYPES.values()), TypeError)
    if k != v:
        fail(name_v, v, f"the dtype of {name_k}, {k}", TypeError)
    if q != k and not (q in ("bf16", "fp16", "fp32") and k in FP8):
        fail(f"{name_k}, {name_v}", k, f"the dtype of q, {q}, or fp8 under a bf16, fp16 or fp32 q", TypeError)
    if x.out_dtype is not None and x.out_dtype not in _OUT:
        fail("out_dtype", x.out_dtype, ", ".join(map(dtype_name, _OUT)), TypeError)


def _rank(name: str, t: Tensor, shape: tuple[str, ...]) -> None:
    if t.dim() != len(shape):
        fail(name, f"shape {tuple(t.shape)}", f"({', '.join(shape)})")


def _shape(name: str, t: Tensor, *allowed: tuple[Any, ...]) -> None:
    if not any(t.dim() == len(a) and all(m == n for m, n in zip(t.shape, a, strict=True)) for a in allowed):
        fail(name, f"shape {tuple(t.shape)}", " or ".join(str(tuple(a)) for a in allowed))


def _integer(name: str, t: Tensor) -> None:
    if t.dtype not in _INT:
        fail(name, t.dtype, "torch.int32 or torch.int64", TypeError)


def _dense(x: Inputs) -> None:
    _rank("q", x.q, ("batch", "seqlen_q", "heads_q", "head_dim"))
    _rank("k", x.k, ("batch", "seqlen_k", "heads_kv", "head_dim"))
    _rank("v", x.v, ("batch", "seqlen_k", "heads_kv", "head_dim_v"))
    _shape("k", x.k, (x.q.shape[0], x.k.shape[1], x.k.shape[2], x.q.shape[3]))
    _shape("v", x.v, (*x.k.shape[:3], x.v.shape[3]))


def _varlen(x: Inputs) -> None:
    _rank("q", x.q, ("total_q", "heads_q", "head_dim"))
    _rank("k", x.k, ("total_k", "heads_kv", "head_dim"))
    _rank("v", x.v, ("total_k", "heads_kv", "head_dim_v"))
    _shape("k", x.k, (x.k.shape[0], x.k.shape[1], x.q.shape[2]))
    _shape("v", x.v, (*x.k.shape[:2], x.v.shape[2]))
    assert x.cu_seqlens_q is not None and x.cu_seqlens_k is not None
    for name, t in (("cu_seqlens_q", x.cu_seqlens_q), ("cu_seqlens_k", x.cu_seqlens_k)):
        _integer(name, t)
        _rank(name, t, ("batch + 1",))
        if t.shape[0] < 1:
            fail(name, "no element", "batch + 1 elements, the first of them 0")
    _shape("cu_seqlens_k", x.cu_seqlens_k, tuple(x.cu_seqlens_q.shape))
    count("max_seqlen_q", x.max_seqlen_q)
    count("max_seqlen_k", x.max_seqlen_k)


def _paged(x: Inputs) -> None:
    if x.kv_layout not in ("NHD", "HND"):
        fail("kv_layout", repr(x.kv_layout), "'NHD' or 'HND'")
    if x.cu_seqlens_q is None:
        _rank("q", x.q, ("batch", "seqlen_q", "heads_q", "head_dim"))
        if x.max_seqlen_q < x.q.shape[1]:
            fail("max_seqlen_q", x.max_seqlen_q, f"from {x.q.shape[1]}, the seqlen_q of q")
    else:
        _rank("q", x.q, ("total_q", "heads_q", "head_dim"))
        _integer("cu_seqlens_q", x.cu_seqlens_q)
        _rank("cu_seqlens_q", x.cu_seqlens_q, ("batch + 1",))
        if x.cu_seqlens_q.shape[0] < 1:
            fail("cu_seqlens_q", "no element", "batch + 1 elements, the first of them 0")
    names = ("num_pages", "page_size", "heads_kv") if x.kv_layout == "NHD" else ("num_pages", "heads_kv", "page_size")
    _rank("k_cache", x.k, (*names, "head_dim"))
    _rank("v_cache", x.v, (*names, "head_dim_v"))
    _shape("k_cache", x.k, (*x.k.shape[:3], x.q.shape[-1]))
    _shape("v_cache", x.v, (*x.k.shape[:3], x.v.shape[3]))
    if x.page_size < 1:
        fail("k_cache", f"page_size {x.page_size}", "a page_size from 1")
    assert x.page_table is not None and x.seqlens_k is not None
    _integer("page_table", x.page_table)
    _rank("page_table", x.page_table, ("batch", "max_pages"))
    _shape("page_table", x.page_table, (x.batch, x.page_table.shape[1]))
    _integer("seqlens_k", x.seqlens_k)
    _shape("seqlens_k", x.seqlens_k, (x.batch,))
    if x.num_splits is not None:
        count("num_splits", x.num_splits, 1)


def _heads(x: Inputs) -> None:
    if x.head_dim < 1 or x.head_dim_v < 1:
        fail("head_dim", (x.head_dim, x.head_dim_v), "head_dim and head_dim_v from 1")
    if x.num_heads_kv < 1 or x.num_heads_q < 1 or x.num_heads_q % x.num_heads_kv:
        fail("q", f"{x.num_heads_q} heads", f"a multiple of the {x.num_heads_kv} heads of k, at least one")


def _masks(x: Inputs) -> None:
    b, hq, hkv = x.batch, x.num_heads_q, x.num_heads_kv
    if x.attn_mask is not None:
        mask = x.attn_mask
        if x.kind == "paged":
            total = x.q.shape[0] if x.packed else x.q.shape[0] * x.q.shape[1]
            if mask.dtype != torch.bool:
                fail("attn_mask", mask.dtype, "torch.bool in paged calls (a tree mask over the new tokens)", TypeError)
            _shape("attn_mask", mask, (total, x.seqlen_q))
        else:
            if mask.dtype != torch.bool and mask.dtype not in _FLOAT:
                fail("attn_mask", mask.dtype, "torch.bool, or a float dtype to be added", TypeError)
            full = (b, hq, x.seqlen_q, x.seqlen_k)
            dims = zip(reversed(mask.shape), reversed(full), strict=False)
            if mask.dim() > 4 or not all(m == n or m == 1 for m, n in dims):
                fail(
                    "attn_mask",
                    f"shape {tuple(mask.shape)}",
                    f"a shape that broadcasts to {full} (batch, heads_q, seqlen_q, seqlen_k)",
                )
    if x.alibi_slopes is not None:
        _floating("alibi_slopes", x.alibi_slopes)
        _shape("alibi_slopes", x.alibi_slopes, (hq,), (b, hq))
    if x.sinks is not None:
        _floating("sinks", x.sinks)
        _shape("sinks", x.sinks, (hq,))
    if x.seqused_k is not None:
        _integer("seqused_k", x.seqused_k)
        _shape("seqused_k", x.seqused_k, (b,))
    for name in ("q_scale", "k_scale", "v_scale"):
        t = getattr(x, name)
        if t is not None:
            if t.dtype != torch.float32:
                fail(name, t.dtype, "torch.float32", TypeError)
            _shape(name, t, (), (b, hkv))


def _floating(name: str, t: Tensor) -> None:
    if t.dtype not in _FLOAT:
        fail(name, t.dtype, "a float dtype of 16 or more bits", TypeError)


def _numbers(x: Inputs) -> None:
    for name in ("window_left", "window_right"):
        side = getattr(x, name)
        if side is not None and side < 0:
            fail("window", side, "distances from 0; use None, not a negative number, for a side without bound")
    factor("softcap", x.softcap)
    number("dropout_p", x.dropout_p, 0.0, 1.0)
    if x.softmax_scale is not None:
        factor("softmax_scale", x.softmax_scale)
    if x.dropout_rng is not None:
        if x.dropout_rng.dtype != torch.int64:
            fail("dropout_rng", x.dropout_rng.dtype, "torch.int64", TypeError)
        _shape("dropout_rng", x.dropout_rng, (2,), *([(4,)] if x.kind == "attention" else []))
    elif x.dropout_p > 0:
        fail(
            "dropout_rng", None, "an int64[2] tensor (seed, offset) where the op is called directly with dropout_p > 0"
        )


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seqlens_k: Tensor,
    k_new: Tensor,
    v_new: Tensor | None,
    cu_seqlens_new: Tensor | None,
    kv_layout: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Checks what is to be written into a paged cache; the cache itself is checked by ``call`` as well."""
    if kv_layout not in ("NHD", "HND"):
        fail("kv_layout", repr(kv_layout), "'NHD' or 'HND'")
    heads_dim = 2 if kv_layout == "NHD" else 1
    named = {"k_cache": k_cache, "v_cache": v_cache, "page_table": page_table, "seqlens_k": seqlens_k, "k_new": k_new}
    named |= {
        n: t
        for n, t in (("v_new", v_new), ("cu_seqlens_new", cu_seqlens_new), ("k_scale", k_scale), ("v_scale", v_scale))
        if t is not None
    }
    for name, t in named.items():
        if t.layout is not torch.strided:
            fail(name, str(t.layout), "a dense (strided) tensor")
        if t.device != k_cache.device:
            fail(name, f"device {t.device}", f"the device of k_cache, {k_cache.device}")
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        _rank(name, t, ("num_pages", "page_size", "heads_kv", "head_dim"))
    for name, t in (("page_table", page_table), ("seqlens_k", seqlens_k)):
        _integer(name, t)
    _rank("page_table", page_table, ("batch", "max_pages"))
    batch = page_table.shape[0]
    _shape("seqlens_k", seqlens_k, (batch,))
    heads = k_cache.shape[heads_dim]
    lead = k_new.shape[:-2]
    if cu_seqlens_new is None:
        _rank("k_new", k_new, ("batch", "seqlen_new", "heads_kv", "head_dim"))
        _shape("k_new", k_new, (batch, k_new.shape[1], heads, k_cache.shape[3]))
    else:
        _integer("cu_seqlens_new", cu_seqlens_new)
        _shape("cu_seqlens_new", cu_seqlens_new, (batch + 1,))
        _rank("k_new", k_new, ("total_new", "heads_kv", "head_dim"))
        _shape("k_new", k_new, (k_new.shape[0], heads, k_cache.shape[3]))
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        if new is None:
            continue
        if new.dtype not in DTYPES:
            fail(name, new.dtype, ", ".join(DTYPES.values()), TypeError)
        if dtype_name(k_cache.dtype) not in FP8 and new.dtype != k_cache.dtype:
            fail(name, new.dtype, f"the dtype of the cache, {k_cache.dtype}", TypeError)
    if v_new is not None:
        _shape("v_new", v_new, (*lead, heads, v_cache.shape[3]))
        if _share_elements(k_cache, v_cache):
            allowed = "None, since v_cache shares elements with k_cache: values would overwrite keys"
            fail("v_new", "a tensor", allowed)
    elif v_cache.numel() and not _is_part(v_cache, k_cache):
        allowed = "a tensor; it may be left out only where v_cache is a view of k_cache, some channels of each token"
        fail("v_new", None, allowed)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            if scale.dtype != torch.float32:
                fail(name, scale.dtype, "torch.float32", TypeError)
            _shape(name, scale, (), (batch, heads))


def queries(q: Tensor, cu_seqlens_q: Tensor | None, seqlens_k: Tensor) -> None:
    """Checks the queries of a paged call against the lengths of its sequences."""
    for name, t in (("q", q), ("seqlens_k", seqlens_k), ("cu_seqlens_q", cu_seqlens_q)):
        if t is not None and t.layout is not torch.strided:
            fail(name, str(t.layout), "a dense (strided) tensor")
        if t is not None and t.device != q.device:
            fail(name, f"device {t.device}", f"the device of q, {q.device}")
    _integer("seqlens_k", seqlens_k)
    _rank("seqlens_k", seqlens_k, ("batch",))
    batch = seqlens_k.shape[0]
    if cu_seqlens_q is None:
        _rank("q", q, ("batch", "seqlen_q", "heads_q", "head_dim"))
        _shape("q", q, (batch, *q.shape[1:]))
    else:
        _rank("q", q, ("total_q", "heads_q", "head_dim"))
        _integer("cu_seqlens_q", cu_seqlens_q)
        _shape("cu_seqlens_q", cu_seqlens_q, (batch + 1,))


def _is_part(v_cache: Tensor, k_cache: Tensor) -> bool:
    """Whether each vector of v_cache lies within the one of k_cache at the same page, slot and head."""
    if not _one_storage(v_cache, k_cache) or v_cache.dtype != k_cache.dtype or v_cache.shape[:3] != k_cache.shape[:3]:
        return False
    if any(n > 1 and v_cache.stride(i) != k_cache.stride(i) for i, n in enumerate(k_cache.shape[:3])):
        return False
    first = v_cache.storage_offset() - k_cache.storage_offset()
    last = first + (v_cache.shape[3] - 1) * v_cache.stride(3)
    step, end = k_cache.stride(3), (k_cache.shape[3] - 1) * k_cache.stride(3)
    if step == 0 or k_cache.shape[3] == 1:
        return bool(first == last == 0)
    return bool(
        first >= 0
        and last <= end
        and first % step == 0
        and last % step == 0
        and (v_cache.shape[3] == 1 or v_cache.stride(3) % step == 0)
    )


def _one_storage(a: Tensor, b: Tensor) -> bool:
    try:
        return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
    except RuntimeError:  # a tensor under vmap shows none
        return False


# Steps of the search below; strides that are nested, as those of slices and transposed views are, take a few of each.
_SEARCH = 4096


def _share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether a byte belongs to both; True as well where strides are so tangled that the search ends first."""
    if not _one_storage(a, b) or not a.numel() or not b.numel():
        return False
    ranges: dict[int, list[int]] = {}  # by stride in bytes: the least and the most steps of b less those of a
    for t, side in ((b, 1), (a, 0)):
        for stride, n in zip((*t.stride(), None), (*t.shape, t.itemsize), strict=True):
            steps = ranges.setdefault(1 if stride is None else stride * t.itemsize, [0, 0])
            steps[side] += (n - 1) * (1 if side else -1)
    dims = sorted(((s, *steps) for s, steps in ranges.items() if s), reverse=True)
    left = _SEARCH

    def found(dim: int, distance: int) -> bool:
        """Whether steps of the dimensions from ``dim`` on add up to ``distance``."""
        nonlocal left
        left -= 1
        if dim == len(dims) or left < 0:
            return left < 0 or distance == 0
        stride, least, most = dims[dim]
        low, high = (sum(s * steps[end] for s, *steps in dims[dim + 1 :]) for end in (0, 1))
        first, last = max(least, -((high - distance) // stride)), min(most, (distance - low) // stride)
        return any(found(dim + 1, distance - n * stride) for n in range(first, last + 1))

    return found(0, int(a.storage_offset() * a.itemsize - b.storage_offset() * b.itemsize))


def divisor(name: str, value: Any) -> None:
    """A scale that new tokens are divided by, where the host sees it: a number, or a tensor on the CPU."""
    allowed = "more than 0 where tokens are written, which are divided by it"
    if isinstance(value, (int, float)) and not value > 0:
        fail(name, value, allowed)
    if isinstance(value, Tensor) and value.device.type == "cpu" and places.readable(value):
        finite(name, value)
        if not bool((value > 0).all()):
            fail(name, value.tolist(), allowed)


# ---------------------------------------------------------------- values on the device
def values(x: Inputs, lengths: Tensor | None = None) -> None:
    """Checks lengths, offsets and page ids where they are: raises on the CPU, sets the status word on a GPU.

    ``lengths``: of a paged call whose new tokens are not written yet, with them; ``x.seqlens_k`` is without them.
    """
    for name in ("q_scale", "k_scale", "v_scale"):
        finite(name, getattr(x, name))
    if x.cu_seqlens_q is not None:
        offsets("cu_seqlens_q", x.cu_seqlens_q, x.q.shape[0], x.max_seqlen_q, "max_seqlen_q")
    if x.cu_seqlens_k is not None:
        offsets("cu_seqlens_k", x.cu_seqlens_k, x.k.shape[0], x.max_seqlen_k, "max_seqlen_k")
    if x.seqused_k is not None:
        room = x.k.shape[1] if x.kind == "attention" else present(x.cu_seqlens_k).diff()
        least = f"0 to {room}" if isinstance(room, int) else "0 to the length of its sequence in k"
        status.report("seqlens_k", (x.seqused_k < 0) | (x.seqused_k > room), "seqused_k", x.seqused_k, least)
    if x.kind == "paged":
        page_table, seqlens_k = present(x.page_table), present(x.seqlens_k)
        tokens = page_table.shape[1] * x.page_size
        allowed = f"0 to {tokens}, the tokens that the page table has room for"
        status.report("seqlens_k", (seqlens_k < 0) | (seqlens_k > tokens), "seqlens_k", seqlens_k, allowed)
        longest = seqlens_k if lengths is None else lengths
        if x.max_seqlen_k != NO_BOUND:
            bound = "at least the longest sequence in the cache, with its new tokens"
            status.report("max_seqlen", longest > x.max_seqlen_k, "max_seqlen_k", x.max_seqlen_k, bound)
        first = torch.arange(page_table.shape[1], device=x.q.device) * x.page_size
        used = first < seqlens_k[:, None]
        bad = used & ((page_table < 0) | (page_table >= x.k.shape[0]))
        status.report("page_table", bad, "page_table", page_table, f"page ids from 0, below num_pages, {x.k.shape[0]}")


def offsets(name: str, cu_seqlens: Tensor, total: int, longest: int | None = None, longest_name: str = "") -> None:
    if cu_seqlens.shape[0] < 1:
        return
    falls = (cu_seqlens[1:] < cu_seqlens[:-1]).any()  # compared, since a difference may overflow
    bad = (cu_seqlens[:1] != 0) | (cu_seqlens[-1:] > total) | falls
    allowed = f"offsets from 0, never decreasing, up to the {total} tokens that are packed"
    status.report("cu_seqlens", bad.any(), name, cu_seqlens, allowed)
    if longest is not None:
        length = cu_seqlens[1:] - cu_seqlens[:-1]
        allowed = "at least the longest sequence, which " + name + " tells"
        status.report("max_seqlen", length > longest, longest_name, longest, allowed)
