"""How each operation is written in C++, with torch's meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .lower import RULES, S32, S64, Lowering, Refused, Rule, Value, common, name_of, type_of


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


@_rule("add", "sub", "rsub", "mul", "multiply", "subtract")
def _arithmetic(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    a, b = w.arguments(node, 2)
    if name == "rsub":
        a, b = b, a
    alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    if alpha != 1:
        if name == "rsub":
            a = w.binary("*", dtype, a, alpha)
        else:
            b = w.binary("*", dtype, b, alpha)
    op = {"add": "+", "sub": "-", "rsub": "-", "subtract": "-"}.get(name, "*")
    if dtype == torch.bool and op in "+*":
        x, y = (w.as_dtype(v, dtype) for v in (a, b))
        of_score = x.of_score or y.of_score
        return Value(f"({x.code} {'||' if op == '+' else '&&'} {y.code})", "bool", dtype, of_score=of_score)
    return w.binary(op, dtype, a, b)


@_rule("div", "divide", "true_divide", "floor_divide", "remainder", "fmod")
def _division(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    a, b = w.arguments(node, 2)
    mode = {"floor_divide": "floor", "remainder": "remainder", "fmod": "fmod"}.get(
        name, node.kwargs.get("rounding_mode")
    )
    if dtype == torch.bool:
        raise Refused(f"{name} of booleans")
    x, y = w.as_dtype(a, dtype), w.as_dtype(b, dtype)
    if x.type in ("s32", "s64"):
        return _whole_division(w, str(mode), dtype, x, y)
    if x.type == "double":
        if mode is not None:
            raise Refused(f"{name} of float64")
        return w.floating(f"({x.code} / {y.code})", dtype, x, y)
    if x.of_score and node.args[1] not in w.varying and mode is None:  # one quotient for all
        inverse = w.once(Value(f"A::exact_quotient(1.0f, {y.code})", "float", dtype))
        return w.floating(f"({x.code} * {inverse.code})", dtype, x)
    of_score = x.of_score or y.of_score
    exact = f"A::{'divide' if of_score else 'exact_quotient'}({x.code}, {y.code})"
    code = {
        None: exact,
        "trunc": f"truncf({exact})",
        "floor": f"user::floor_quotient<A>({x.code}, {y.code})",
        "remainder": f"user::remainder({x.code}, {y.code})",
        "fmod": f"fmodf({x.code}, {y.code})",
    }[mode]
    return w.floating(code, dtype, x, y)


def _whole_division(w: Lowering, mode: str, dtype: torch.dtype, a: Value, b: Value) -> Value:
    kind = "s32" if a.type == b.type == "s32" and a.range[0] > S32[0] else "s64"
    x, y = w.cast(a, kind).code, w.cast(b, kind).code
    d = b.range[0] if b.range[0] == b.range[1] else 0  # a known divisor
    of_score = a.of_score or b.of_score
    most = max(map(abs, b.range))
    if mode in ("remainder", "fmod"):
        span = (0, d - 1) if mode == "remainder" and d > 0 else (-most, most)
        if d > 0 and mode == "remainder" and d & (d - 1) == 0:
            code = f"({x} & {d - 1})"
        elif d > 0 and a.range[0] >= 0:
            code = f"({x} % {y})"
        else:
            code = f"user::{'remainder' if mode == 'remainder' else 'rest'}<{kind}>({x}, {y})"
        return w.wrapped(Value(code, kind, dtype, span, of_score), dtype)
    far = max(map(abs, a.range))
    span = (a.range[0] // d, max(a.range[1] // d, 0)) if d > 0 else (-far - 1, far + 1)
    if d > 0 and mode == "floor" and d & (d - 1) == 0:
        code = f"({x} >> {d.bit_length() - 1})"
    elif d > 0 and a.range[0] >= 0:
        code = f"({x} / {y})"
    else:
        code = f"user::{'floor_quotient' if mode == 'floor' else 'quotient'}<{kind}>({x}, {y})"
    span = (max(span[0], S64[0]), min(span[1], S64[1]))
    return w.wrapped(Value(code, kind, dtype, span, of_score), dtype)


_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@_rule(*_COMPARED)
def _comparison(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    a, b = w.arguments(node, 2)
    wide = common(a, b)
    x, y = w.as_dtype(a, wide), w.as_dtype(b, wide)
    if x.type != y.type and x.type in ("s32", "s64"):
        x, y = w.cast(x, "s64"), w.cast(y, "s64")
    return Value(f"({x.code} {_COMPARED[name]} {y.code})", "bool", dtype, of_score=x.of_score or y.of_score)


@_rule("logical_and", "logical_or", "logical_xor", "logical_not")
def _logical(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    x, *rest = (w.cast(v, "bool") for v in w.arguments(node, 1 if name == "logical_not" else 2))
    if not rest:
        return Value(f"(!{x.code})", "bool", dtype, of_score=x.of_score)
    op = {"logical_and": "&&", "logical_or": "||", "logical_xor": "!="}[name]
    return Value(f"({x.code} {op} {rest[0].code})", "bool", dtype, of_score=x.of_score or rest[0].of_score)


_BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "and": "&", "or": "|", "xor": "^"}


@_rule(*_BITS)
def _bitwise(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    x, y = (w.as_dtype(v, dtype) for v in w.arguments(node, 2))
    of_score = x.of_score or y.of_score
    if dtype == torch.bool:  # both sides are there already: no jump
        return Value(f"bool({x.code} {_BITS[name]} {y.code})", "bool", dtype, of_score=of_score)
    kind = "s64" if "s64" in (x.type, y.type) else "s32"
    x, y = w.cast(x, kind), w.cast(y, kind)
    span = S32 if kind == "s32" else S64
    return w.wrapped(Value(f"({x.code} {_BITS[name]} {y.code})", kind, dtype, span, of_score), dtype)


@_rule("bitwise_not", "invert")
def _bitwise_not(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    (x,) = (w.as_dtype(v, dtype) for v in w.arguments(node, 1))
    if dtype == torch.bool:
        return Value(f"(!{x.code})", "bool", dtype, of_score=x.of_score)
    return w.wrapped(Value(f"(~{x.code})", x.type, dtype, (~x.range[1], ~x.range[0]), x.of_score), dtype)


@_rule("bitwise_left_shift", "bitwise_right_shift", "lshift", "rshift")
def _shift(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    if dtype != torch.int64:
        raise Refused(f"{name} of {name_of(dtype)}")
    x, n = (w.as_dtype(v, dtype) for v in w.arguments(node, 2))
    side, span = ("left", S64) if "l" in name.removeprefix("bitwise_")[:1] else ("right", x.range)
    span = span if side == "left" else (min(span[0], 0), max(span[1], 0))
    return Value(f"user::shift_{side}({x.code}, {n.code})", "s64", dtype, span, x.of_score or n.of_score)


@_rule("maximum", "minimum", "max", "min", "fmax", "fmin", "clamp_min", "clamp_max")
def _extreme(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    if len(node.args) < 2:
        return w.as_dtype(w.arguments(node, 1)[0], dtype)
    a, b = w.arguments(node, 2)
    largest = name in ("maximum", "max", "fmax", "clamp_min")
    return _larger(w, dtype, a, b) if largest else _smaller(w, dtype, a, b)


def _larger(w: Lowering, dtype: torch.dtype, a: Any, b: Any) -> Value:
    return _chosen(w, dtype, a, b, ">", max)


def _smaller(w: Lowering, dtype: torch.dtype, a: Any, b: Any) -> Value:
    return _chosen(w, dtype, a, b, "<", min)


def _chosen(w: Lowering, dtype: torch.dtype, a: Any, b: Any, op: str, pick: Callable[[int, int], int]) -> Value:
    x, y = w.as_dtype(a, dtype), w.as_dtype(b, dtype)
    of_score = x.of_score or y.of_score
    if x.type in ("s32", "s64"):
        span = (pick(x.range[0], y.range[0]), pick(x.range[1], y.range[1]))
        kind = "s32" if x.type == y.type == "s32" else "s64"
        x, y = w.cast(x, kind), w.cast(y, kind)
        return Value(f"({x.code} {op} {y.code} ? {x.code} : {y.code})", kind, dtype, span, of_score)
    if x.type == "bool":
        return Value(f"bool({x.code} {'|' if op == '>' else '&'} {y.code})", "bool", dtype, of_score=of_score)
    named = "maximum" if op == ">" else "minimum"
    return Value(f"user::{named}<{x.type}>({x.code}, {y.code})", x.type, dtype, of_score=of_score)


@_rule("clamp", "clip", "hardtanh")
def _clamp(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    (x,) = w.arguments(node, 1)
    default = (-1, 1) if name == "hardtanh" else (None, None)
    keys = ("min_val", "max_val") if name == "hardtanh" else ("min", "max")
    low, high = (
        node.args[n] if len(node.args) > n else node.kwargs.get(key, by)
        for n, key, by in zip((1, 2), keys, default, strict=True)
    )
    found = w.as_dtype(x, dtype)
    if low is not None:
        found = w.keep(_larger(w, dtype, found, w.read(low)))
    if high is not None:
        found = w.keep(_smaller(w, dtype, found, w.read(high)))
    return found


@_rule("where", "masked_fill")
def _where(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    a, b, c = w.arguments(node, 3)
    condition, yes, no = (b, c, a) if name == "masked_fill" else (a, b, c)
    seen = w.cast(condition, "bool")
    x, y = w.as_dtype(yes, dtype), w.as_dtype(no, dtype)
    if x.type in ("s32", "s64"):
        kind = "s32" if x.type == y.type == "s32" else "s64"
        x, y = w.cast(x, kind), w.cast(y, kind)
    span = (min(x.range[0], y.range[0]), max(x.range[1], y.range[1]))
    of_score = seen.of_score or x.of_score or y.of_score
    return Value(f"({seen.code} ? {x.code} : {y.code})", x.type, dtype, span, of_score)


@_rule("pow")
def _power(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    a, b = w.arguments(node, 2)
    if isinstance(b, int) and b in w.literals and b in (2, 3):
        x = w.as_dtype(a, dtype)
        square = w.keep(w.binary("*", dtype, x, x))
        return square if b == 2 else w.binary("*", dtype, square, x)
    x, y = w.as_dtype(a, dtype), w.as_dtype(b, dtype)
    if x.type != "float":
        raise Refused(f"{name} of {name_of(dtype)}")
    return w.floating(f"powf({x.code}, {y.code})", dtype, x, y)


@_rule("neg", "negative", "abs", "absolute", "sign", "sgn", "relu", "square", "reciprocal")
def _unary(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    x = w.as_dtype(w.arguments(node, 1)[0], dtype)
    if name == "square":
        return w.binary("*", dtype, x, x)
    if dtype == torch.bool:
        raise Refused(f"{name} of booleans")
    floats = x.type in ("float", "double")
    if name == "reciprocal":
        code = f"A::{'divide' if x.of_score else 'exact_quotient'}(1.0f, {x.code})"
        return w.floating(code if x.type == "float" else f"(1.0 / {x.code})", dtype, x)
    if name == "relu":
        zero = Value("0.0f" if x.type == "float" else "0", x.type, dtype)
        return _larger(w, dtype, x, zero)
    if name in ("sign", "sgn"):
        return Value(f"user::sign<{x.type}>({x.code})", x.type, dtype, (-1, 1), x.of_score)
    if floats:
        code = f"(-{x.code})" if name.startswith("neg") else f"({x.code} < 0 ? -{x.code} : {x.code} + 0)"
        if name.startswith("abs") and x.type == "float":
            code = f"fabsf({x.code})"
        return Value(code, x.type, dtype, of_score=x.of_score)
    minus = w.whole("-", dtype, Value("0", "s32", dtype), x)
    if name.startswith("neg"):
        return minus
    most = max(map(abs, x.range))
    wide = "s32" if x.type == minus.type == "s32" else "s64"
    code = f"({x.code} < 0 ? {w.cast(minus, wide).code} : {w.cast(x, wide).code})"
    return Value(code, wide, dtype, (0, min(most, S64[1])), x.of_score)


# Exact, and of numbers that come of a score, which are rounded anyway: fast.
_FUNCTIONS = {
    "exp": ("expf({0})", "user::fast_exp<A>({0})"),
    "exp2": ("powf(2.0f, {0})", "A::exp2({0})"),
    "expm1": ("user::expm1<A>({0})", ""),
    "log": ("logf({0})", "user::fast_log<A>({0})"),
    "log2": ("log2f({0})", "A::log2({0})"),
    "log10": ("log10f({0})", ""),
    "log1p": ("user::log1p<A>({0})", ""),
    "sqrt": ("sqrtf({0})", ""),
    "rsqrt": ("user::rsqrt({0})", ""),
    "sin": ("sinf({0})", ""),
    "cos": ("cosf({0})", ""),
    "tanh": ("user::tanh<A>({0})", "A::tanh({0})"),
    "sigmoid": ("user::sigmoid<A>({0})", "user::fast_sigmoid<A>({0})"),
    "floor": ("floorf({0})", ""),
    "ceil": ("ceilf({0})", ""),
    "round": ("rintf({0})", ""),
    "trunc": ("truncf({0})", ""),
    "fix": ("truncf({0})", ""),
    "frac": ("({0} - truncf({0}))", ""),
}


@_rule(*_FUNCTIONS)
def _function(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    if len(node.args) > 1 or node.kwargs.get("decimals"):
        raise Refused(f"{name} with decimals")
    x = w.as_dtype(w.arguments(node, 1)[0], dtype)
    if x.type in ("s32", "s64") and name in ("floor", "ceil", "round", "trunc", "fix"):
        return x
    if x.type != "float":
        raise Refused(f"{name} of {name_of(dtype)}")
    exact, fast = _FUNCTIONS[name]
    x = x if x.code.isalnum() else w.keep(x)
    return w.floating((fast if fast and x.of_score else exact).format(x.code), dtype, x)


@_rule("isnan", "isinf", "isfinite", "signbit")
def _kind_of_number(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    (x,) = w.arguments(node, 1)
    assert isinstance(x, Value)
    floats = x.type in ("float", "double")
    code = {
        "isnan": f"({x.code} != {x.code})" if floats else "false",
        "isinf": f"({x.code} == {x.code} && {x.code} - {x.code} != 0)" if floats else "false",
        "isfinite": f"({x.code} - {x.code} == 0)" if floats else "true",
        "signbit": f"({x.code} < 0)" if not floats else "",
    }[name]
    if not code:
        raise Refused(f"{name} of {name_of(x.dtype)}")
    return Value(code, "bool", dtype, of_score=x.of_score)


@_rule("to_copy", "to", "convert_element_type", "type_as")
def _converted(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    return w.as_dtype(w.arguments(node, 1)[0], dtype)


@_rule("scalar_tensor", "full", "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "ones", "ones_like",
       "new_ones")  # fmt: skip
def _constant(w: Lowering, name: str, dtype: torch.dtype, node: Any) -> Value:
    if "zeros" in name or "ones" in name:
        x = int("ones" in name)
        code = {"float": f"{x}.0f", "bool": str(bool(x)).lower()}.get(type_of(dtype), str(x))
        kind = "s32" if type_of(dtype) == "s64" else type_of(dtype)
        return Value(code, kind, dtype, (x, x))
    return w.as_dtype(w.read(node.args[{"scalar_tensor": 0, "new_full": 2}.get(name, 1)]), dtype)
