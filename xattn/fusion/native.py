"""What kernels have of a user's function: its source, or the operation that has none and the line where it stands."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..inputs import Lowered
from . import captured, operations
from .lower import RULES, Lowering, Refused, name_of_operation

operations  # noqa: B018 - the rules are there when it is imported


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

    try:
        return Lowering(role, known).run(graph), ""
    except Refused as error:
        refused = error
    node = next((n for n in graph.graph.nodes if n.name == refused.node), None)
    table = _decompositions(graph)
    if table:
        simpler = make_fx(graph, decomposition_table=table)(*example)
        with contextlib.suppress(Refused):
            return Lowering(role, known).run(simpler), ""
    return None, f"{refused.operation} ({_where(fn, node, example, call)})"


def _decompositions(graph: torch.fx.GraphModule) -> dict[Any, Callable[..., Any]]:
    """torch's own, of the operations that have no rule here."""
    from torch._decomp import decomposition_table

    targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    return {t: decomposition_table[t] for t in targets if t in decomposition_table and name_of_operation(t) not in RULES}


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _where(
    fn: Any, node: torch.fx.Node | None, example: Sequence[Tensor], call: Callable[..., Any]
) -> str:
    """The line of the user's code that made a node: it is traced again, as noting lines takes time."""
    from torch.fx.experimental.proxy_tensor import make_fx

    frames: list[tuple[str, str]] = []
    if node is not None and "record_stack_traces" in inspect.signature(make_fx).parameters:
        with contextlib.suppress(Exception):
            again = make_fx(call, record_stack_traces=True)(*example)
            same = next((n for n in again.graph.nodes if n.name == node.name and n.target == node.target), None)
            found = _FRAME.findall((same.meta.get("stack_trace") if same is not None else "") or "")
            frames = [(file, line) for file, line in found if not file.startswith(_OWN)]
    if frames:
        return ":".join(frames[-1])
    code = getattr(fn, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else getattr(fn, "__name__", type(fn).__name__)
