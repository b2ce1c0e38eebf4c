"""What several scenarios launch, and how they tell an error. To be imported once the stand-in driver is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from xattn.images import Image
from xattn.kernel_call import Call, LaunchError, Shape


class MapParams(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("pad", ctypes.c_uint64 * 7), ("map", ctypes.c_uint64 * 16))


def image_of(vendor: str, code: bytes, key: str = "host") -> Image:
    arch, kind = ("sm_80", "cubin") if vendor == "nvidia" else ("gfx942", "hsaco")
    return Image(key, arch, kind, f"forward [test] for {arch}", "a compiler 1.0", code)


def queued_call(image: Image) -> Call:
    """It writes the number of its work queue, and what lies behind it, into its one tensor."""
    shape = Shape((1, 1, 1), (1, 1, 1), 0)
    place = torch.device("cpu")
    return Call(image, "xattn_copy_map", place, shape, MapParams(), (0,), (), 0, queue=MapParams.map.offset)


def error(function: Callable[[], object]) -> str:
    try:
        function()
    except (LaunchError, RuntimeError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""
