"""score_mod, mask_mod and epilogue functions: traced by torch.fx, their captured tensors lifted to arguments, and kept
by key.

The functions see single elements, as FlexAttention's do: a score (or output element) and its coordinates, all 0-d
tensors. The eager form maps them over (batch, head, q_idx, kv_idx or d). They are traced with fake tensors, which have
no values: a function that reads one is refused, and nothing that it holds is written.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..concurrency import ForkSafeLock, transforms_enabled
from ..errors import UnsupportedError
from ..inputs import Mod
from . import captured, graphs, native
from .elements import Elements

# name: (has a value argument, names of the four coordinates)
SIGNATURES = {
    "score_mod": (True, ("b", "h", "q_idx", "kv_idx")),
    "mask_mod": (False, ("b", "h", "q_idx", "kv_idx")),
    "epilogue": (True, ("b", "h", "q_idx", "d")),
}

_kept: OrderedDict[str, Mod] = OrderedDict()
_traced: dict[tuple[Any, ...], str] = {}  # keys, by what was asked
_lock = ForkSafeLock()
_tracing = ForkSafeLock()  # torch.fx patches globals while it traces
_MOST_KEPT = 4096


def trace(
    role: str,
    fn: Callable[..., Any],
    device: torch.device,
    aux: Sequence[Tensor] = (),
    dtype: torch.dtype = torch.float32,
) -> tuple[str, list[Tensor]]:
    """The key of ``fn``'s traced form and its aux tensors: those given, then those it captured. ``role`` is a key of
    SIGNATURES, ``dtype`` that of the value that the function is given.

    The function is called once, with 0-d tensors, and once more where it is told which line of it kernels cannot have;
    not again where it, and all that it holds but the elements of tensors, is what it was.
    Tensors that it captured may require gradients. Under torch.compile it must come from outside the compiled function
    and hold tensors, numbers and functions, no objects that hold them.
    Raises ValueError where it cannot be called so, UnsupportedError where it reads a value on the host, writes into
    what it holds, or cannot be mapped over elements.
    """
    if torch.compiler.is_compiling():
        return _trace_compiled(role, fn, device, aux, dtype)
    paths = captured.tensors(fn)
    tensors = [captured.at(fn, path) for path in paths]
    asked = _asked(role, fn, device, aux, dtype)
    known = None if asked is None else _traced.get(asked)
    if known is not None and known in _kept:
        return known, [*aux, *tensors]
    mod, loose = _trace(role, fn, device, dtype, [*aux, *tensors], paths)
    key = intern(mod)
    if asked is not None and not loose:
        if len(_traced) >= _MOST_KEPT:
            _traced.clear()
        _traced[asked] = key
    return key, [*aux, *tensors, *loose]


def _asked(
    role: str, fn: Callable[..., Any], device: torch.device, aux: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Any, ...] | None:
    """What a trace depends on; None where that cannot be told."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return None
    held = captured.contents(fn)
    if held is None:
        return None
    asked = (role, device, dtype, torch.get_default_dtype(), held, *map(captured.form, aux))
    try:
        hash(asked)
    except TypeError:
        return None
    return asked


def _trace_compiled(
    role: str, fn: Callable[..., Any], device: torch.device, aux: Sequence[Tensor], dtype: torch.dtype
) -> tuple[str, list[Tensor]]:
    """``trace`` while torch.compile looks on: the key is a constant as long as what is handed to ``_key`` is the same.

    Tensors and whole numbers become arguments, so that new ones do not compile again. Other numbers are handed to
    ``_key``, and, where the function needs them as Python's, whole numbers and the sizes of its tensors too.
    """
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    tensor_paths, whole_paths, float_paths, constant_paths = _paths(fn)
    tensors = [captured.at(fn, path) for path in tensor_paths]
    numbers = [captured.at(fn, path) for path in whole_paths]
    constants = tuple([captured.at(fn, path) for path in constant_paths])
    constants = (*constants, *[guard_scalar(captured.at(fn, path)) for path in float_paths])
    forms = tuple([(t.dim(), t.dtype) for t in (*aux, *tensors)])
    key = _key(role, fn, str(device), dtype, forms, len(aux), True, constants)
    if key:
        return key, [*aux, *tensors, *[_as_tensor(n, device) for n in numbers]]
    sizes = [guard_scalar(n) for t in (*aux, *tensors) for n in t.shape]
    watched = (*constants, *[guard_scalar(n) for n in numbers], *sizes)
    return _key(role, fn, str(device), dtype, forms, len(aux), False, watched), [*aux, *tensors]


