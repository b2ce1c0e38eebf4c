"""The graph of a user's score_mod, mask_mod or epilogue as the source of a C++ function, which is compiled into the
kernels.

One source serves every vendor: plain C++ over csrc_cuda/kernels/user_functions.h. Numbers that the function holds
become arguments, so that new ones give the same source; those written in its code are constants where they are whole,
as a division by a known number is a multiplication. Whole numbers are s32 where the ranges of indices show that they
fit, otherwise s64.

A score_mod or mask_mod is asked for one score after the other. What depends on neither the score nor its query and
key is computed once for a head.

An epilogue is asked for a run of N channels of a row. What does not depend on the output or its channel is computed
once for all of them, and captured tensors that are indexed by the channel as it is are read in one piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..inputs import Lowered

COORDINATES = ("b", "h", "q_idx", "kv_idx")
_OF_OUTPUT = ("b", "h", "q_idx", "d")
# What a function is asked about one after the other; the rest of what it is given stays meanwhile.
_VARYING = {"score_mod": ("score", "q_idx", "kv_idx"), "mask_mod": ("q_idx", "kv_idx"), "epilogue": ("o", "d")}
ELEMENTS = {
    torch.float64: "double",
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "s64",
    torch.int32: "s32",
    torch.int16: "s16",
    torch.int8: "s8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
_FAR = (1 << 30) - 1  # indices and numbers that are taken for small are not farther from 0
S32, S64 = (-(1 << 31), (1 << 31) - 1), (-(1 << 63), (1 << 63) - 1)
_MOST_BYTES = 1024  # of arguments
_DECLARED = re.compile(r"const (\w+) (\w+) =")


APPLY: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
SAME = ("alias", "detach", "clone", "lift_fresh", "lift_fresh_copy", "contiguous", "copy")
VIEWS = (*SAME, "index", "select", "slice", "unsqueeze", "squeeze", "permute", "transpose", "t", "view", "reshape",
          "unsafe_view", "expand")  # fmt: skip


class Refused(Exception):
    """An operation that has no source here. ``node``: its name in the graph."""

    def __init__(self, operation: str, node: str = ""):
        super().__init__(operation)
        self.operation, self.node = operation, node


@dataclass(frozen=True)
class Value:
    """A name or literal of C++. ``range``: of whole numbers. ``of_score``: whether it depends on the score; in an
    epilogue, on the output or its channel."""

    code: str
    type: str  # bool, s32, s64, float, double
    dtype: torch.dtype
    range: tuple[int, int] = (0, 0)
    of_score: bool = False


@dataclass(frozen=True)
class View:
    """A captured tensor, indexed in some of its dimensions. ``left``: those that are not, in their order; -1 is a new
    axis. ``picked``: (dimension, index) of the others."""

    table: int
    dtype: torch.dtype
    left: tuple[int, ...]
    picked: tuple[tuple[int, Value], ...] = ()


class Lowering:
    """Goes through a graph. ``literals``: whole numbers that stand in the code of the user's function."""

    def __init__(self, role: str, literals: frozenset[int]):
        self.role, self.literals = role, literals
        self.lines: list[tuple[str, bool]] = []  # and whether it is one of each element's
        self.varying: set[torch.fx.Node] = set()  # which differ from element to element
        self.each = False  # whether what is being lowered does
        self.reads_each = False  # whether captured tensors are read for each element
        self.runs: list[tuple[int, int]] = []  # (which of the tables, its dimension) that are read in one piece
        self.held: list[str] = []  # what declares them
        self.numbers: list[tuple[str, int | float]] = []  # (type, value)
        self.tables: dict[int, tuple[str, int]] = {}  # aux number: (element, dimensions)
        self.values: dict[torch.fx.Node, Any] = {}

    def run(self, graph: torch.fx.GraphModule) -> Lowered:
        """Its source; raises Refused."""
        arguments = [n for n in graph.graph.nodes if n.op == "placeholder"]
        lead = {"score_mod": ["score"], "mask_mod": [], "epilogue": ["o"]}[self.role]
        at = _OF_OUTPUT if self.role == "epilogue" else COORDINATES
        self.varying = _depending(
            {n for n, name in zip(arguments, (*lead, *at), strict=False) if name in _VARYING[self.role]}, graph
        )
        for node, name in zip(arguments, (*lead, *at), strict=False):
            dtype = node.meta["val"].dtype
            if name in lead:
                if dtype != torch.float32:
                    raise Refused(f"{'an output' if name == 'o' else 'a score'} of {name_of(dtype)}", node.name)
                self.values[node] = Value(name, "float", dtype, of_score=True)
            else:
                low = -_FAR if name == "q_idx" else 0
                self.values[node] = Value(name, "s32", dtype, (low, _FAR), of_score=name == "d")
        for n, node in enumerate(arguments[len(lead) + 4 :]):
            t = node.meta["val"]
            self.values[node] = View(n, t.dtype, tuple(range(t.dim())))
        for node in _live(graph):
            if node.op == "placeholder":
                continue
            if node.op == "output":
                result = self.read(node.args[0])
                break
            if node.op != "call_function":
                raise Refused(str(node.target), node.name)
            self.each = node in self.varying
            try:
                self.values[node] = self._node(node)
            except Refused as refused:
                raise Refused(refused.operation, refused.node or node.name) from None
        kind = "bool" if self.role == "mask_mod" else "float"
        return self._lowered(kind, self.cast(result, kind).code)

    def _lowered(self, kind: str, result: str) -> Lowered:
        if self.role == "epilogue":
            source = self._of_a_run(result)
        else:
            source = self._of_a_score(kind, result)
        tables, forms, runs = tuple(self.tables), tuple(self.tables.values()), tuple(dict.fromkeys(self.runs))
        found = Lowered(self.role, source, tables, forms, tuple(self.numbers), runs, self.reads_each)
        if found.bytes > _MOST_BYTES:
            raise Refused(f"{found.bytes} bytes of captured tensors and numbers, more than {_MOST_BYTES},")
        return found

    def _of_a_score(self, kind: str, result: str) -> str:
        """What is computed once for a head, and for each of its scores."""
        name, score = ("MaskMod", "") if self.role == "mask_mod" else ("ScoreMod", "float score, ")
        at = ", ".join(f"s32 {name}" for name in COORDINATES)
        members, once = self._once()
        return "\n".join(
            [
                "template <class A>",
                f"struct {name} {{",
                "    bool found = true;",
                *members,
                "    XATTN_DEVICE void load(const Captured& c, s32 b, s32 h) {",
                *once,
                "    }",
                f"    XATTN_DEVICE {kind} at(const Captured& c, {score}{at}, bool& found) const {{",
                *(f"        {line}" for line, each in self.lines if each),
                f"        return {result};",
                "    }",
                "};",
            ]
        )

    def _once(self) -> tuple[list[str], list[str]]:
        """What is computed once: members that hold it, and the lines that do."""
        lines = [line for line, each in self.lines if not each]
        members = [f"    {found[1]} {found[2]};" for line in lines if (found := _DECLARED.match(line))]
        return members, ["        " + _DECLARED.sub(r"\2 =", line) for line in lines]

    def _of_a_run(self, result: str) -> str:
        """An epilogue of channels ``first``, ``first`` + 1 ... of a row: what is read ahead and computed once for all
        of them, and what ``x`` becomes."""
        at = "s32 b, s32 h, s32 q_idx, s32 first, bool& found"
        members, once = self._once()
        return "\n".join(
            [
                "template <class A, int N>",
                "struct Epilogue {",
                *members,
                *(f"    {line}" for line in self.held),
                f"    XATTN_DEVICE void load(const Captured& c, {at}) {{",
                *once,
                "    }",
                f"    XATTN_DEVICE void apply(const Captured& c, float (&x)[N], {at}) const {{",
                "        XATTN_UNROLL",
                "        for (int i = 0; i < N; ++i) {",
                "            const s32 d = first + i;",
                "            const float o = x[i];",
                *(f"            {line}" for line, each in self.lines if each),
                f"            x[i] = {result};",
                "        }",
                "    }",
                "};",
            ]
        )

    # ---- operands
    def read(self, arg: Any) -> Value | int | float | bool:
        """What an argument of an operation is; elements of captured tensors are loaded."""
        if isinstance(arg, torch.fx.Node):
            value = self.values[arg]
            if isinstance(value, View):
                if value.left:
                    raise Refused("a whole captured tensor, or a row of one, as a value", arg.name)
                outer, self.each = self.each, arg in self.varying
                value = self.values[arg] = self._load(value)
                self.each = outer
            return value
        if isinstance(arg, (bool, int, float)):
            return arg
        raise Refused(f"an argument {arg!r}")

    def _load(self, view: View) -> Value:
        if view.dtype not in ELEMENTS:
            raise Refused(f"a captured tensor of {name_of(view.dtype)}")
        picked = dict(view.picked)
        self.tables.setdefault(view.table, (ELEMENTS[view.dtype], len(picked)))
        slot = list(self.tables).index(view.table)
        of_score = any(v.of_score for v in picked.values())
        if self.role == "epilogue" and of_score:
            varying = [dim for dim in sorted(picked) if picked[dim].of_score]
            if len(varying) == 1 and picked[varying[0]].code == "d":
                return self._run(view, slot, varying[0])
        self.reads_each |= self.each
        index = "".join(f", {picked[d].code}" for d in sorted(picked))
        code = f"user::at<A>(c.{self.role}_t{slot}, found{index})"
        return self.keep(Value(code, type_of(view.dtype), view.dtype, range_of(view.dtype), of_score))

    def _run(self, view: View, slot: int, channel: int) -> Value:
        """The elements of a row of a captured tensor that stand at the channels of the run."""
        self.runs.append((slot, channel))
        name, element = f"x{len(self.lines)}", ELEMENTS[view.dtype]
        index = "".join(f", {'user::Channel{first}' if d == channel else v.code}" for d, v in sorted(view.picked))
        self.held.append(f"user::Run<A, {element}, N, kWide> {name};")
        self.lines.append((f"{name}.load(c.{self.role}_t{slot}, found{index});", False))
        kind = type_of(view.dtype)
        return self.keep(Value(f"{name}.at(i)", kind, view.dtype, range_of(view.dtype), of_score=True))

    def once(self, value: Value) -> Value:
        """A name for the value of an expression that does not differ from element to element."""
        outer, self.each = self.each, False
        value = self.keep(value)
        self.each = outer
        return value

    def keep(self, value: Value) -> Value:
        """A name for the value of an expression."""
        name = f"x{len(self.lines)}"
        code = value.code
        bare = code[1:-1]  # without parentheses around all of it
        whole = code.startswith("(") and bare.count("(") == bare.count(")") and bare.find(")") >= bare.find("(")
        self.lines.append((f"const {value.type} {name} = {bare if whole else code};", self.each))
        return replace(value, code=name)

    def _number(self, x: int | float | bool, kind: str) -> Value:
        """A number of Python as that type of C++."""
        if kind == "bool":
            return Value("true" if x else "false", kind, torch.bool)
        if kind in ("float", "double"):
            return Value(self._argument(kind, float(x)), kind, torch.float32 if kind == "float" else torch.float64)
        if isinstance(x, float):
            raise Refused(f"the number {x} as a whole one")
        x = int(x)
        if not S64[0] <= x <= S64[1]:
            raise Refused(f"the number {x}, which no int64 holds,")
        if x in self.literals:
            wide = not S32[0] < x <= S32[1]
            return Value(f"s64({x}ll)" if wide else f"{x}", "s64" if wide else "s32", torch.int64, (x, x))
        wide = abs(x) > _FAR
        kind = "s64" if wide else "s32"
        return Value(self._argument(kind, x), kind, torch.int64, S64 if wide else (-_FAR, _FAR))

    def _argument(self, kind: str, x: int | float) -> str:
        self.numbers.append((kind, x))
        return f"c.{self.role}_n{len(self.numbers) - 1}"

    def cast(self, x: Value | int | float | bool, kind: str) -> Value:
        """As that type of C++; "whole": as s32 or s64, whichever it is."""
        if not isinstance(x, Value):
            return self._number(x, kind)
        if kind == "whole":
            if x.type in ("s32", "s64"):
                return x
            if x.type == "bool":
                return replace(x, code=f"s32({x.code})", type="s32", range=(0, 1))
            return replace(x, code=f"user::whole({x.code})", type="s64", range=S64)
        if x.type == kind:
            return x
        code = f"({x.code} != 0)" if kind == "bool" else f"{kind}({x.code})"
        return replace(x, code=code, type=kind)

    def as_dtype(self, x: Value | int | float | bool, dtype: torch.dtype) -> Value:
        """Converted to a dtype, as torch does it."""
        kind = type_of(dtype)
        if kind in ("s32", "s64"):
            return self.wrapped(self.cast(x, "whole"), dtype)
        value = self.cast(x, kind)
        narrow = dtype in (torch.bfloat16, torch.float16) and not (isinstance(x, Value) and x.dtype == dtype)
        if narrow:
            value = replace(value, code=f"user::rounded<A, {ELEMENTS[dtype]}>({value.code})")
        return replace(value, dtype=dtype)

    def wrapped(self, x: Value, dtype: torch.dtype) -> Value:
        """A whole number in the range of its dtype, and in s32 if it fits."""
        low, high = range_of(dtype)
        if low <= x.range[0] and x.range[1] <= high:
            return replace(x, dtype=dtype)
        return Value(f"{type_of(dtype)}({ELEMENTS[dtype]}({x.code}))", type_of(dtype), dtype, (low, high), x.of_score)

    # ---- operations
    def _node(self, node: Any) -> Any:
        name = name_of_operation(node.target)
        if name in VIEWS and isinstance(node.args[0], torch.fx.Node):
            source = self.values[node.args[0]]
            if isinstance(source, View):
                return self._view(name, source, node)
            if name in SAME:
                return source
        out = node.meta["val"]
        if not isinstance(out, torch.Tensor) or out.dim() != 0:
            raise Refused(f"{name} of more than single elements")
        rule = RULES.get(name)
        if rule is None or out.dtype not in ELEMENTS:
            raise Refused(name if rule is None else f"{name} as {name_of(out.dtype)}")
        result = rule(self, name, out.dtype, node)
        simple = result.code.replace("_", "").isalnum() or result.code.startswith("c.")
        return result if simple else self.keep(result)

    def _view(self, name: str, x: View, node: Any) -> View:
        args = node.args
        if name in SAME:
            return x
        if name == "index":
            return self._indexed(x, args[1])
        if name == "select":
            dim = args[1] % len(x.left)
            return self._indexed(x, [*([None] * dim), args[2]])
        if name == "unsqueeze":
            dim = args[1] % (len(x.left) + 1)
            return replace(x, left=(*x.left[:dim], -1, *x.left[dim:]))
        if name == "squeeze":
            after, before = node.meta["val"].shape, args[0].meta["val"].shape
            gone = [d for d in range(len(before)) if before[d] == 1]
            if len(args) > 1:
                wanted = [args[1]] if isinstance(args[1], int) else args[1]
                gone = [d for d in gone if d in [w % len(before) for w in wanted]]
            assert len(before) - len(gone) == len(after)
            return self._first(x, gone)
        if name in ("permute", "transpose", "t"):
            order = list(range(len(x.left)))
            if name == "permute":
                order = [d % len(order) for d in args[1]]
            elif name == "t":
                order.reverse()
            else:
                a, b = (d % len(order) for d in args[1:3])
                order[a], order[b] = b, a
            return replace(x, left=tuple(x.left[d] for d in order))
        after, before = tuple(node.meta["val"].shape), tuple(args[0].meta["val"].shape)
        if after == before:  # slices of all, views that are the same
            return x
        if name in ("view", "reshape", "unsafe_view") and after == () and set(before) == {1}:
            return self._first(x, range(len(before)))
        raise Refused(f"{name} of a captured tensor")

    def _first(self, x: View, dims: Iterable[int]) -> View:
        """At 0 of dimensions of size 1."""
        picks = [Value("0", "s32", torch.int64) if d in set(dims) else None for d in range(len(x.left))]
        return self._picked(x, picks)

    def _indexed(self, x: View, index: Iterable[Any]) -> View:
        picks: list[Value | None] = []
        for n in index:
            value = None if n is None else self.read(n)
            if value is not None:
                value = self.cast(value, "whole")
            if value is not None and isinstance(n, torch.fx.Node) and n.meta["val"].dtype in (torch.bool, torch.uint8):
                raise Refused("a mask as an index")
            picks.append(value)
        return self._picked(x, [*picks, *([None] * (len(x.left) - len(picks)))])

    def _picked(self, x: View, picks: list[Value | None]) -> View:
        pairs = list(zip(x.left, picks, strict=True))
        if any(d < 0 and value is not None and value.code != "0" for d, value in pairs):
            raise Refused("an index into a new axis")
        picked = [(d, value) for d, value in pairs if value is not None and d >= 0]
        return replace(x, left=tuple(d for d, value in pairs if value is None), picked=(*x.picked, *picked))

    # ---- arithmetic, for the rules
    def arguments(self, node: Any, count: int) -> list[Value | int | float | bool]:
        return [self.read(arg) for arg in node.args[:count]]

    def whole(self, op: str, dtype: torch.dtype, a: Value, b: Value) -> Value:
        """a op b of whole numbers: + - *. What int64 does not hold wraps."""
        ends = [APPLY[op](x, y) for x in a.range for y in b.range]
        low, high, of_score = min(ends), max(ends), a.of_score or b.of_score
        kind = "s32" if S32[0] <= low and high <= S32[1] else "s64"
        if S64[0] <= low and high <= S64[1]:
            code = f"{self.cast(a, kind).code} {op} {self.cast(b, kind).code}"
        else:
            code = f"s64(u64({a.code}) {op} u64({b.code}))"
            low, high = S64
        return self.wrapped(Value(f"({code})", kind, dtype, (low, high), of_score), dtype)

    def binary(self, op: str, dtype: torch.dtype, a: Any, b: Any) -> Value:
        """a op b in ``dtype``: + - *."""
        x, y = self.as_dtype(a, dtype), self.as_dtype(b, dtype)
        if dtype == torch.bool:
            raise Refused(f"{op} of booleans")
        if x.type in ("s32", "s64"):
            return self.whole(op, dtype, x, y)
        return self.floating(f"({x.code} {op} {y.code})", dtype, x, y)

    def floating(self, code: str, dtype: torch.dtype, *of: Value) -> Value:
        """An expression of floats, rounded to its dtype."""
        if dtype in (torch.bfloat16, torch.float16):
            code = f"user::rounded<A, {ELEMENTS[dtype]}>({code})"
        return Value(code, type_of(dtype), dtype, of_score=any(x.of_score for x in of))


