"""NVRTC libraries by version, side by side: each is opened by its path, whatever cuda-python would load."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from xattn.images import CONFIG_HEADER, Image, ImageSpec, sources
from xattn.jit import nvrtc_flags

# The packages that bring them, by major version.
PACKAGES = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}


def file_of(package: str, name: str) -> Path:
    """A file of an installed package, by the start of its name."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        raise FileNotFoundError(f"{package} is not installed: pip install 'xattn[test]'") from None
    found = sorted(f for f in files if f.name.startswith(name) and ".alt." not in f.name)
    if not found:
        raise FileNotFoundError(f"{package} holds no {name}")
    return Path(str(found[0].locate()))


class Library:
    """One NVRTC, through its C interface."""

    def __init__(self, major: int):
        self.library = ctypes.CDLL(str(file_of(PACKAGES[major], "libnvrtc.so")))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        numbers = [ctypes.c_int(), ctypes.c_int()]
        self._call("nvrtcVersion", *map(ctypes.byref, numbers))
        self.version = f"nvrtc {numbers[0].value}.{numbers[1].value}"

    def build(self, spec: ImageSpec) -> Image:
        """The image, with ptxas's log, or AssertionError with the compiler's."""
        texts = {**sources(spec.entry, spec.arch), CONFIG_HEADER: spec.header()}
        main = texts.pop(spec.entry)
        program, count = ctypes.c_void_p(), len(texts)
        strings = ctypes.c_char_p * count
        bodies, names = strings(*(t.encode() for t in texts.values())), strings(*(n.encode() for n in texts))
        created = (ctypes.byref(program), main.encode(), spec.entry.encode(), count, bodies, names)
        self._call("nvrtcCreateProgram", *created)
        try:
            flags = [f.encode() for f in nvrtc_flags(spec.arch)]
            status = self.library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
            log = self._text(program, "ProgramLog").rstrip(b"\0 ").decode()
            assert status == 0, f"{self.version} refused {spec.name()}:\n{log}"
            kind = "PTX" if spec.arch.startswith("compute_") else "CUBIN"
            code = self._text(program, kind)
            return Image(spec.key(), spec.arch, kind.lower(), spec.name(), self.version, code, log)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        assert status == 0, f"{name}: {self.library.nvrtcGetErrorString(status).decode()}"


@cache
def library(major: int) -> Library:
    return Library(major)
