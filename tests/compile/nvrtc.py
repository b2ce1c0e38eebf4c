"""NVRTC libraries by version, side by side: each is opened by its path, whatever cuda-python would load."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from xattn import jit, nvrtc12
from xattn.images import Image, ImageSpec

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


class Library(jit.Nvrtc):
    """One NVRTC, as the package compiles with it."""

    def __init__(self, major: int):
        self._functions = nvrtc12.Library(str(file_of(PACKAGES[major], "libnvrtc.so")))

    def library(self) -> nvrtc12.Library:
        return self._functions

    def build(self, spec: ImageSpec) -> Image:
        """The image, with ptxas's log; CompileError with the compiler's."""
        return jit.build(spec, self)


@cache
def library(major: int) -> Library:
    return Library(major)