def name_of_operation(target: Any) -> str:
    """Without namespace, overload and underscores around it."""
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__.strip("_") if packet is not None else getattr(target, "__name__", str(target))


# ---------------------------------------------------------------- dtypes
def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def type_of(dtype: torch.dtype) -> str:
    """The type of C++ that values of a dtype have; whole numbers of 64 bits may be s32 where they fit."""
    if dtype not in ELEMENTS:
        raise Refused(f"a value of {name_of(dtype)}")
    if dtype.is_floating_point:
        return "double" if dtype == torch.float64 else "float"
    return "bool" if dtype == torch.bool else "s64" if dtype == torch.int64 else "s32"


def range_of(dtype: torch.dtype) -> tuple[int, int]:
    if dtype.is_floating_point or dtype == torch.bool:
        return (0, 1)
    info = torch.iinfo(dtype)
    return (info.min, info.max)


def common(*values: Value | int | float | bool) -> torch.dtype:
    """The dtype in which values are compared."""
    found: torch.dtype | None = None
    for x in values:
        if isinstance(x, Value):
            found = x.dtype if found is None else torch.promote_types(found, x.dtype)
    for x in values:
        if not isinstance(x, Value):
            if isinstance(x, float) and (found is None or not found.is_floating_point):
                found = torch.get_default_dtype()
            elif not isinstance(x, bool) and found in (None, torch.bool):
                found = torch.int64
    return found or torch.bool


def _live(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The nodes that the result depends on, in order."""
    needed: set[torch.fx.Node] = set()
    for node in reversed(list(graph.graph.nodes)):
        if node.op == "output" or node in needed:
            needed |= {node, *node.all_input_nodes}
    return [node for node in graph.graph.nodes if node in needed]


def _depending(on: set[torch.fx.Node], graph: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Nodes and those that depend on them."""
    found = set(on)
    for node in graph.graph.nodes:
        if found.intersection(node.all_input_nodes):
            found.add(node)
    return found


Rule = Callable[[Lowering, str, torch.dtype, Any], Value]
RULES: dict[str, Rule] = {}  # by the name of the operation; filled by operations.py
