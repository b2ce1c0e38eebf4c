"""score_mod, mask_mod and epilogue functions: traced by torch.fx, their captured tensors lifted to arguments, and kept
by key.

The functions see single elements, as FlexAttention's do: a score (or output element) and its coordinates, all 0-d
tensors. The eager form maps them over (batch, head, q_idx, kv_idx or d).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..concurrency import ForkSafeLock, transforms_enabled
from ..errors import UnsupportedError
from ..inputs import Mod
from . import captured

# name: (has a value argument, names of the four coordinates)
SIGNATURES = {
    "score_mod": (True, ("b", "h", "q_idx", "kv_idx")),
    "mask_mod": (False, ("b", "h", "q_idx", "kv_idx")),
    "epilogue": (True, ("b", "h", "q_idx", "d")),
}

_kept: OrderedDict[str, Mod] = OrderedDict()
_lock = ForkSafeLock()
_tracing = ForkSafeLock()  # torch.fx patches globals while it traces
_MOST_KEPT = 4096


def trace(
    role: str, fn: Callable[..., Any], device: torch.device, aux: Sequence[Tensor] = ()
) -> tuple[str, list[Tensor]]:
    """The key of ``fn``'s traced form and its aux tensors: those given, then those it captured. ``role`` is a key of
    SIGNATURES.

    The function is called once, with 0-d tensors. Tensors that it captured may require gradients. Under torch.compile
    it must come from outside the compiled function and hold tensors, numbers and functions, no objects that hold them.
    Raises ValueError where it cannot be called so, UnsupportedError where its control flow depends on values.
    """
    if torch.compiler.is_compiling():
        return _trace_compiled(role, fn, device, aux)
    paths = captured.tensors(fn)
    tensors = [captured.at(fn, path) for path in paths]
    mod, loose = _trace(role, fn, device, [*aux, *tensors], paths)
    if loose and _follows_indices(loose, role, fn, device, [*aux, *tensors], paths):
        raise UnsupportedError(
            f"{role}: {_describe(fn)} cannot be traced: it makes a tensor of an index's value; use the index, or "
            "torch.tensor([index])"
        )
    return intern(mod), [*aux, *tensors, *loose]


def _follows_indices(
    loose: Sequence[Tensor],
    role: str,
    fn: Callable[..., Any],
    device: torch.device,
    aux: Sequence[Tensor],
    paths: Sequence[captured.Path],
) -> bool:
    """Whether a function's own tensors are others where its indices are."""
    try:
        _, others = _trace(role, fn, device, aux, paths, index=1)
    except (ValueError, UnsupportedError):  # an index that leaves a tensor
        return False
    return any(not torch.equal(a, b) for a, b in zip(loose, others, strict=True))


def _trace_compiled(
    role: str, fn: Callable[..., Any], device: torch.device, aux: Sequence[Tensor]
) -> tuple[str, list[Tensor]]:
    """``trace`` while torch.compile looks on: the key is a constant as long as what is handed to ``_key`` is the same.

    Tensors and numbers become arguments, so that new tensors and whole numbers do not compile again (torch.compile
    itself does for new floats). Where the function needs its numbers as Python's, or the sizes of its tensors, those
    are handed to ``_key`` too.
    """
    tensor_paths, number_paths, constant_paths = _paths(fn)
    tensors = [captured.at(fn, path) for path in tensor_paths]
    numbers = [captured.at(fn, path) for path in number_paths]
    constants = tuple([captured.at(fn, path) for path in constant_paths])
    forms = tuple([(t.dim(), t.dtype) for t in (*aux, *tensors)])
    key = _key(role, fn, str(device), forms, len(aux), True, constants)
    if key:
        return key, [*aux, *tensors, *[_as_tensor(n, device) for n in numbers]]
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    sizes = [guard_scalar(n) for t in (*aux, *tensors) for n in t.shape]
    key = _key(role, fn, str(device), forms, len(aux), False, (*constants, *[guard_scalar(n) for n in numbers], *sizes))
    return key, [*aux, *tensors]


def _constant_in_compiled_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch._dynamo.assume_constant_result, without importing the compiler, which takes a second."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


@_constant_in_compiled_code
def _paths(fn: Callable[..., Any]) -> tuple[tuple[captured.Path, ...], ...]:
    return captured.tensors(fn), captured.numbers(fn), captured.constants(fn)


