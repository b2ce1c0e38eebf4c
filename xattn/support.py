"""The support matrix: who answers what on which device, computed by planning sample problems. ``info`` and the README
print it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .device import Device, from_arch
from .dispatch import plan
from .problem import Problem, SizeBucket

# Devices of the README's table.
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950", "cpu")

_PLAIN = Problem(causal=True)
_PAGED = replace(_PLAIN, kind="paged", page_size=64, kv_layout="NHD")
_SIZE = SizeBucket.of(2, 32, 1024, 1024)
_GRADS = ("q", "k", "v")

# What a row asks, beside bf16, causal, head_dim 128.
ROWS: tuple[tuple[str, Problem], ...] = (
    ("bf16", _PLAIN),
    ("fp16", replace(_PLAIN, dtype="fp16", dtype_kv="fp16", dtype_out="fp16")),
    ("fp32", replace(_PLAIN, dtype="fp32", dtype_kv="fp32", dtype_out="fp32")),
    ("fp64", replace(_PLAIN, dtype="fp64", dtype_kv="fp64", dtype_out="fp64")),
    ("fp8 (e4m3)", replace(_PLAIN, dtype="fp8_e4m3", dtype_kv="fp8_e4m3", scales=True)),
    ("GQA, MQA", replace(_PLAIN, gqa_ratio=4)),
    ("head_dim 64", replace(_PLAIN, head_dim=64, head_dim_v=64)),
    ("head_dim 72", replace(_PLAIN, head_dim=72, head_dim_v=72)),
    ("head_dim 256", replace(_PLAIN, head_dim=256, head_dim_v=256)),
    ("head_dim 192, v 128", replace(_PLAIN, head_dim=192, head_dim_v=128)),
    ("head_dim 576, v 512", replace(_PLAIN, head_dim=576, head_dim_v=512)),
    ("lse", replace(_PLAIN, return_lse=True)),
    ("window", replace(_PLAIN, window=True)),
    ("softcap", replace(_PLAIN, softcap=True)),
    ("ALiBi", replace(_PLAIN, alibi_slopes=True)),
    ("sinks", replace(_PLAIN, sinks=True)),
    ("attn_mask, boolean", replace(_PLAIN, attn_mask="bool")),
    ("attn_mask, added", replace(_PLAIN, attn_mask="additive")),
    ("seqused_k", replace(_PLAIN, seqused_k=True)),
    ("dropout", replace(_PLAIN, dropout=True)),
    ("score_mod", replace(_PLAIN, score_mod="score_mod")),
    ("mask_mod", replace(_PLAIN, mask_mod="mask_mod")),
    ("epilogue", replace(_PLAIN, epilogue="epilogue")),
    ("backward", replace(_PLAIN, grads=_GRADS)),
    ("backward, deterministic", replace(_PLAIN, grads=_GRADS, deterministic=True)),
    ("backward through lse", replace(_PLAIN, grads=_GRADS, return_lse=True)),
    ("varlen", replace(_PLAIN, kind="varlen")),
    ("varlen, backward", replace(_PLAIN, kind="varlen", grads=_GRADS)),
    ("paged", _PAGED),
    ("paged, fp8 (e4m3) cache", replace(_PAGED, dtype_kv="fp8_e4m3", scales=True)),
    ("paged, fp8 (e4m3fnuz) cache", replace(_PAGED, dtype_kv="fp8_e4m3fnuz", scales=True)),
    ("paged, tree mask", replace(_PAGED, attn_mask="tree")),
)


@dataclass(frozen=True)
class Cell:
    """Who answers: a backend's name ("" for none), and whether it is native to the device."""

    backend: str
    native: bool

    def as_dict(self) -> dict[str, str | bool | None]:
        return {"backend": self.backend or None, "native": self.native}

    def __str__(self) -> str:
        return f"**{self.backend}**" if self.native else self.backend or "no"


def matrix(devices: Sequence[Device]) -> list[tuple[str, list[Cell]]]:
    """(what is asked, who answers on each device) for every row."""
    rows = []
    for label, problem in ROWS:
        plans = [plan(problem, _SIZE, device) for device in devices]
        rows.append((label, [Cell(p.backend or "", p.native) for p in plans]))
    return rows


def as_dict() -> dict[str, object]:
    """The README's table for JSON: who answers what, in the order of ``archs``."""
    rows = matrix([from_arch(arch) for arch in ARCHS])
    return {"archs": list(ARCHS), "support": {label: [c.as_dict() for c in cells] for label, cells in rows}}


def markdown() -> str:
    """The README's table. Bold: native kernels; otherwise the fallback that answers."""
    columns = [from_arch(arch) for arch in ARCHS]
    lines = ["| bf16, causal, head_dim 128 unless said | " + " | ".join(ARCHS) + " |", "|---" * (len(ARCHS) + 1) + "|"]
    lines += [f"| {label} | " + " | ".join(map(str, cells)) + " |" for label, cells in matrix(columns)]
    return "\n".join(lines)
