"""What a function holds from outside (its closure, defaults, the globals it reads): found by path, read, and replaced.

Paths are found by looking; ``at`` reads along them, also where torch.compile looks on, which then watches what is read.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

# Steps from a function to what it holds: ("cell" | "default", number) or ("keyword" | "global", name).
Path = tuple[tuple[str, Any], ...]

_UNCHANGED = ("torch", "math", "builtins")
_CONSTANTS = (bool, str, bytes, type(None), slice, torch.dtype, torch.device)
_STEADY = (ModuleType, type, BuiltinFunctionType, FunctionType, type(torch.ops.aten.add), type(torch.add))


def tensors(fn: Any) -> tuple[Path, ...]:
    """Where ``fn``, or a function that it holds, holds a tensor; in a fixed order."""
    return tuple(path for path, content in _walk(fn) if isinstance(content, Tensor))


def numbers(fn: Any, kind: type) -> tuple[Path, ...]:
    """Where it holds numbers of a kind, int or float."""
    return tuple(path for path, content in _walk(fn) if is_number(content) and isinstance(content, kind))


def constants(fn: Any) -> tuple[Path, ...]:
    """Where it holds what cannot be a tensor but decides what it does: flags, words, other functions."""
    return tuple(path for path, content in _walk(fn) if _is_constant(content) or _is_followed(content))


def others(fn: Any) -> list[str]:
    """What it holds beside those, in words: objects that may change without anybody's notice."""
    if not isinstance(fn, FunctionType):
        return [f"an object, {type(fn).__name__}"]
    return [f"{_name(fn, path)} ({type(content).__name__})" for path, content in _walk(fn) if not _is_plain(content)]


def contents(fn: Any) -> tuple[Any, ...] | None:
    """All that decides what ``fn`` does, such that equal ones do the same, but for the elements of tensors; None where
    something may change without being seen here: objects, and modules and classes that are not torch's or Python's."""
    if not isinstance(fn, FunctionType):
        return None
    found: list[Any] = [fn.__code__]
    for path, content in _walk(fn):
        known = _seen(content)
        if known is None:
            return None
        found += (path, known)
    return tuple(found)


def _seen(content: Any) -> Any:
    if isinstance(content, Tensor):
        return form(content)
    if _is_followed(content):
        return content.__code__
    if isinstance(content, float):
        return content.hex()  # 0.0 is not -0.0
    if isinstance(content, slice):  # has no hash before Python 3.12
        return slice, content.start, content.stop, content.step
    if isinstance(content, tuple):
        return (tuple, *map(_seen, content)) if _is_constant(content) else None
    if isinstance(content, (ModuleType, type)):
        name = content.__name__ if isinstance(content, ModuleType) else content.__module__
        return content if name.split(".")[0] in _UNCHANGED else None
    return (type(content), content) if _is_plain(content) else None


def form(t: Tensor) -> tuple[Any, ...]:
    """All of a tensor but its elements."""
    return type(t), t.dtype, t.device, t.shape, t.stride()


def at(fn: Any, path: Path) -> Any:
    for step, key in path:
        if step == "cell":
            fn = fn.__closure__[key].cell_contents
        elif step == "default":
            fn = fn.__defaults__[key]
        elif step == "keyword":
            fn = fn.__kwdefaults__[key]
        else:
            fn = fn.__globals__[key]
    return fn


def replaced(fn: Any, values: dict[Path, Any]) -> Any:
    """``fn`` holding ``values`` at those paths."""
    made: dict[FunctionType, FunctionType] = {}

    def again(f: FunctionType, path: Path) -> FunctionType:
        if f not in made:
            cells = tuple(CellType() for _ in f.__closure__ or ())
            new = made[f] = FunctionType(f.__code__, dict(f.__globals__), f.__name__, None, cells or None)
            defaults, keywords = list(f.__defaults__ or ()), dict(f.__kwdefaults__ or {})
            for step, content in _held(f):
                below = (*path, step)
                value = again(content, below) if _is_followed(content) else values.get(below, content)
                kind, key = step
                if kind == "cell":
                    cells[key].cell_contents = value
                elif kind == "default":
                    defaults[key] = value
                elif kind == "keyword":
                    keywords[key] = value
                else:
                    new.__globals__[key] = value
            new.__defaults__, new.__kwdefaults__ = tuple(defaults) or None, keywords or None
        return made[f]

    return again(fn, ()) if isinstance(fn, FunctionType) and values else fn


def is_number(content: Any) -> bool:
    return isinstance(content, (int, float)) and not isinstance(content, bool)


def _is_constant(content: Any) -> bool:
    if isinstance(content, tuple):
        return all(_is_constant(c) or is_number(c) for c in content)
    return isinstance(content, _CONSTANTS)


def _is_plain(content: Any) -> bool:
    return isinstance(content, (Tensor, *_STEADY)) or is_number(content) or _is_constant(content)


def _is_followed(content: Any) -> bool:
    return isinstance(content, FunctionType) and (content.__module__ or "").split(".")[0] != "torch"


def _walk(fn: Any) -> Iterator[tuple[Path, Any]]:
    """(path, content) of everything held by ``fn`` and, each once, by the functions that it holds."""
    seen = {fn} if isinstance(fn, FunctionType) else set()

    def walk(f: FunctionType, path: Path) -> Iterator[tuple[Path, Any]]:
        for step, content in _held(f):
            below = (*path, step)
            yield below, content
            if _is_followed(content) and content not in seen:
                seen.add(content)
                yield from walk(content, below)

    return walk(fn, ()) if seen else iter(())


def _held(f: FunctionType) -> Iterator[tuple[tuple[str, Any], Any]]:
    for n, cell in enumerate(f.__closure__ or ()):
        try:
            yield ("cell", n), cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((("default", n), content) for n, content in enumerate(f.__defaults__ or ()))
    yield from ((("keyword", name), content) for name, content in (f.__kwdefaults__ or {}).items())
    yield from ((("global", name), f.__globals__[name]) for name in _global_names(f.__code__) if name in f.__globals__)


@lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """The globals that a function reads, and the functions written inside it."""
    names = {i.argval: None for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= dict.fromkeys(_global_names(inner))
    return tuple(names)


def _name(fn: Callable[..., Any], path: Path) -> str:
    *before, (step, key) = path
    owner = at(fn, tuple(before))
    code = owner.__code__
    if step == "default":
        key = code.co_varnames[code.co_argcount - len(owner.__defaults__) + key]
    return code.co_freevars[key] if step == "cell" else str(key)
