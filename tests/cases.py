"""The one generator of cases: what each backend's capability admits, crossed with boundary values.

A ``Case`` names a call by its boundary values; ``make`` builds its tensors, with NaN wherever no result may look;
``check`` runs it on one backend and measures results and gradients against tests/oracle.py, or sees to it that the
backend refuses as its plan says. For each target (backend, device) every pair of admitted values occurs together in
some case, and every value not admitted in a case of its own.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from torch import Tensor

import xattn
from xattn import dispatch
from xattn.backends import REGISTRY

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
RNG = (0x1234_5678_9ABC_DEF1, 977)  # (seed, offset) of dropout


@dataclass(frozen=True)
class Case:
    """The values of a call. ``lengths``: (seqlen_q, seqlen_k) of each sequence; in dense calls of all. In paged calls
    seqlen_k counts the new tokens as well. ``heads``: (heads_kv, gqa_ratio). ``attn_mask``: "bool" or "add", then its
    dimensions by letter ("1" broadcasts). ``layout``: the strides of q, k, v. ``grads``: what asks for gradients.
    ``spare``: rows and pages that belong to no sequence."""

    kind: str = "attention"
    dtype: str = "fp32"  # of q; "bf16/e4m3" where k and v have another
    head_dims: tuple[int, int] = (16, 16)
    heads: tuple[int, int] = (2, 1)
    batch: int = 2
    lengths: tuple[tuple[int, int], ...] = ((5, 7),)
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    attn_mask: str = ""
    alibi_slopes: str = ""
    sinks: bool = False
    seqused_k: str = ""
    dropout_p: float = 0.0
    score_mod: str = ""
    mask_mod: str = ""
    epilogue: str = ""
    scales: str = ""
    return_lse: bool = False
    layout: str = "contiguous"
    grads: str = ""
    out: bool = False
    index: str = "int32"
    longest: int = 0  # added to max_seqlen_q and max_seqlen_k
    spare: int = 0
    page_size: int = 0
    kv_layout: str = "NHD"
    packed: bool = False

    def __str__(self) -> str:
        base = BASE[self.kind]
        parts = [
            f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != getattr(base, f.name)
        ]
        return f"{self.kind} {' '.join(parts)}"


class Target(NamedTuple):
    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"


# ---------------------------------------------------------------- boundary values
HEAD_DIMS = [
    *((d, d) for d in (16, 8, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)),
    *((192, 128), (576, 512), (7, 9)),
]
HEADS = [(2, 1), (2, 3), (1, 5), (1, 6), (1, 7), (1, 12), (1, 71)]
WINDOWS = [None, (0, 0), (3, None), (None, 2), (None, None), (7, 5), (64, 0), (0, 3)]
SHARED: dict[str, list[Any]] = {
    "dtype": [
        "fp32",
        "bf16",
        "fp16",
        "fp64",
        "bf16/e4m3",
        "fp16/e5m2",
        "fp32/e4m3fnuz",
        "e4m3",
        "e5m2",
        "e4m3fnuz",
        "e5m2fnuz",
    ],
    "causal": [False, True],
    "window": WINDOWS,
    "softmax_scale": [None, 0.3, 0.0, -0.2],
    "softcap": [0.0, 2.5, 50.0],
    "alibi_slopes": ["", "h", "bh"],
    "sinks": [False, True],
    "score_mod": ["", "plain", "captured"],
    "mask_mod": ["", "plain", "captured"],
    "epilogue": ["", "captured", "fp8", "int8"],
    "scales": ["", "number", "0-d", "per head"],
    "return_lse": [False, True],
    "layout": [
        "contiguous",
        "heads first",
        "every 2nd row",
        "offset 1",
        "offset 2",
        "offset 3",
        "expanded heads",
        "last dim",
        "k only",
    ],
}
MASKS = [
    "bool bhqk",
    "add bhqk",
    "bool qk",
    "add k",
    "bool b11k",
    "add hq1",
    "bool 1",
    "add 11qk",
    "bool b1q1",
    "add 1",
]
DENSE_AND_VARLEN: dict[str, list[Any]] = {
    "attn_mask": ["", *MASKS],
    "seqused_k": ["", "int32", "int64"],
    "dropout_p": [0.0, 0.25, 1.0],
    "grads": ["", "qkv", "k", "all"],
    "out": [False, True],
}
VALUES: dict[str, dict[str, list[Any]]] = {
    "attention": {
        "head_dims": HEAD_DIMS,
        "lengths": [
            ((q, k),)
            for q, k in (
                (5, 7),
                (1, 64),
                (0, 3),
                (3, 0),
                (5, 2),
                (2, 1),
                (63, 65),
                (64, 64),
                (65, 63),
                (1, 129),
                (130, 9),
            )
        ],
        "heads": HEADS,
        "batch": [2, 1, 0, 3],
        **SHARED,
        **DENSE_AND_VARLEN,
    },
    "varlen": {
        "head_dims": [(16, 16), (8, 8), (72, 72), (128, 128), (192, 128)],
        "lengths": [
            ((5, 7), (3, 3)),
            ((1, 3), (0, 0), (1, 5)),
            ((0, 0),),
            ((4, 0), (0, 5), (2, 2)),
            ((65, 64), (1, 130), (7, 2)),
            (),
        ],
        "heads": [(2, 1), (1, 3), (1, 7)],
        "index": ["int32", "int64"],
        "longest": [0, 9],
        "spare": [0, 3],
        **SHARED,
        **DENSE_AND_VARLEN,
        "dtype": ["fp32", "bf16", "fp16", "fp64", "bf16/e4m3", "e4m3"],
        "attn_mask": ["", "bool bhqk", "add bhqk", "add qk", "bool b11k", "bool 1"],
        "layout": ["contiguous", "heads first", "every 2nd row", "offset 1", "last dim"],
    },
    "paged": {
        "head_dims": [(16, 16), (40, 40), (64, 64), (192, 128), (576, 512)],
        "lengths": [
            ((3, 5), (3, 17)),
            ((1, 130), (1, 1), (1, 64)),
            ((2, 0), (2, 2)),
            ((4, 2),),
            ((0, 3), (0, 0)),
            ((64, 65),),
        ],
        "heads": [(2, 1), (1, 5), (1, 12), (1, 71)],
        "page_size": [16, 1, 7, 24, 64, 128, 256],
        "kv_layout": ["NHD", "HND"],
        "packed": [False, True],
        "index": ["int32", "int64"],
        "spare": [0, 3],
        "attn_mask": ["", "tree"],
        "out": [False, True],
        **SHARED,
        "dtype": ["fp32", "bf16", "fp16", "fp64", "bf16/e4m3", "fp16/e4m3fnuz", "fp16/e5m2", "e4m3"],
    },
}
BASE = {
    "attention": Case(),
    "varlen": Case("varlen", lengths=((5, 7), (3, 3))),
    "paged": Case("paged", lengths=((3, 5), (3, 17)), page_size=16),
}

SCORE_MODS = {
    "plain": lambda t: (
        lambda s, b, h, q_idx, kv_idx: torch.where((q_idx + kv_idx) % 3 == 0, s * 0.5 + 0.1 * h, s - 0.2 * b)
    ),
    "captured": lambda t: lambda s, b, h, q_idx, kv_idx: s + t[h] * (q_idx - kv_idx),
}
MASK_MODS = {
    "plain": lambda t: lambda b, h, q_idx, kv_idx: (q_idx * 3 + kv_idx + b + h) % 4 != 0,
    "captured": lambda t: lambda b, h, q_idx, kv_idx: t[b] != kv_idx,
}


def epilogue_of(name: str, t: Tensor) -> xattn.Epilogue:
    if name == "captured":
        return xattn.Epilogue(lambda o, b, h, q_idx, d, x: o * x[h, d] + 0.1 * q_idx, (t,))
    return xattn.epilogues.quantize(t, torch.float8_e4m3fn if name == "fp8" else torch.int8)


# ---------------------------------------------------------------- a call
@dataclass
class Call:
    """A call of a public function. ``tensors`` by argument name; "score_mod", "mask_mod", "epilogue" name what those
    capture. ``other`` holds arguments that are no tensors, user functions by name. ``wants``: the tensors that ask for
    a gradient."""

    kind: str
    tensors: dict[str, Tensor]
    other: dict[str, Any] = field(default_factory=dict)
    wants: tuple[str, ...] = ()
    fill_out: bool = False

    def arguments(self, tensors: dict[str, Tensor]) -> tuple[list, dict[str, Any]]:
        """(args, kwargs) of the public function with ``tensors`` in place."""
        given = {n: t for n, t in tensors.items() if n not in ("score_mod", "mask_mod", "epilogue")} | self.other
        for role, table in (("score_mod", SCORE_MODS), ("mask_mod", MASK_MODS)):
            if given.get(role):
                given[role] = table[given[role]](tensors.get(role))
        if given.get("epilogue"):
            given["epilogue"] = epilogue_of(given["epilogue"], tensors["epilogue"])
        return [given.pop(n) for n in POSITIONAL[self.kind]], given


POSITIONAL = {
    "attention": ("q", "k", "v"),
    "varlen": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "paged": ("q", "k_cache", "v_cache", "page_table", "seqlens_k"),
}
FUNCTIONS = {"attention": xattn.attention, "varlen": xattn.attention_varlen, "paged": xattn.attention_paged}
ORACLES = {"attention": oracle.attention, "varlen": oracle.varlen, "paged": oracle.paged}
Q_K_V = {"q", "k", "v", "k_cache", "v_cache"}


def generator(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


def make(case: Case, device: str = "cpu") -> Call:
    """The call that a case describes. Whatever lies outside the valid range is NaN, or garbage where it is an index."""
    g = generator(repr(case))
    dtype_q, _, dtype_kv = case.dtype.partition("/")
    types = {"q": DTYPES[dtype_q], "k": DTYPES[dtype_kv or dtype_q]}
    (heads_kv, ratio), (d, dv) = case.heads, case.head_dims
    hq = heads_kv * ratio
    dense = case.kind == "attention"
    batch = case.batch if dense else len(case.lengths)
    lengths = case.lengths * batch if dense else case.lengths
    longest_q, longest_k = (max([n[i] for n in lengths], default=0) for i in (0, 1))
    index = getattr(torch, case.index)
    t: dict[str, Tensor] = {}
    other: dict[str, Any] = {}

    def randn(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    if dense:
        q, k, v = (
            randn(batch, n, h, w)
            for n, h, w in ((longest_q, hq, d), (longest_k, heads_kv, d), (longest_k, heads_kv, dv))
        )
    elif case.kind == "varlen":
        totals = [sum(n[i] for n in lengths) for i in (0, 1)]
        q, k, v = (
            randn(n + case.spare, h, w)
            for n, h, w in ((totals[0], hq, d), (totals[1], heads_kv, d), (totals[1], heads_kv, dv))
        )
        for x, total in ((q, totals[0]), (k, totals[1]), (v, totals[1])):
            x[total:] = torch.nan
        for i, side in enumerate("qk"):
            t[f"cu_seqlens_{side}"] = torch.tensor([0, *itertools.accumulate(n[i] for n in lengths)], dtype=index)
        longest_q, longest_k = longest_q + case.longest, longest_k + case.longest
        other |= {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    else:
        q, k, v = _paged_tensors(case, t, other, randn, g, index)
    if case.seqused_k:
        used = [max(0, n[1] - 1 - b % 3) for b, n in enumerate(lengths)]
        t["seqused_k"] = torch.tensor(used, dtype=getattr(torch, case.seqused_k))
        for b, n in enumerate(used):  # keys from there on do not exist
            for x in (k, v):
                if dense:
                    x[b, n:] = torch.nan
                else:
                    x[int(t["cu_seqlens_k"][b]) + n : int(t["cu_seqlens_k"][b + 1])] = torch.nan
    names = ("q", "k_cache", "v_cache") if case.kind == "paged" else ("q", "k", "v")
    for name, x in zip(names, (q, k, v), strict=True):
        x = x.to(types["q" if name == "q" else "k"]).to(device)
        t[name] = laid_out(x, "contiguous" if case.layout == "k only" and name[0] != "k" else case.layout)

    if case.attn_mask == "tree":
        t["attn_mask"] = (
            torch.rand(q.shape[0] if case.packed else q.shape[0] * q.shape[1], longest_q, generator=g) > 0.4
        )
    elif case.attn_mask:
        form, dims = case.attn_mask.split()
        mask = randn(*({"b": batch, "h": hq, "q": longest_q, "k": longest_k, "1": 1}[c] for c in dims))
        hidden = mask < -0.8
        if hidden.dim() > 1 and hidden.shape[-2] > 2:
            hidden[..., 1, :] = True  # a row that sees nothing
        added = mask.masked_fill(hidden, -torch.inf).to(_wide(types["q"]))
        # Not where gradients are asked for: weights cannot be had again from an lse that has lost their sum.
        if hidden.dim() > 1 and hidden.shape[-2] > 2 and not case.grads:
            added[..., 2, :] = torch.finfo(added.dtype).min  # the same of all keys hides none
        t["attn_mask"] = ~hidden if form == "bool" else added
    if case.alibi_slopes:
        t["alibi_slopes"] = torch.rand(hq if case.alibi_slopes == "h" else (batch, hq), generator=g)
    if case.sinks:
        t["sinks"] = randn(hq).float()
    if case.dropout_p:
        t["dropout_rng"] = torch.tensor(RNG)
    if case.score_mod == "captured":
        t["score_mod"] = 0.1 * randn(hq).float()
    if case.mask_mod == "captured":
        t["mask_mod"] = torch.arange(max(batch, 1)) % 4
    if case.epilogue:
        t["epilogue"] = randn(hq, dv).float() if case.epilogue == "captured" else torch.tensor(0.05)
    for n, name in enumerate(("q_scale", "k_scale", "v_scale")):
        if case.scales == "number":
            other[name] = 0.5 + n
        elif case.scales:
            shape = (batch, heads_kv) if case.scales == "per head" else ()
            t[name] = 0.5 + torch.rand(shape, generator=g)
    numbers = (
        "causal",
        "window",
        "softmax_scale",
        "softcap",
        "dropout_p",
        "score_mod",
        "mask_mod",
        "epilogue",
        "return_lse",
    )
    other |= {n: getattr(case, n) for n in numbers if getattr(case, n) != getattr(Case, n)}
    can = [n for n, x in t.items() if x.is_floating_point() and x.dtype.itemsize > 1]
    wants = {"": [], "qkv": [n for n in can if n in Q_K_V], "k": [n for n in can if n == "k"], "all": can}[case.grads]
    if case.epilogue in ("fp8", "int8"):
        wants = []
    return Call(case.kind, {n: x.to(device) for n, x in t.items()}, other, tuple(wants), case.out and not wants)


def _paged_tensors(case, t, other, randn, g, index):
    """q and the two caches; pages are shuffled, what belongs to no sequence is NaN, and page ids behind the length are
    garbage."""
    (heads_kv, ratio), (d, dv), p = case.heads, case.head_dims, case.page_size
    used = [-(-n // p) for _, n in case.lengths]
    order = torch.randperm(sum(used) + case.spare, generator=g)
    table = torch.full((len(used), max(used, default=0) + 1), -12345678, dtype=index)
    table[:, 1::2] = 2**31 - 1
    caches = [torch.full((len(order), p, heads_kv, w), torch.nan, dtype=torch.float64) for w in (d, dv)]
    for b, ((_, length), pages) in enumerate(zip(case.lengths, order[: sum(used)].split(used), strict=True)):
        table[b, : len(pages)] = pages
        for n in range(length):
            for cache in caches:
                cache[pages[n // p], n % p] = randn(heads_kv, cache.shape[-1])
    t["page_table"], t["seqlens_k"] = table, torch.tensor([n for _, n in case.lengths], dtype=index)
    seqlens_q = [n for n, _ in case.lengths]
    if case.packed:
        q = randn(sum(seqlens_q) + case.spare, heads_kv * ratio, d)
        q[sum(seqlens_q) :] = torch.nan
        t["cu_seqlens_q"] = torch.tensor([0, *itertools.accumulate(seqlens_q)], dtype=index)
        other["max_seqlen_q"] = max(seqlens_q)
    else:
        q = randn(len(used), seqlens_q[0], heads_kv * ratio, d)
    if case.kv_layout == "HND":
        caches = [c.transpose(1, 2).contiguous() for c in caches]
        other["kv_layout"] = "HND"
    return q, *caches


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize > 1 else torch.float32


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of x (..., rows, heads, width) under other strides, NaN in every gap."""
    if x.is_floating_point() and x.dtype.itemsize == 1:  # few operations know fp8: the same with its bits
        return laid_out(x.view(torch.uint8), layout).view(x.dtype)
    if layout in ("contiguous", "k only"):
        return x
    if layout == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "expanded heads":
        return x[..., :1, :].expand(x.shape)
    gap = torch.nan if x.is_floating_point() else 0x7F  # NaN in every fp8 but the fnuz ones
    if layout == "every 2nd row":
        buffer = x.new_full((*x.shape[:-3], 2 * x.shape[-3], *x.shape[-2:]), gap)
        view = buffer[..., ::2, :, :]
    elif layout == "last dim":
        buffer = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), gap)
        view = buffer[..., ::2]
    else:
        offset = int(layout.removeprefix("offset "))
        view = x.new_full((x.numel() + offset,), gap)[offset:].view(x.shape)
    view.copy_(x)
    return view


