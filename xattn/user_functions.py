"""The user's functions of a call as kernels take them: their source, and the parameter block with what they hold."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .errors import UnsupportedError
from .images import Source
from .inputs import FP8, Inputs, Lowered, dtype_name
from .launch_params import ForwardParams

_NUMBERS: dict[str, Any] = {
    "s32": ctypes.c_int32,
    "s64": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_MOST = 2**31 - 1  # of sizes and strides
# What kernels store, by its name in C++.
OUTPUTS = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.int8: "s8",
    torch.uint8: "u8",
}


def of(x: Inputs) -> tuple[Lowered, ...]:
    """Those of a call."""
    return tuple(mod.lowered for _, mod in x.functions() if mod is not None and mod.lowered is not None)


def source_of(x: Inputs) -> Source | None:
    """What config.h holds of those of a call, and of its output's dtype; None where there is nothing to say."""
    functions, usual = of(x), torch.bfloat16 if dtype_name(x.q.dtype) in FP8 else x.q.dtype
    if not functions and x.dtype_out == usual:
        return None
    return source(functions, "void" if x.dtype_out == usual else OUTPUTS[x.dtype_out], _is_wide(x, functions))


@lru_cache(maxsize=256)
def source(functions: tuple[Lowered, ...], out: str = "void", wide: bool = False) -> Source:
    """What config.h holds of them. ``out``: the element of the output, "void" where it is the usual one; ``wide``:
    captured tensors lie such that runs of an epilogue's channels can be read in pieces of 16 bytes."""
    fields = "".join(f"    {kind} {name};\n" for f in functions for name, kind in f.fields())
    roles = {f.role for f in functions}
    has = {
        "kScoreMod": "score_mod" in roles,
        "kMaskMod": "mask_mod" in roles,
        "kReads": any(f.tables for f in functions if f.role != "epilogue"),
        "kReadsEach": any(f.reads_each for f in functions if f.role != "epilogue"),
        "kEpilogue": "epilogue" in roles,
        "kWide": wide,
    }
    flags = ", ".join(f"{name} = {str(value).lower()}" for name, value in has.items())
    missing = [name for role, name in (("score_mod", "ScoreMod"), ("mask_mod", "MaskMod")) if role not in roles]
    empty = "".join(f"    template <class A>\n    struct {name} {{}};\n" for name in missing)
    made = Source(
        f"struct Captured : ForwardParams {{\n{fields}}};\n"
        f'static_assert(sizeof(Captured) == {ctypes.sizeof(block(_forms(functions)))}, "as the host packs it");\n'
        f"struct UserFunctions {{\n    using Params = Captured;\n    using Out = {out};\n"
        f"    static constexpr bool {flags};\n{empty}" + "".join(f"{f.source}\n" for f in functions) + "};\n"
    )
    made.scores = bool(roles - {"epilogue"})
    return made


def _is_wide(x: Inputs, functions: tuple[Lowered, ...]) -> bool:
    """Whether every run of an epilogue's channels is one of whole, aligned elements of a captured tensor."""
    runs = [(x.epilogue_aux[f.tables[n]], dim) for f in functions for n, dim in f.runs]
    return bool(runs) and all(
        t.shape[dim] >= x.head_dim_v
        and t.stride(dim) == 1
        and t.data_ptr() % 16 == 0
        and all(t.stride(d) * t.element_size() % 16 == 0 or t.shape[d] == 1 for d in range(t.dim()) if d != dim)
        for t, dim in runs
    )


def _forms(functions: tuple[Lowered, ...]) -> tuple[tuple[str, str, int], ...]:
    """(name, type, dimensions of a table) of each field of the block."""
    dims = {f"{f.role}_t{n}": d for f in functions for n, (_, d) in enumerate(f.forms)}
    return tuple((name, kind, dims.get(name, -1)) for f in functions for name, kind in f.fields())


@lru_cache(maxsize=256)
def block(forms: tuple[tuple[str, str, int], ...]) -> type[ForwardParams]:
    """The parameter block, Captured of config.h."""
    if not forms:
        return ForwardParams
    fields = [(name, _NUMBERS[kind] if dims < 0 else _table(dims)) for name, kind, dims in forms]
    return type("Captured", (ForwardParams,), {"_fields_": fields})


@lru_cache
def _table(dims: int) -> type[ctypes.Structure]:
    """Table of csrc_cuda/kernels/user_functions.h."""
    sizes = [("size", ctypes.c_int32 * dims), ("stride", ctypes.c_int32 * dims)] if dims else []
    return type("Table", (ctypes.Structure,), {"_fields_": [("data", ctypes.c_void_p), *sizes]})


def params_of(x: Inputs) -> type[ForwardParams]:
    """The type of the parameter block of a call."""
    return block(_forms(of(x)))


def fill(p: ForwardParams, x: Inputs) -> dict[str, Tensor]:
    """Writes numbers, sizes and strides into the block; the tensors that are read, by the names of their fields.

    Raises UnsupportedError for a tensor of which kernels cannot count the elements.
    """
    tensors: dict[str, Tensor] = {}
    for f in of(x):
        aux = getattr(x, f"{f.role}_aux")
        for n, (kind, value) in enumerate(f.numbers):
            setattr(p, f"{f.role}_n{n}", _NUMBERS[kind](value))
        for n, number in enumerate(f.tables):
            name, t = f"{f.role}_t{n}", aux[number]
            if any(size > _MOST or abs(stride) > _MOST for size, stride in zip(t.shape, t.stride(), strict=True)):
                what = f"got shape {tuple(t.shape)} and strides {t.stride()}; allowed: up to {_MOST} each"
                raise UnsupportedError(f"{f.role}_aux[{number}]: {what}")
            tensors[name] = t if t.numel() else torch.zeros(1, dtype=t.dtype, device=t.device)
            if t.dim():
                field = getattr(p, name)
                field.size[:], field.stride[:] = t.shape, t.stride()
    return tensors
