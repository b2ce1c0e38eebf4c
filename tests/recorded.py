"""A stand-in for graphs of a device, on the CPU: operations are recorded as they run, and replayed on the same tensors,
without any of the Python around them. Values may be read, as on the CPU they are, to be checked; what depends on them
is not read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, out))
        return out


def capture(forward: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """As ``DecodeGraph`` wants it. What ``forward`` returns is NaN until the first replay."""
    with _Recorder() as recorder:
        result = forward()
    result.fill_(torch.nan)

    def replay() -> None:
        for func, args, kwargs, out in recorder.done:
            given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)  # a view, or what was written in place, is there already

    return replay, result