# ---------------------------------------------------------------- running and measuring
def check(call: Call, target: Target) -> None:
    """Results and gradients of the call on the target are right; or it refuses, as its plan says, and writes
    nothing."""
    leaves = {n: x.detach().requires_grad_(n in call.wants) for n, x in call.tensors.items()}
    args, kwargs = call.arguments(leaves)
    kwargs["backend"] = target.backend
    function = FUNCTIONS[call.kind]
    plan = xattn.explain(*args, kind=call.kind, **kwargs)
    if plan.backend is None:
        with pytest.raises(xattn.UnsupportedError) as caught:
            function(*args, **kwargs)
        assert caught.value.rejected == dict(plan.rejected) and caught.value.rejected[target.backend]
        assert all(str(refusal) in str(caught.value) for refusal in caught.value.rejected[target.backend])
        return
    truth, truth_lse, truth_grads, seeds = expected(call, torch.float64)
    plain, plain_lse, plain_grads, _ = expected(call, plain_dtype(call), seeds)
    if call.fill_out:
        wanted = function(*args, **kwargs)
        wanted = wanted[0] if call.other.get("return_lse") else wanted
        kwargs["out"] = laid_out(wanted.new_empty(wanted.shape).view(wanted.dtype), "every 2nd row")
        _fill_with_nan(kwargs["out"])
    result = function(*args, **kwargs)
    out, lse = result if call.other.get("return_lse") else (result, None)
    if call.fill_out:
        assert out.data_ptr() == kwargs["out"].data_ptr()
    oracle.assert_close("out", out, truth, plain.to(out.dtype))
    if lse is not None:
        assert lse.dtype == torch.float32
        oracle.assert_close("lse", lse, truth_lse, plain_lse.float())
    if call.wants:
        roots = [
            (x, s.to(x.dtype)) for x, s in zip((out, lse), seeds, strict=True) if x is not None and x.requires_grad
        ]
        wanted = [leaves[n] for n in call.wants]
        grads = torch.autograd.grad([x for x, _ in roots], wanted, [s for _, s in roots], allow_unused=True)
        for name, leaf, grad in zip(call.wants, wanted, grads, strict=True):
            assert grad is not None, f"no gradient of {name}"
            assert grad.dtype == leaf.dtype
            oracle.assert_close(
                f"gradient of {name}", grad, truth_grads[name], plain_grads[name], tuple(truth_grads.values())
            )


