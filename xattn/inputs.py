"""One attention call as a record: the tensors and numbers that the ops, the backends and the reference pass on to each
other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .places import readable
from .problem import GRADS, Problem, SizeBucket

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.float8_e4m3fnuz: "fp8_e4m3fnuz",
    torch.float8_e5m2fnuz: "fp8_e5m2fnuz",
}
NO_BOUND = -1  # as max_seqlen_k of paged calls: lengths are bounded by the page table alone
FP8 = tuple(name for name in DTYPES.values() if name.startswith("fp8"))


def is_direct(t: Tensor) -> bool:
    """Whether 16-byte copies can read (..., row, head, head_dim) as it lies."""
    if not t.numel():
        return True
    size = t.element_size()
    aligned = all(n == 1 or s * size % 16 == 0 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True))
    return t.stride(-1) == 1 and aligned and (address(t) or 0) % 16 == 0


def address(t: Tensor) -> int | None:
    """Where ``t`` starts in memory; None for tensors without memory of their own: on meta, fake, under a torch.func
    transform."""
    if not readable(t):
        return None
    try:
        return t.data_ptr()
    except RuntimeError:
        return None


def present(t: Tensor | None) -> Tensor:
    """An optional tensor of which the kind of the call says that it is there."""
    assert t is not None
    return t


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


_NOT_DIFFERENTIABLE = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "page_table",
    "seqlens_k",
    "seqused_k",
    "dropout_rng",
    "mask_mod_aux",
)


# The tensors of a call that native kernels read, in the order in which they are handed to a launch.
_SCALES = ("q_scale", "k_scale", "v_scale")
TENSORS = {
    "attention": ("q", "k", "v", "attn_mask", "alibi_slopes", "sinks", "seqused_k", *_SCALES),
    "varlen": (
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "attn_mask", "alibi_slopes", "sinks", "seqused_k"),
        *_SCALES,
    ),
    "paged": (
        *("q", "k", "v", "cu_seqlens_q", "page_table", "seqlens_k", "attn_mask", "alibi_slopes", "sinks"),
        *_SCALES,
    ),
}


@dataclass(frozen=True)
class Lowered:
    """A user's function as the source of C++ (fusion/lower.py), and what it is given.

    ``tables``: which of its aux tensors it reads, ``forms`` their (element type of C++, dimensions), ``numbers`` the
    (type of C++, value) of the numbers that it holds; ``runs``: (which of the tables, its dimension) that an epilogue
    reads by the channel of the output, a run of them at once; ``reads_each``: whether it reads any for each element.
    """

    role: str
    source: str
    tables: tuple[int, ...]
    forms: tuple[tuple[str, int], ...]
    numbers: tuple[tuple[str, int | float], ...]
    runs: tuple[tuple[int, int], ...] = ()
    reads_each: bool = False

    def fields(self) -> list[tuple[str, str]]:
        """(name, type of C++) of its arguments; those of 8 bytes first."""
        wide = [(f"{self.role}_t{n}", f"Table<{element}, {dims}>") for n, (element, dims) in enumerate(self.forms)]
        numbers = [(f"{self.role}_n{n}", kind) for n, (kind, _) in enumerate(self.numbers)]
        return [*wide, *sorted(numbers, key=lambda field: field[1] not in ("s64", "double"))]

    @property
    def bytes(self) -> int:
        """Of its arguments."""
        return sum(8 + 8 * dims for _, dims in self.forms) + sum(
            8 if kind in ("s64", "double") else 4 for kind, _ in self.numbers
        )


@dataclass(frozen=True)
class Mod:
    """A user's function in traced form; ``key`` names it in ops.

    ``element`` is the function of 0-d tensors, its captured tensors arguments behind the others; ``eager`` maps it over
    whole tensors. ``lowered`` is None where kernels cannot have it, and ``refusal`` says what of it.
    """

    key: str
    eager: Callable[..., Tensor]
    element: Callable[..., Tensor]
    source: str = ""
    lowered: Lowered | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Inputs:
    """What one op was given. Shapes: see ``xattn.attention``, ``attention_varlen``, ``attention_paged``.

    In varlen q, k, v are packed (total, heads, head_dim). In paged calls k and v are the caches, ``seqlens_k`` (batch,)
    counts the tokens they hold for each sequence, the newest included, and q is packed where ``cu_seqlens_q`` is given.
    """

    kind: str
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    page_table: Tensor | None = None
    seqlens_k: Tensor | None = None
    kv_layout: str = ""
    num_splits: int | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    attn_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    seqused_k: Tensor | None = None
    dropout_p: float = 0.0
    dropout_rng: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    score_mod: Mod | None = None
    score_mod_aux: tuple[Tensor, ...] = ()
    mask_mod: Mod | None = None
    mask_mod_aux: tuple[Tensor, ...] = ()
    epilogue: Mod | None = None
    epilogue_aux: tuple[Tensor, ...] = ()
    out_dtype: torch.dtype | None = None
    return_lse: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    backend: str | None = None

    # ---- sizes
    @property
    def packed(self) -> bool:
        """Whether q is (total_q, heads, head_dim)."""
        return self.q.dim() == 3

    @property
    def batch(self) -> int:
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.shape[0] - 1
        return self.q.shape[0]

    @property
    def num_heads_q(self) -> int:
        return self.q.shape[-2]

    @property
    def num_heads_kv(self) -> int:
        return self.k.shape[1 if self.kv_layout == "HND" else -2]

    @property
    def page_size(self) -> int:
        return self.k.shape[2 if self.kv_layout == "HND" else 1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    @property
    def seqlen_q(self) -> int:
        """Queries of the longest sequence."""
        return self.max_seqlen_q if self.packed else self.q.shape[1]

    @property
    def seqlen_k(self) -> int:
        """Keys of the longest sequence; in paged calls an upper bound."""
        if self.kind == "attention":
            return self.k.shape[1]
        if self.page_table is not None:
            room = self.page_table.shape[1] * self.page_size
            return room if self.max_seqlen_k == NO_BOUND else min(room, self.max_seqlen_k)
        return self.max_seqlen_k

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def dtype_out(self) -> torch.dtype:
        if self.out_dtype is not None:
            return self.out_dtype
        return torch.bfloat16 if dtype_name(self.q.dtype) in FP8 else self.q.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.packed:
            return (self.num_heads_q, self.q.shape[0])
        return (self.q.shape[0], self.num_heads_q, self.q.shape[1])

    def functions(self) -> tuple[tuple[str, Mod | None], ...]:
        """The user's, by their roles."""
        return (("score_mod", self.score_mod), ("mask_mod", self.mask_mod), ("epilogue", self.epilogue))

    # ---- the planner's view
    def problem(self, grads: tuple[str, ...] = ()) -> Problem:
        mask = self.attn_mask
        return Problem(
            kind=self.kind,
            dtype=dtype_name(self.q.dtype),
            dtype_kv=dtype_name(self.k.dtype),
            dtype_out=dtype_name(self.dtype_out),
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            gqa_ratio=self.num_heads_q // self.num_heads_kv,
            causal=self.causal,
            window=self.window_left is not None or self.window_right is not None,
            softcap=self.softcap != 0.0,
            alibi_slopes=self.alibi_slopes is not None,
            attn_mask=""
            if mask is None
            else "tree"
            if self.kind == "paged"
            else "bool"
            if mask.dtype == torch.bool
            else "additive",
            seqused_k=self.seqused_k is not None,
            sinks=self.sinks is not None,
            dropout=self.dropout_p > 0.0,
            dropout_start=self.dropout_p > 0.0 and present(self.dropout_rng).shape[0] == 4,
            scales=any(s is not None for s in (self.q_scale, self.k_scale, self.v_scale)),
            score_mod=self.score_mod.key if self.score_mod else "",
            mask_mod=self.mask_mod.key if self.mask_mod else "",
            epilogue=self.epilogue.key if self.epilogue else "",
            unlowered=tuple((role, mod.refusal) for role, mod in self.functions() if mod is not None and mod.refusal),
            return_lse=self.return_lse,
            grads=grads,
            deterministic=self.deterministic and bool(grads),
            batch_invariant=self.batch_invariant,
            direct=all(map(is_direct, (self.q, self.k, self.v))),
            page_size=self.page_size if self.kind == "paged" else 0,
            kv_layout=self.kv_layout,
        )

    def size_bucket(self) -> SizeBucket:
        rows = max(self.q.shape[0], self.k.shape[0]) if self.kind == "varlen" else 0
        return SizeBucket.of(self.batch, self.num_heads_q, self.seqlen_q, self.seqlen_k, rows)

    # ---- autograd's view: the tensors that a gradient can be asked for, flat and in the order of GRADS
    def differentiable(self) -> list[tuple[str, Tensor | None]]:
        """(name, tensor) pairs; lists of aux tensors give one pair for each member."""
        pairs: list[tuple[str, Tensor | None]] = []
        for name in GRADS:
            value: Any = getattr(self, name)
            pairs += [(name, t) for t in value] if name.endswith("_aux") else [(name, value)]
        return pairs

    def flat(self) -> list[Tensor | None]:
        """Every tensor: those of ``differentiable()`` in their order, then the others."""
        values: list[Tensor | None] = [t for _, t in self.differentiable()]
        for name in _NOT_DIFFERENTIABLE:
            value = getattr(self, name)
            values += list(value) if name.endswith("_aux") else [value]
        return values

    def with_flat(self, tensors: Sequence[Tensor | None]) -> Inputs:
        """A copy that holds ``tensors`` in the places that ``flat`` lists."""
        left = list(tensors)
        new: dict[str, Any] = {}
        for name in (*GRADS, *_NOT_DIFFERENTIABLE):
            if name.endswith("_aux"):
                count = len(getattr(self, name))
                new[name], left = tuple(left[:count]), left[count:]
            else:
                new[name] = left.pop(0)
        return replace(self, **new)

    def without_tensors(self) -> Inputs:
        """A copy whose tensors are None, for ``with_flat`` to fill."""
        return self.with_flat([None] * len(self.flat()))

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by argument name (aux tensors numbered)."""
        found: dict[str, Tensor] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                found[f.name] = value
            elif f.name.endswith("_aux"):
                found.update({f"{f.name}[{i}]": t for i, t in enumerate(value)})
        return found
