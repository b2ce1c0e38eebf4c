"""score_mod, mask_mod and epilogue functions: traced by torch.fx, their captured tensors lifted to arguments, and kept
by key.

The functions see single elements, as FlexAttention's do: a score (or output element) and its coordinates, all 0-d
tensors. The eager form maps them over (batch, head, q_idx, kv_idx or d).
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedError
from ..inputs import Mod

# name: (has a value argument, names of the four coordinates)
SIGNATURES = {
    "score_mod": (True, ("b", "h", "q_idx", "kv_idx")),
    "mask_mod": (False, ("b", "h", "q_idx", "kv_idx")),
    "epilogue": (True, ("b", "h", "q_idx", "d")),
}

_kept: OrderedDict[str, Mod] = OrderedDict()
_lock = threading.Lock()
_MOST_KEPT = 4096


def trace(
    role: str, fn: Callable[..., Any], device: torch.device, aux: Sequence[Tensor] = ()
) -> tuple[str, list[Tensor]]:
    """The key of ``fn``'s traced form and its aux tensors: those given, then those it captured. ``role`` is a key of
    SIGNATURES.

    The function is called once, with 0-d tensors. Tensors that it captured may require gradients. Under torch.compile
    it must come from outside the compiled function, and hold its tensors in its closure. Raises ValueError where it
    cannot be called so, UnsupportedError where its control flow depends on values.
    """
    if torch.compiler.is_compiling():
        lifted = [v if isinstance(v, Tensor) else _as_tensor(v, device) for v in _captured(fn, numbers=True)]
        dims = ",".join([str(t.dim()) for t in aux])
        return _trace_constant(role, fn, str(device), dims), [*aux, *lifted]
    tensors = _captured(fn)
    mod, loose = _trace(role, fn, device, [*aux, *tensors], len(aux))
    return intern(mod), [*aux, *tensors, *loose]


@torch._dynamo.assume_constant_result
def _trace_constant(role: str, fn: Callable[..., Any], device: str, dims: str) -> str:
    """``trace`` while torch.compile looks on: the key is a constant as long as the function's code is the same, for all
    it captured is an argument."""
    with unset_fake_temporarily(), torch.no_grad():
        where = torch.device(device)
        captured = [v if isinstance(v, Tensor) else _as_tensor(v, where) for v in _captured(fn, numbers=True)]
        aux = [torch.zeros((1,) * int(n), device=where) for n in dims.split(",") if n]
        mod, loose = _trace(role, fn, where, [*aux, *captured], len(aux), numbers=True)
    if loose:
        raise UnsupportedError(
            f"{role}: {_describe(fn)} uses a tensor that is neither in its closure nor an argument (a global, an "
            "attribute); under torch.compile hold it in a local variable of the function around it"
        )
    return intern(mod)


def _as_tensor(number: float, device: torch.device) -> Tensor:
    return torch.full(
        (), number, dtype=torch.float32 if isinstance(number, (float, torch.SymFloat)) else torch.int64, device=device
    )


def _trace(
    role: str, fn: Callable[..., Any], device: torch.device, aux: list[Tensor], given: int, numbers: bool = False
) -> tuple[Mod, list[Tensor]]:
    """The traced form; of ``aux``, the first ``given`` are arguments of fn and the others stand for its closure's
    tensors."""
    has_value, coordinates = SIGNATURES[role]
    value = [torch.zeros((), device=device)] if has_value else []
    example = [*value, *(torch.zeros((), dtype=torch.int64, device=device) for _ in coordinates), *aux]
    lead = len(example) - len(aux) + given

    def call(*args):
        with _IndexByTensor():
            result = _rebind(fn, iter(args[lead:]), numbers)(*args[:lead])
        if isinstance(result, Tensor) and result.dim() != 0:
            raise ValueError(f"it returned shape {tuple(result.shape)}; allowed: a single element, shape ()")
        return result if isinstance(result, Tensor) else torch.full((), result, device=device)

    try:
        graph = make_fx(call)(*example)
    except Exception as error:
        words = f"{role}: {_describe(fn)} cannot be traced: {error}"
        if "tracing tensor" in str(error) or "control flow" in str(error):
            raise UnsupportedError(
                f"{words}\nUse torch.where in place of Python conditions on scores or indices."
            ) from error
        arguments = ", ".join([*(["value"] if has_value else []), *coordinates])
        raise ValueError(f"{words}\nIt is called as {role}({arguments}, *aux).") from error
    loose = _lift(graph)
    key = f"{role}:{hashlib.sha256(graph.code.encode()).hexdigest()[:16]}"
    return Mod(key, _mapped(graph, has_value), graph, graph.code), loose


def _captured(fn: Any, numbers: bool = False) -> list[Any]:
    """The tensors, and with ``numbers`` the numbers, that a function and the functions in its closure hold, in a fixed
    order."""
    found: list[Any] = []
    for cell in getattr(fn, "__closure__", None) or ():
        content = cell.cell_contents
        if isinstance(content, FunctionType):
            found += _captured(content, numbers)
        elif _is_lifted(content, numbers):
            found.append(content)
    return found


def _rebind(fn: Any, values: Iterator[Tensor], numbers: bool) -> Any:
    """The function with what ``_captured`` finds replaced, in its order."""
    if not isinstance(fn, FunctionType) or not fn.__closure__:
        return fn
    cells = []
    for cell in fn.__closure__:
        content = cell.cell_contents
        if isinstance(content, FunctionType):
            content = _rebind(content, values, numbers)
        elif _is_lifted(content, numbers):
            content = next(values)
        cells.append(CellType(content))
    new = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, tuple(cells))
    new.__kwdefaults__ = fn.__kwdefaults__
    return new


def _is_lifted(content: Any, numbers: bool) -> bool:
    return isinstance(content, Tensor) or (
        numbers and isinstance(content, (int, float)) and not isinstance(content, bool)
    )


class _IndexByTensor(TorchFunctionMode):
    """x[i] with a 0-d tensor i reads i on the host (it becomes a select); here it stays a gather."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(n, Tensor) and n.dtype != torch.bool for n in index):
                return _gather(x, index)
        return func(*args, **(kwargs or {}))


