"""What is asked, without tensors and without lengths: a frozen, hashable description that plans are chosen and cached
by."""

from __future__ import annotations

from dataclasses import dataclass, fields

KINDS = ("attention", "varlen", "paged")

# Every modification of plain attention, by the name of the argument that asks for it. A capability lists those it
# answers.
FEATURES = (
    "causal",
    "window",
    "softcap",
    "score_mod",
    "alibi_slopes",
    "attn_mask_additive",
    "attn_mask_bool",
    "attn_mask_tree",
    "mask_mod",
    "seqused_k",
    "sinks",
    "dropout",
    "dropout_start",
    "scales",
    "epilogue",
    "return_lse",
    "gqa",
)

# Arguments a gradient can be asked for, in the order in which gradients are returned; aux stands for captured tensors.
GRADS = (
    "q",
    "k",
    "v",
    "attn_mask",
    "alibi_slopes",
    "sinks",
    "q_scale",
    "k_scale",
    "v_scale",
    "score_mod_aux",
    "epilogue_aux",
)


@dataclass(frozen=True)
class Problem:
    """One kind of attention call.

    dtypes are names as in ``xattn.inputs.DTYPES``; ``score_mod``, ``mask_mod`` and ``epilogue`` are ids of traced
    functions ("" for none), ``unlowered`` names those that kernels cannot have, each with the operation and its line;
    ``grads`` names the arguments whose gradient is asked for; ``direct`` is False where q, k
    or v do not lie in rows that start at multiples of 16 bytes, so that native kernels copy them; ``page_size`` is 0
    outside paged calls.
    """

    kind: str = "attention"
    dtype: str = "bf16"
    dtype_kv: str = "bf16"
    dtype_out: str = "bf16"
    head_dim: int = 128
    head_dim_v: int = 128
    gqa_ratio: int = 1
    causal: bool = False
    window: bool = False
    softcap: bool = False
    alibi_slopes: bool = False
    attn_mask: str = ""  # "" | "bool" | "additive" | "tree"
    seqused_k: bool = False
    sinks: bool = False
    dropout: bool = False
    dropout_start: bool = False  # its dropout counts queries and keys from other numbers than 0
    scales: bool = False
    score_mod: str = ""
    mask_mod: str = ""
    epilogue: str = ""
    unlowered: tuple[tuple[str, str], ...] = ()
    return_lse: bool = False
    grads: tuple[str, ...] = ()
    deterministic: bool = False
    batch_invariant: bool = False
    direct: bool = True
    page_size: int = 0
    kv_layout: str = ""

    def features(self) -> tuple[str, ...]:
        """The names in FEATURES that this problem uses."""
        used = {name: bool(getattr(self, name)) for name in FEATURES if hasattr(self, name)}
        used.update({f"attn_mask_{form}": self.attn_mask == form for form in ("additive", "bool", "tree")})
        used["gqa"] = self.gqa_ratio != 1
        return tuple(name for name in FEATURES if used[name])

    def __str__(self) -> str:
        dtype = self.dtype if self.dtype == self.dtype_kv else f"{self.dtype}/{self.dtype_kv}"
        dims = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        parts = [self.kind, dtype, f"head_dim {dims}"]
        if self.gqa_ratio != 1:
            parts.append(f"gqa {self.gqa_ratio}")
        parts += [name for name in self.features() if name != "gqa"]
        if self.batch_invariant:
            parts.append("batch_invariant")
        if self.page_size:
            parts.append(f"pages of {self.page_size} {self.kv_layout}")
        if self.grads:
            parts.append("gradients of " + ", ".join(self.grads) + (" (deterministic)" if self.deterministic else ""))
        return ", ".join(parts)

    def as_dict(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class SizeBucket:
    """Lengths as the planner sees them: each rounded up to a power of two, so that plans are few.

    Where kernels may count beyond 32 bits they are as they are, and ``rows`` is the length of the longer packed tensor,
    q or k; elsewhere it is 0.
    """

    batch: int = 1
    num_heads_q: int = 1
    seqlen_q: int = 1
    seqlen_k: int = 1
    rows: int = 0

    @staticmethod
    def of(batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int, rows: int = 0) -> SizeBucket:
        rounded = SizeBucket(*(_round_up(n) for n in (batch, num_heads_q, seqlen_q, seqlen_k)))
        if rounded.seqlen_k < _MANY_KEYS and rounded._tiles(rows) < _MANY_TILES:
            return rounded
        return SizeBucket(batch, num_heads_q, seqlen_q, seqlen_k, rows)

    def _tiles(self, rows: int) -> int:
        """At least half as many tiles of 64 rows as a launch can have."""
        return max(1, self.num_heads_q) * (max(1, self.batch) * (1 + self.seqlen_q // 64) + rows // 64)


# Far below all that kernels count; reached by tensors of many gigabytes only.
_MANY_TILES, _MANY_KEYS = 1 << 23, 1 << 29


def _round_up(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 0
