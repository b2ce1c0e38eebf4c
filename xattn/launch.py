"""Launches kernels: the only module that does, through the compiled launcher where it is there, and otherwise through
cuda-python or hip-python.

A backend describes a ``Call`` (kernel_call.py); ``prepare`` loads its image and returns a ``Prepared``, which can be
launched again and again with other tensors of the same shapes and strides. Nothing here synchronises.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch

from . import launch_bindings, launch_library
from .device import vendor_of_torch
from .kernel_call import Call, ImageRefused, LaunchError, Prepared

log = logging.getLogger("xattn")


class Launcher(Protocol):
    """One way to load and launch."""

    def prepare(self, call: Call) -> Prepared: ...

    def description(self) -> str: ...


_chosen: dict[str, Launcher] = {}
_forced = threading.local()


def launcher() -> Launcher:
    """What launches here: the compiled launcher, else the vendor's Python bindings."""
    name = getattr(_forced, "name", "")
    if name not in _chosen:
        _chosen[name] = _choose(name)
    return _chosen[name]


def _choose(name: str) -> Launcher:
    if name != "bindings":
        library = launch_library.find()
        if library is not None:
            return library
        if name == "library":
            raise LaunchError(f"the compiled launcher is not installed: {launch_library.missing()}")
    return launch_bindings.Hip() if vendor_of_torch(torch) == "amd" else launch_bindings.Cuda()


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Within it, this thread launches by "library" (the compiled launcher) or "bindings" (cuda-python, hip-python)."""
    before = getattr(_forced, "name", "")
    _forced.name = name
    try:
        yield
    finally:
        _forced.name = before


def prepare(call: Call) -> Prepared:
    """Loads the image of a call on its device, once. Where the driver refuses it and the call names another, that one.

    Raises ImageRefused.
    """
    chosen = launcher()
    try:
        return chosen.prepare(call)
    except ImageRefused as error:
        if call.other_image is None:
            raise
        log.warning("%s; another image is tried", error)
        return chosen.prepare(replace(call, image=call.other_image(), other_image=None))


def description() -> str:
    """Which launcher this process would use, in words."""
    return launcher().description()
