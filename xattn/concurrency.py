"""Locks that survive fork, and torch.func transforms that work inside kernels."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch


class ForkSafeLock:
    """A lock that is free in a forked child, whoever held it in the parent; ``reentrant`` as threading.RLock is."""

    def __init__(self, reentrant: bool = False) -> None:
        self._make: Any = threading.RLock if reentrant else threading.Lock
        self._lock = self._make()
        _locks.add(self)

    def renew(self) -> None:
        self._lock = self._make()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()  # a lock may go with its owner


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)


@contextlib.contextmanager
def transforms_enabled() -> Iterator[None]:
    """A context in which torch.func's transforms work inside a kernel.

    A kernel called below a dispatch mode (compiled code's first run, a flop counter) finds their dispatch keys
    excluded; here they are let in. Saved-tensor hooks, which the transforms refuse, do not see what a kernel computes.
    """
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (
        keys.FuncTorchBatched,
        keys.FuncTorchBatchedDecomposition,
        keys.FuncTorchVmapMode,
        keys.FuncTorchGradWrapper,
        keys.FuncTorchDynamicLayerFrontMode,
        keys.FuncTorchDynamicLayerBackMode,
    ):
        excluded = excluded - torch._C.DispatchKeySet(key)
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