def _gather(x: Tensor, index: tuple) -> Tensor:
    if Ellipsis in [n for n in index if not isinstance(n, Tensor)]:
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        index = (*index[:at], *(slice(None),) * (x.dim() - len(index) + 1), *index[at + 1 :])
    picks: list[Tensor | None] = []
    for dim, n in enumerate(index):
        if isinstance(n, slice):
            x = x[(slice(None),) * dim + (n,)] if n != slice(None) else x
            picks.append(None)
        else:
            picks.append(n if isinstance(n, Tensor) else torch.full((), n, dtype=torch.int64, device=x.device))
    return torch.ops.aten.index.Tensor(x, picks)


def intern(mod: Mod | None) -> str:
    """The key of ``mod``, from which ``lookup`` finds it; "" for None."""
    if mod is None:
        return ""
    with _lock:
        _kept[mod.key] = mod
        _kept.move_to_end(mod.key)
        while len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
    return mod.key


def lookup(key: str) -> Mod | None:
    if not key:
        return None
    with _lock:
        if key not in _kept:
            raise UnsupportedError(
                f"{key}: this process has traced no such function. "
                "User functions do not travel in exported or scripted modules."
            )
        return _kept[key]


def _lift(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Turns the tensors that a graph holds into arguments behind the others, and returns them."""
    nodes = [n for n in graph.graph.nodes if n.op == "get_attr"]
    captured: dict[str, Tensor] = {}
    last = [n for n in graph.graph.nodes if n.op == "placeholder"][-1]
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


def _mapped(graph: torch.fx.GraphModule, has_value: bool) -> Callable[..., Tensor]:
    """The graph over whole tensors: value (batch, heads, rows, width), indices as ``reference.attend`` shapes them."""

    def eager(*args):
        value, (b, h, i, j, *aux) = (args[:1], args[1:]) if has_value else ((), args)
        b, h, j = b.reshape(-1), h.reshape(-1), j.reshape(-1)
        by_sequence = i.dim() == 4  # (batch, 1, rows, 1): the position of a row differs between sequences
        i = i.reshape(b.shape[0], -1) if by_sequence else i.reshape(-1)
        shape = (b.shape[0], h.shape[0], i.shape[-1], j.shape[0])
        if 0 in shape:
            return value[0] if value else torch.zeros(shape, dtype=torch.bool, device=b.device)
        rest = (None,) * len(aux)
        v = (0,) * len(value)
        f = torch.vmap(graph, in_dims=(*v, None, None, None, 0, *rest))
        f = torch.vmap(f, in_dims=(*v, None, None, 0, None, *rest))
        f = torch.vmap(f, in_dims=(*v, None, 0, None, None, *rest))
        f = torch.vmap(f, in_dims=(*v, 0, None, 0 if by_sequence else None, None, *rest))
        with _vmap_enabled():
            return f(*value, b, h, i, j, *aux)

    return eager


def _vmap_enabled() -> Any:
    """Kernels called below a dispatch mode (compiled code's first run, a flop counter) find vmap's dispatch keys
    excluded: let them in."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (
        keys.FuncTorchBatched,
        keys.FuncTorchBatchedDecomposition,
        keys.FuncTorchVmapMode,
        keys.FuncTorchDynamicLayerFrontMode,
        keys.FuncTorchDynamicLayerBackMode,
    ):
        excluded = excluded - torch._C.DispatchKeySet(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _describe(fn: Callable[..., Any]) -> str:
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__name__", repr(fn))
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
