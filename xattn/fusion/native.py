"""What kernels have of a user's function: its source, or the operation that has none and the line where it stands."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..inputs import Lowered
from . import captured, operations
from .lower import RULES, VIEWS, Lowering, Refused, name_of_operation

operations  # noqa: B018 - the rules are there when it is imported

_MOST_STEPS = 4


def literals(fn: Any, graph: torch.fx.GraphModule) -> frozenset[int]:
    """The whole numbers in ``graph`` that stand in the code of ``fn`` or of a function that it holds."""
    used = {n for node in graph.graph.nodes for n in tree_leaves((node.args, node.kwargs)) if type(n) is int}
    functions = [fn, *(captured.at(fn, path) for path in captured.constants(fn))]
    written: set[int] = set()
    waiting = [f.__code__ for f in functions if isinstance(f, FunctionType)]
    while waiting:
        for constant in waiting.pop().co_consts:
            if type(constant) is int:
                written |= {constant, -constant}
            elif isinstance(constant, CodeType):
                waiting.append(constant)
    return frozenset(used & written)


def lowered(
    role: str,
    fn: Callable[..., Any],
    graph: torch.fx.GraphModule,
    known: frozenset[int],
    example: Sequence[Tensor],
    call: Callable[..., Any],
) -> tuple[Lowered | None, str]:
    """(source, "") or (None, what has none). ``example``: what ``graph`` is called with, and ``call`` it was traced
    from."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    arguments = [n for n in graph.graph.nodes if n.op == "placeholder"]
    for argument, t in zip(arguments, example, strict=True):
        argument.meta.setdefault("val", t)  # those that were found in the graph have none
    try:
        return Lowering(role, known).run(graph), ""
    except Refused as error:
        refused = error
    node = next((n for n in graph.graph.nodes if n.name == refused.node), None)
    simpler = graph
    for _ in range(_MOST_STEPS):  # what an operation is made of may have none either
        table = _decompositions(simpler)
        if not table:
            break
        simpler = make_fx(simpler, decomposition_table=table)(*example)
        with contextlib.suppress(Refused):
            return Lowering(role, known).run(simpler), ""
    return None, f"{refused.operation} ({_where(fn, node, example, call)})"


def _decompositions(graph: torch.fx.GraphModule) -> dict[Any, Callable[..., Any]]:
    """torch's own, of the operations that have no rule here."""
    from torch._decomp import decomposition_table

    targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    known = {*RULES, *VIEWS}
    return {
        t: decomposition_table[t] for t in targets if t in decomposition_table and name_of_operation(t) not in known
    }


_OWN = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))


class _Lines(TorchDispatchMode):
    """Notes where an operation stands in the user's code: of those of one kind, that number."""

    def __init__(self, target: Any, number: int):
        super().__init__()
        self.target, self.left, self.line = target, number, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.target:
            if self.left == 0:
                frames = [f for f in traceback.extract_stack() if not f.filename.startswith(_OWN)]
                self.line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            self.left -= 1
        return func(*args, **(kwargs or {}))


def _where(fn: Any, node: torch.fx.Node | None, example: Sequence[Tensor], call: Callable[..., Any]) -> str:
    """The line of the user's code that made a node: the function is called again, as looking takes time."""
    if node is not None:
        same = [n for n in node.graph.nodes if n.target is node.target]
        with contextlib.suppress(Exception), _Lines(node.target, same.index(node)) as lines:
            call(*example)
        if lines.line:
            return lines.line
    code = getattr(fn, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else getattr(fn, "__name__", type(fn).__name__)
