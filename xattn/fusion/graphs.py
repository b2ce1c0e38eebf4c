"""What is checked and changed in the graph of a user's function before it is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import UnsupportedError


def check(graph: torch.fx.GraphModule, elements: int) -> None:
    """Refuses chance, and shapes that depend on the ``elements`` that come first."""
    of_elements = set(_arguments(graph)[:elements])
    for node in graph.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            raise ValueError(
                f"it draws random numbers ({node.target}); allowed: functions of their arguments and tensors"
            )
        if of_elements.isdisjoint(node.all_input_nodes):
            continue
        of_elements.add(node)
        made = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        unknown = any(isinstance(n, torch.SymInt) for t in made for n in t.shape)
        # Of indexing, which may also pick from what has such a shape, vmap refuses what cannot be.
        if unknown and torch.Tag.dynamic_output_shape in tags and node.target is not torch.ops.aten.index.Tensor:
            raise UnsupportedError(f"the shape of {node.target} depends on scores or indices; allowed: torch.where")


def without_writes(graph: torch.fx.GraphModule, elements: int, example: Sequence[Tensor]) -> torch.fx.GraphModule:
    """The graph in functional form, which can be mapped: it alone sees what it wrote into its first arguments, the
    ``elements``."""
    from torch.fx.experimental.proxy_tensor import make_fx

    if not any(_writes(node) for node in graph.graph.nodes):
        return graph
    made = make_fx(torch.func.functionalize(graph))(*example)
    arguments = _arguments(made)
    for node in [node for node in made.graph.nodes if _writes(node)]:
        if node.args[0] not in arguments[:elements] or node.users:
            raise UnsupportedError(
                "it writes into a tensor that it holds; allowed: into its arguments and what it made"
            )
        made.graph.erase_node(node)
    made.recompile()
    return made


def _arguments(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "placeholder"]


def _writes(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def lift(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Turns the tensors that a graph holds into arguments behind the others, and returns them."""
    nodes = [n for n in graph.graph.nodes if n.op == "get_attr"]
    captured: dict[str, Tensor] = {}
    last = _arguments(graph)[-1]
    arguments: dict[str, torch.fx.Node] = {}
    for node in nodes:
        if node.target not in captured:
            captured[node.target] = getattr(graph, node.target)
            with graph.graph.inserting_after(last):
                last = arguments[node.target] = graph.graph.placeholder(f"aux_{len(captured) - 1}")
        node.replace_all_uses_with(arguments[node.target])
        graph.graph.erase_node(node)
    for name in captured:
        delattr(graph, name)
    graph.recompile()
    return list(captured.values())