def _fill_with_nan(x: Tensor) -> None:
    bits = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
    bits.fill_(torch.nan if bits.is_floating_point() else 0x7F)


def plain_dtype(call: Call) -> torch.dtype:
    dtype = call.tensors["q"].dtype
    return dtype if dtype.itemsize > 1 else torch.float32


def expected(call: Call, dtype: torch.dtype, seeds: tuple | None = None):
    """(out, lse, gradients by name, seeds) of the oracle in ``dtype``, given gradients of out and lse (drawn where
    None)."""
    leaves = {n: x.detach().to(dtype) if x.is_floating_point() else x for n, x in call.tensors.items()}
    wants = sorted(
        {*call.wants, *(n for n in ("q", "k", "v") if call.wants)}
    )  # those of q, k, v tell how large terms are
    leaves = {n: x.clone().requires_grad_(n in wants) for n, x in leaves.items()}
    args, kwargs = call.arguments(leaves)
    pair, return_lse = kwargs.pop("dropout_rng", None), kwargs.pop("return_lse", False)
    if kwargs.get("dropout_p"):
        shape = (_batch(call), call.tensors["q"].shape[-2], _seqlen(call, "q"), _seqlen(call, "k"))
        kwargs["keep"] = oracle.keep(pair, kwargs["dropout_p"], *shape).to(leaves["q"].device)
    rounded = call.tensors["q"].dtype.itemsize == 1 and dtype != torch.float64
    out, lse = ORACLES[call.kind](*args, **kwargs, round_p=rounded)
    if call.wants and seeds is None:
        g = generator("seeds")
        # of few bits, so that every dtype holds them
        drawn = (torch.randn(x.shape, generator=g).bfloat16().double() for x in (out, lse))
        seeds = tuple(x.to(out.device) for x in drawn)
    grads = {}
    if call.wants:
        # What reaches an empty row from outside is dropped: -inf has no gradient.
        total = (out * seeds[0].to(dtype)).sum()
        if return_lse:
            total = total + (lse.masked_fill(lse == -torch.inf, 0) * seeds[1].to(dtype)).sum()
        wanted = [leaves[n] for n in wants]
        found = torch.autograd.grad(total, wanted, allow_unused=True) if total.requires_grad else [None] * len(wanted)
        grads = {n: torch.zeros_like(x) if f is None else f for n, x, f in zip(wants, wanted, found, strict=True)}
    return out, lse, grads, seeds