@_constant_in_compiled_code
def _key(
    role: str,
    fn: Callable[..., Any],
    device: str,
    forms: tuple[tuple[int, torch.dtype], ...],
    given: int,
    free: bool,
    watched: tuple,
) -> str:
    """The key of ``fn`` with ``given`` aux tensors of those ``forms`` (dimensions, dtype) and, behind them, all that it
    holds.

    With ``free`` numbers become arguments, and the result is "" where that cannot be or where the trace depends on
    sizes. ``watched`` is not used here: torch.compile compiles again when it changes.
    """
    if held := captured.others(fn):
        raise UnsupportedError(
            f"{role}: {_describe(fn)} uses {'; '.join(held)}. Under torch.compile hold tensors and numbers in local "
            "variables of the function around it: changes of anything else would go unnoticed."
        )
    where = torch.device(device)
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.no_grad():
        paths = captured.tensors(fn)
        aux = [torch.zeros((1,) * n, dtype=dtype, device=where) for n, dtype in forms[:given]]
        aux += [captured.at(fn, path) for path in paths]
        if not free:
            mods = [_trace(role, fn, where, aux, paths)]
        else:
            numbers = captured.numbers(fn)
            lifted = [_as_tensor(captured.at(fn, path), where) for path in numbers]
            try:
                mods = [
                    _trace(role, fn, where, [*tensors, *lifted], (*paths, *numbers))
                    for tensors in (aux, [_of_other_size(t) for t in aux])
                ]
            except (UnsupportedError, ValueError):
                return ""
            if mods[0][0].key != mods[1][0].key:
                return ""
    mod, loose = mods[0]
    if loose:
        raise UnsupportedError(
            f"{role}: {_describe(fn)} makes a tensor of its own from values; under torch.compile make it outside, and "
            "hold it in a local variable of the function around it"
        )
    return intern(mod)


def _of_other_size(t: Tensor) -> Tensor:
    """torch.compile knows sizes 0 and 1 from others: those stay."""
    return torch.zeros((), dtype=t.dtype, device=t.device).expand([n + (n > 1) for n in t.shape])


def _as_tensor(number: float, device: torch.device) -> Tensor:
    return torch.full(
        (), number, dtype=torch.float32 if isinstance(number, (float, torch.SymFloat)) else torch.int64, device=device
    )


def _trace(
    role: str,
    fn: Callable[..., Any],
    device: torch.device,
    aux: Sequence[Tensor],
    paths: Sequence[captured.Path],
    index: int = 0,
) -> tuple[Mod, list[Tensor]]:
    """The traced form; of ``aux``, the last stand for what fn holds at ``paths`` and those before are arguments.
    ``index``: what the examples of coordinates hold."""
    has_value, coordinates = SIGNATURES[role]
    value = [torch.zeros((), device=device)] if has_value else []
    example = [*value, *(torch.full((), index, device=device) for _ in coordinates), *aux]
    lead = len(example) - len(paths)

    def call(*args):
        with _IndexByTensor():
            result = captured.replaced(fn, dict(zip(paths, args[lead:], strict=True)))(*args[:lead])
        if isinstance(result, Tensor) and result.dim() != 0:
            raise ValueError(f"it returned shape {tuple(result.shape)}; allowed: a single element, shape ()")
        result = result if isinstance(result, Tensor) else torch.full((), result, device=device)
        if role == "mask_mod" and result.dtype != torch.bool:
            raise ValueError(f"it returned {result.dtype}; allowed: a boolean")
        if result.is_complex() or (role == "score_mod" and result.dtype == torch.bool):
            raise ValueError(f"it returned {result.dtype}; allowed: a real number")
        return result

    try:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # slow to import
        from torch.fx.experimental.proxy_tensor import make_fx

        with _tracing, temporarily_clear_interpreter_stack():
            graph = make_fx(call)(*map(_unwrapped, example))
        _refuse_chance(graph)
    except Exception as error:
        words = f"{role}: {_describe(fn)} cannot be traced: {error}"
        if "tracing tensor" in str(error) or "control flow" in str(error) or isinstance(error, UnsupportedError):
            raise UnsupportedError(
                f"{words}\nUse torch.where in place of Python conditions on scores or indices."
            ) from error
        arguments = ", ".join([*(["value"] if has_value else []), *coordinates])
        raise ValueError(f"{words}\nIt is called as {role}({arguments}, *aux).") from error
    loose = _lift(graph)
    key = f"{role}:{hashlib.sha256(graph.code.encode()).hexdigest()[:16]}"
    return Mod(key, _mapped(graph, has_value, f"{role}: {_describe(fn)}"), graph, graph.code), loose


