"""Launches kernels: the only module that does, through the compiled launcher where it is there, and otherwise through
cuda-python or hip-python.

A backend describes a ``Call`` (kernel_call.py); ``prepare`` loads its image and returns a ``Prepared``, which can be
launched again and again with other tensors of the same shapes and strides. Nothing here synchronises.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch

from . import launch_bindings, launch_library
from .capability import installed
from .device import vendor_of_torch
from .kernel_call import Call, ImageRefused, LaunchError, Prepared


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
    """Loads the image of a call on its device, once; where the driver refuses it, the next one that the call names.

    Raises LaunchError; UnsupportedError or CompileError where no other image is to be had.
    """
    chosen = launcher()
    while True:
        try:
            return chosen.prepare(call)
        except ImageRefused:
            if call.other_image is None:
                raise
            call = replace(call, image=call.other_image(call.image))


def missing() -> str:
    """What is not there to launch anything, in words; "" where something is."""
    amd = vendor_of_torch(torch) == "amd"
    if launch_library.find() is not None or installed("hip" if amd else "cuda.bindings"):
        return ""
    extras = "'xattn[rocm]'" if amd else "'xattn[cuda13]' or 'xattn[cuda12]', as your torch is"
    return f"{launch_library.missing()}; nor are the vendor's Python bindings there: pip install {extras}"


def description() -> str:
    """Which launcher this process would use, in words."""
    return launcher().description()