def _batch(call: Call) -> int:
    return len(call.tensors["cu_seqlens_q"]) - 1 if call.kind == "varlen" else call.tensors["q"].shape[0]


def _seqlen(call: Call, side: str) -> int:
    return call.other[f"max_seqlen_{side}"] if call.kind == "varlen" else call.tensors[side].shape[1]


# ---------------------------------------------------------------- which cases for which target
@functools.cache
def targets() -> tuple[Target, ...]:
    """Every backend that answers something, on every device usable here."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    pairs = [Target(b.name, d) for b in REGISTRY for d in devices]
    return tuple(t for t in pairs if any(_base(kind, t) for kind in BASE))


def admitted(case: Case, target: Target) -> bool:
    call = make(case, "meta")
    args, kwargs = call.arguments({n: x.requires_grad_(n in call.wants) for n, x in call.tensors.items()})
    device = torch.device(target.device)
    return xattn.supported(*args, kind=case.kind, device=device, backend=target.backend, **kwargs)


@functools.cache
def _base(kind: str, target: Target) -> Case | None:
    """A case that the target admits: the plainest, or one feature away from it where it answers only with a feature;
    None where none."""
    plain = BASE[kind]
    variations = (replace(plain, **{name: value}) for name, values in VALUES[kind].items() for value in values)
    return next((c for c in (plain, *variations) if admitted(c, target)), None)


@functools.cache
def values_for(kind: str, target: Target) -> tuple[dict[str, list[Any]], list[Case]]:
    """(the boundary values that the target admits, one case for each that it does not)."""
    base = _base(kind, target)
    if base is None:
        return {}, []
    able: dict[str, list[Any]] = {}
    refused = []
    for name, values in VALUES[kind].items():
        for value in values:
            case = replace(base, **{name: value})
            if admitted(case, target):
                able.setdefault(name, []).append(value)
            else:
                refused.append(case)
    return able, refused


def cases(kind: str, target: Target) -> Iterator[Case]:
    """A pairwise sample of what the target admits, then one case for each value that it refuses, and a sample of what
    it admits of 8-bit floats natively: all of it, or caches."""
    able, refused = values_for(kind, target)
    base = _base(kind, target)
    for row in pairwise(able):
        yield replace(base, **row)
    yield from refused
    yield from of_fp8(kind, target)


FP8 = {
    "attention": ("e4m3",),
    "varlen": ("e4m3",),
    "paged": ("bf16/e4m3", "fp16/e4m3", "bf16/e4m3fnuz", "fp16/e4m3fnuz"),
}
# What meets the dtype or scales; the other values have no more to do with it than with any dtype.
_OF_FP8 = (
    *(
        "lengths",
        "heads",
        "batch",
        "page_size",
        "kv_layout",
        "packed",
        "attn_mask",
        "causal",
        "window",
        "softmax_scale",
    ),
    *("softcap", "alibi_slopes", "sinks", "seqused_k", "scales", "return_lse", "layout", "spare"),
)


def of_fp8(kind: str, target: Target, **values: list[Any]) -> Iterator[Case]:
    """A pairwise sample of what a native target admits of 8-bit floats. ``values`` stand for those of VALUES[kind]."""
    base = replace(BASE[kind], head_dims=(64, 64))
    dtypes = [dtype for dtype in FP8[kind] if admitted(replace(base, dtype=dtype), target)]
    if not dtypes or not dispatch.get(target.backend).native:
        return
    base = replace(base, dtype=dtypes[0])
    asked = {name: found for name, found in VALUES[kind].items() if name in _OF_FP8}
    asked |= {"head_dims": [(16, 16), (64, 64), (128, 128), (192, 128), (256, 256)]} | values
    able = {name: [v for v in found if admitted(replace(base, **{name: v}), target)] for name, found in asked.items()}
    for row in pairwise(able | {"dtype": dtypes}):
        yield replace(base, **row)


def parametrize(kind: str):
    """One test for each (target, case) of a kind."""
    found = [
        pytest.param(target, case, id=f"{target}-{n}")
        for target in targets()
        for n, case in enumerate(cases(kind, target))
    ]
    return pytest.mark.parametrize("target, case", found)


def pairwise(values: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Rows in which every pair of values of different names occurs. Greedy: each row starts from a pair that has not,
    and takes for each further name the value with the most new pairs."""
    names = sorted(values, key=lambda n: -len(values[n]))
    left = {
        (a, m, b, n)
        for a, b in itertools.combinations(names, 2)
        for m, n in itertools.product(range(len(values[a])), range(len(values[b])))
    }

    def pair(a, m, b, n):
        return (a, m, b, n) if names.index(a) < names.index(b) else (b, n, a, m)

    order = sorted(left, key=lambda x: (names.index(x[0]), names.index(x[2]), x[1], x[3]), reverse=True)
    while left:
        while order[-1] not in left:
            order.pop()
        a, m, b, n = order[-1]
        row = {a: m, b: n}
        for name in names:
            if name not in row:
                news = [
                    sum(pair(name, value, other, o) in left for other, o in row.items())
                    for value in range(len(values[name]))
                ]
                row[name] = news.index(max(news))
        left -= {pair(x, row[x], y, row[y]) for x, y in itertools.combinations(names, 2)}
        yield {name: values[name][row[name]] for name in values}