def _refuse_chance(graph: torch.fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ValueError(
                f"it draws random numbers ({node.target}); allowed: functions of their arguments and tensors"
            )


def _unwrapped(t: Tensor) -> Tensor:
    """A stand-in where torch.func wraps a tensor or it has no element to index: only shape and dtype matter here."""
    if t.numel() and not torch._C._functorch.is_functorch_wrapped_tensor(t):
        return t
    return torch.zeros([max(n, 1) for n in t.shape], dtype=t.dtype, device=t.device)


# What reads a tensor on the host: the trace would keep the values of the examples.
_HOST_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


class _IndexByTensor(TorchFunctionMode):
    """x[i] with a 0-d tensor i reads i on the host (it becomes a select); here it stays a gather. Tensors made of
    tensors (torch.tensor([i, j])) are stacked, and what else reads values on the host is refused."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__:
            x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(_stacked(n) if isinstance(n, (list, tuple)) else n for n in index)
            if any(isinstance(n, Tensor) and n.dtype != torch.bool for n in index):
                return _gather(x, index)
        elif func in _HOST_READS:
            raise UnsupportedError(
                f"it reads a tensor on the host ({func.__name__}), whose values a trace does not know: "
                "neither Python's numbers nor numpy can follow them"
            )
        elif func in _MAKERS:
            first = int(func is Tensor.new_tensor)
            data = args[first] if len(args) > first else kwargs.get("data", kwargs.get("obj"))
            if _holds_tensors(data):
                options = {n: x for n, x in kwargs.items() if n not in ("data", "obj")}
                options |= dict(zip(("dtype", "device"), args[first + 1 :], strict=False))
                if others := [n for n, x in options.items() if x and n not in ("dtype", "device")]:
                    raise UnsupportedError(f"it makes a tensor of tensors with {', '.join(others)}")
                made = _stacked(data)
                return made.to(dtype=options.get("dtype") or made.dtype, device=options.get("device") or made.device)
        return func(*args, **kwargs)


def _holds_tensors(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and any(isinstance(n, Tensor) or _holds_tensors(n) for n in data)


def _stacked(data: Any) -> Any:
    """Nested lists that hold tensors as one tensor, as torch.tensor makes it; others as they are."""
    if not _holds_tensors(data):
        return data
    parts = [n if isinstance(n, Tensor) else _stacked(n) for n in data]
    device = next(n.device for n in parts if isinstance(n, Tensor))
    tensors = [n if isinstance(n, Tensor) else torch.tensor(n, device=device) for n in parts]
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return torch.stack([t.to(dtype) for t in tensors])


def _gather(x: Tensor, index: tuple) -> Tensor:
    if Ellipsis in [n for n in index if not isinstance(n, Tensor)]:
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        named = sum(n is not None for n in index) - 1
        index = (*index[:at], *(slice(None),) * (x.dim() - named), *index[at + 1 :])
    picks: list[Tensor | None] = []
    for dim, n in enumerate(index):
        if n is None:
            x = x.unsqueeze(dim)
            picks.append(None)
        elif isinstance(n, slice):
            x = x[(slice(None),) * dim + (n,)] if n != slice(None) else x
            picks.append(None)
        else:
            picks.append(n if isinstance(n, Tensor) else torch.tensor(n, dtype=torch.int64, device=x.device))
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


def _mapped(graph: torch.fx.GraphModule, has_value: bool, name: str) -> Callable[..., Tensor]:
    """The graph over whole tensors: value (batch, heads, rows, width), indices as ``reference.attend`` shapes them.

    Raises ValueError where an index leaves a tensor on the CPU.
    """

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
        try:
            with transforms_enabled():
                return f(*value, b, h, i, j, *aux)
        except IndexError as error:
            shapes = ", ".join(str(tuple(t.shape)) for t in aux)
            raise ValueError(
                f"{name} indexes a captured tensor where it has no element: {error}; shapes {shapes}"
            ) from error
        except RuntimeError as error:
            if not str(error).startswith("vmap:"):
                raise
            raise UnsupportedError(f"{name} cannot be mapped over elements: {error}") from error

    return eager


def _describe(fn: Callable[..., Any]) -> str:
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__name__", repr(fn))
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