def _constant_in_compiled_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch._dynamo.assume_constant_result, without importing the compiler, which takes a second."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


@_constant_in_compiled_code
def _paths(fn: Callable[..., Any]) -> tuple[tuple[captured.Path, ...], ...]:
    return captured.tensors(fn), captured.numbers(fn, int), captured.numbers(fn, float), captured.constants(fn)


@_constant_in_compiled_code
def _key(
    role: str,
    fn: Callable[..., Any],
    device: str,
    dtype: torch.dtype,
    forms: tuple[tuple[int, torch.dtype], ...],
    given: int,
    free: bool,
    watched: tuple,
) -> str:
    """The key of ``fn`` with ``given`` aux tensors of those ``forms`` (dimensions, dtype) and, behind them, all that it
    holds.

    With ``free`` whole numbers become arguments, and the result is "" where that cannot be or where the trace depends
    on sizes. ``watched`` is not used here: torch.compile compiles again when it changes.
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
            mods = [_trace(role, fn, where, dtype, aux, paths)]
        else:
            numbers = captured.numbers(fn, int)
            try:
                lifted = [_as_tensor(captured.at(fn, path), where) for path in numbers]
                mods = [
                    _trace(role, fn, where, dtype, [*tensors, *lifted], (*paths, *numbers), len(numbers))
                    for tensors in (aux, [_of_other_size(t) for t in aux])
                ]
            except (ArithmeticError, RuntimeError, ValueError):  # an UnsupportedError is a RuntimeError
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


def _as_tensor(number: int, device: torch.device) -> Tensor:
    return torch.full((), number, dtype=torch.int64, device=device)


def _trace(
    role: str,
    fn: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    aux: Sequence[Tensor],
    paths: Sequence[captured.Path],
    num_numbers: int = 0,
) -> tuple[Mod, list[Tensor]]:
    """The traced form; of ``aux``, the last stand for what fn holds at ``paths`` and those before are arguments. The
    last ``num_numbers`` are numbers."""
    for n, t in enumerate(aux):
        if t.device != device:
            raise ValueError(f"{role}_aux[{n}]: got device {t.device}; allowed: the device of q, {device}")
    has_value, coordinates = SIGNATURES[role]
    value = [torch.zeros((), dtype=dtype, device=device)] if has_value else []
    example = [*value, *(torch.zeros((), dtype=torch.int64, device=device) for _ in coordinates), *aux]
    lead, elements = len(example) - len(paths), len(value) + len(coordinates)

    def call(*args):
        with Elements(args[len(args) - num_numbers :]):
            result = captured.replaced(fn, dict(zip(paths, args[lead:], strict=True)))(*args[:lead])
        if isinstance(result, Tensor) and result.dim() != 0:
            raise ValueError(f"it returned shape {tuple(result.shape)}; allowed: a single element, shape ()")
        if not isinstance(result, Tensor):
            kind = dtype if has_value and isinstance(result, float) else None
            result = torch.full((), result, dtype=kind, device=device)
        if role == "mask_mod" and result.dtype != torch.bool:
            raise ValueError(f"it returned {result.dtype}; allowed: a boolean")
        if result.is_complex() or (role == "score_mod" and result.dtype == torch.bool):
            raise ValueError(f"it returned {result.dtype}; allowed: a real number")
        return result

    name = f"{role}: {_describe(fn)}"
    try:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # slow to import
        from torch.fx.experimental.proxy_tensor import make_fx

        with _tracing, temporarily_clear_interpreter_stack():
            example = [_unwrapped(t) for t in example]
            with _fake_mode() as fake:
                fakes = [fake.from_tensor(t, static_shapes=True) for t in example]
                graph = make_fx(call)(*fakes)
                loose = graphs.lift(graph)
                fakes += [fake.from_tensor(t, static_shapes=True) for t in loose]
                graph = graphs.without_writes(graph, elements, fakes)
                graphs.check(graph, elements)
                literals = native.literals(fn, graph)
                forms = [(t.dtype, t.dim()) for t in fakes]
                code = f"{graph.code}{forms}{sorted(literals)}"
                key = f"{role}:{hashlib.sha256(code.encode()).hexdigest()[:16]}"
                known = _kept.get(key)
                if known is not None:
                    lowered, refusal = known.lowered, known.refusal
                else:
                    lowered, refusal = native.lowered(
                        role, fn, graph, literals, fakes, lambda *given: call(*given[: len(example)])
                    )
                mod = Mod(key, _mapped(graph, has_value, name), graph, graph.code, lowered, refusal)
                if known is None:
                    _try(mod, fakes, len(value), name)
    except UnsupportedError as error:
        if str(error).startswith(name):
            raise
        raise UnsupportedError(f"{name} cannot be traced: {error}") from error
    except Exception as error:
        words = f"{name} cannot be traced: {error}"
        if _reads_values(error):
            raise UnsupportedError(
                f"{words}\nIt reads a value where there is none. Use torch.where in place of Python conditions on "
                "scores or indices, and torch in place of Python and numpy on them and on captured tensors."
            ) from error
        arguments = ", ".join([*(["value"] if has_value else []), *coordinates])
        raise ValueError(f"{words}\nIt is called as {role}({arguments}, *aux).") from error
    return mod, loose


def _fake_mode() -> Any:
    """Fake tensors without values, and with sizes that depend on values where operations take them."""
    from torch._guards import active_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True)
    return active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)


_NO_VALUE = (
    "data is not allocated yet",
    "Cannot access data pointer",
    "not supported for tensor subclasses",
    "'meta' device type",
    "tracing tensor",
    "control flow",
)


def _reads_values(error: Exception) -> bool:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    known = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    return isinstance(error, known) or any(words in str(error) for words in _NO_VALUE)


def _try(mod: Mod, example: Sequence[Tensor], values: int, name: str) -> None:
    """Raises what mapping over elements raises, whatever these are. ``example``: without values, as an index may be
    out of range that is never asked for, which a GPU does not survive."""
    shapes = (*((1, 1, 1, 1),) * values, (1, 1, 1, 1), (1, 1, 1), (1, 1), (1,))
    lead = [t.reshape(shape) for t, shape in zip(example, shapes, strict=False)]
    with torch.no_grad():
        try:
            mod.eager(*lead, *example[len(lead) :])
        except UnsupportedError:
            raise
        except RuntimeError as error:
            raise _unmapped(name, error) from error


def _unmapped(name: str, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"{name} cannot be mapped over elements: {str(error).splitlines()[0]}\nAllowed: operations on single elements "
        "and captured tensors, with shapes that do not depend on values."
    )


def _unwrapped(t: Tensor) -> Tensor:
    """A stand-in where torch.func wraps a tensor or it has no element to index: only shape and dtype matter here."""
    if t.numel() and not torch._C._functorch.is_functorch_wrapped_tensor(t):
        return t
    return torch.zeros([max(n, 1) for n in t.shape], dtype=t.dtype, device=t.device)


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


def _mapped(graph: torch.fx.GraphModule, has_value: bool, name: str) -> Callable[..., Tensor]:
    """The graph over whole tensors: value (batch, heads, rows, width), indices as ``reference.attend`` shapes them.

    Raises ValueError where an index leaves a tensor on the CPU, UnsupportedError where an operation cannot be mapped.
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
            with transforms_enabled(), _unmapped_operations_are_no_news():
                return f(*value, b, h, i, j, *aux)
        except IndexError as error:
            shapes = ", ".join(str(tuple(t.shape)) for t in aux)
            raise ValueError(
                f"{name} indexes a captured tensor where it has no element: {error}; shapes {shapes}"
            ) from error
        except RuntimeError as error:
            if not any(words in str(error) for words in ("vmap", "atching rule")):
                raise
            raise _unmapped(name, error) from error

    return eager


@contextlib.contextmanager
def _unmapped_operations_are_no_news() -> Iterator[None]:
    """torch.vmap runs what it has no rule for once for every element, and says so from C++ each time, past Python's
    warning filters: a write into a tensor that a user function made would print a line for every key."""
    switch = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", None)
    if switch is None:
        yield
        return
    switch(False)
    try:
        yield
    finally:
        switch(True)


def _describe(fn: Callable[..., Any]) -> str:
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__name__", repr(fn))
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
