"""NVRTC of CUDA 12.9 (the Python wheel nvidia-cuda-nvrtc-cu12) in the form of cuda-python's bindings, which load only
the NVRTC of their own CUDA version."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger("xattn")

_LIBRARY = "libnvrtc.so.12"


@lru_cache(maxsize=1)
def library() -> Library:
    """The library, loaded once. OSError where it is not there."""
    _let_bindings_load_theirs()
    return Library(_path())


def _let_bindings_load_theirs() -> None:
    """cuda-python takes an NVRTC of any version that is in the process already: its own must come first."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # they are not there, or their library is not
        log.debug("cuda-python has no NVRTC: %r", error)


def _path() -> str:
    """The wheel's file, else what the system's loader finds."""
    try:
        found = find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        found = None
    places = [Path(p, "lib", _LIBRARY) for p in (found and found.submodule_search_locations) or ()]
    return next((str(p) for p in places if p.is_file()), _LIBRARY)


class Library:
    """The functions that a compilation needs: each returns a status (0: success), then its results."""

    def __init__(self, path: str):
        self._c = ctypes.CDLL(path)

    def nvrtcVersion(self) -> tuple[int, int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        return self._c.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), major.value, minor.value

    def nvrtcGetSupportedArchs(self) -> tuple[int, list[int]]:
        count = ctypes.c_int()
        if status := self._c.nvrtcGetNumSupportedArchs(ctypes.byref(count)):
            return status, []
        numbers = (ctypes.c_int * count.value)()
        return self._c.nvrtcGetSupportedArchs(numbers), list(numbers)

    def nvrtcCreateProgram(
        self, source: bytes, name: bytes, count: int, headers: Sequence[bytes], names: Sequence[bytes]
    ) -> tuple[int, ctypes.c_void_p]:
        program, strings = ctypes.c_void_p(), ctypes.c_char_p * count
        status = self._c.nvrtcCreateProgram(
            ctypes.byref(program), source, name, count, strings(*headers), strings(*names)
        )
        return status, program

    def nvrtcCompileProgram(self, program: ctypes.c_void_p, count: int, flags: Sequence[bytes]) -> tuple[int]:
        return (self._c.nvrtcCompileProgram(program, count, (ctypes.c_char_p * count)(*flags)),)

    def nvrtcDestroyProgram(self, program: ctypes.c_void_p) -> tuple[int]:
        return (self._c.nvrtcDestroyProgram(ctypes.byref(program)),)

    def nvrtcGetProgramLogSize(self, program: ctypes.c_void_p) -> tuple[int, int]:
        return self._size(self._c.nvrtcGetProgramLogSize, program)

    def nvrtcGetProgramLog(self, program: ctypes.c_void_p, into: bytes) -> tuple[int]:
        return (self._c.nvrtcGetProgramLog(program, into),)

    def nvrtcGetCUBINSize(self, program: ctypes.c_void_p) -> tuple[int, int]:
        return self._size(self._c.nvrtcGetCUBINSize, program)

    def nvrtcGetCUBIN(self, program: ctypes.c_void_p, into: bytes) -> tuple[int]:
        return (self._c.nvrtcGetCUBIN(program, into),)

    def nvrtcGetPTXSize(self, program: ctypes.c_void_p) -> tuple[int, int]:
        return self._size(self._c.nvrtcGetPTXSize, program)

    def nvrtcGetPTX(self, program: ctypes.c_void_p, into: bytes) -> tuple[int]:
        return (self._c.nvrtcGetPTX(program, into),)

    @staticmethod
    def _size(function: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> tuple[int, int]:
        size = ctypes.c_size_t()
        return function(program, ctypes.byref(size)), size.value
