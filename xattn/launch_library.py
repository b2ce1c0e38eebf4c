"""The compiled launcher (csrc_cuda/launcher): found beside the package's modules and opened once."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .concurrency import ForkSafeLock
from .kernel_call import Call, LaunchError, advised, load_error

NAME = "libxattn_launcher.so"
_U32, _S32, _U64, _S64, _PTR, _STR = (
    ctypes.c_uint32,
    ctypes.c_int32,
    ctypes.c_uint64,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_char_p,
)


class _Shape(ctypes.Structure):
    _fields_ = (
        ("grid", _U32 * 3),
        ("block", _U32 * 3),
        ("cluster", _U32 * 3),
        ("shared_bytes", _U32),
        ("overlap", _U32),
    )


class _TensorMap(ctypes.Structure):
    _fields_ = (
        ("offset", _U32),
        ("tensor", _U32),
        ("element", _U32),
        ("rank", _U32),
        ("sizes", _U64 * 5),
        ("strides", _U64 * 5),
        ("box", _U32 * 5),
        ("swizzle", _U32),
        ("l2_promotion", _U32),
    )


class _Slot(ctypes.Structure):
    _fields_ = (("offset", _U32), ("tensor", _U32))


class _Output(ctypes.Structure):
    _fields_ = (("dtype", _S32), ("rank", _U32), ("sizes", _S64 * 4))


class _Description(ctypes.Structure):
    """CallDescription of csrc_cuda/launcher/calls.h."""

    _fields_ = (
        ("vendor", _U32),
        ("device", _S32),
        ("device_type", _S32),
        ("num_inputs", _U32),
        ("num_slots", _U32),
        ("num_maps", _U32),
        ("num_outputs", _U32),
        ("param_bytes", _U32),
        ("image_bytes", _U64),
        ("shape", _Shape),
        ("aligned_inputs", _U32),
        ("queue_offset", _S32),
        ("image", _PTR),
        ("key", _STR),
        ("symbol", _STR),
        ("about", _STR),
        ("params", _PTR),
        ("slots", _PTR),
        ("maps", _PTR),
        ("outputs", _PTR),
    )


# torch's numbers of dtypes and device types, which its stable C functions use.
_DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.float8_e5m2fnuz: 25,
    torch.float8_e4m3fnuz: 26,
}
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}

_lock = ForkSafeLock()
_opened: dict[str, Any] = {}


def _package_path() -> list[str]:
    return list(sys.modules[__package__ or "xattn"].__path__)


def path() -> Path | None:
    """Where the library is: along the package's path, which in an editable installation has several parts."""
    return next((p for part in _package_path() if (p := Path(part) / NAME).is_file()), None)


def missing() -> str:
    """Why it cannot be used, in words; "" where it can."""
    find()
    return str(_opened.get("missing", ""))


def find() -> Library | None:
    """The library, opened and its op registered, or None."""
    with _lock:
        if "library" not in _opened:
            try:
                _opened["library"] = _open()
            except OSError as error:
                _opened["library"], _opened["missing"] = None, str(error)
        return _opened["library"]


def _open() -> Library:
    found = path()
    if found is None:
        folders = ", ".join(_package_path())
        raise OSError(f"{NAME} is not in {folders}: no C++ compiler was there at installation")
    return Library(found)


class Library:
    """The launcher's C functions and its op."""

    def __init__(self, at: Path):
        self.path = at
        self._functions = ctypes.CDLL(str(at))
        for name in ("xattn_register", "xattn_prepare", "xattn_description_bytes"):
            getattr(self._functions, name).restype = _S64
        self._functions.xattn_prepare.argtypes = [_PTR, _PTR, _U64]
        self._functions.xattn_forget.argtypes = [_S64]
        self._functions.xattn_forget.restype = None
        if self._functions.xattn_description_bytes() != ctypes.sizeof(_Description):
            raise OSError(f"{at} was built from other sources than this package: install xattn anew")
        message = ctypes.create_string_buffer(1024)
        if self._functions.xattn_register(message, ctypes.c_uint64(len(message))) < 0:
            raise OSError(f"{at}: {message.value.decode()}")
        self.launch = torch.ops.xattn.launch.default

    def description(self) -> str:
        return f"the compiled launcher {self.path}"

    def prepare(self, call: Call) -> PreparedHere:
        slots = (*call.slots, *(o.offset for o in call.outputs))
        slot_array = (_Slot * len(slots))(*(_Slot(offset, n) for n, offset in enumerate(slots)))
        maps = (_TensorMap * len(call.maps))(
            *(
                _TensorMap(
                    m.offset, m.tensor, m.element, len(m.sizes), m.sizes, m.strides, m.box, m.swizzle, m.l2_promotion
                )
                for m in call.maps
            )
        )
        outputs = (_Output * len(call.outputs))(
            *(_Output(_DTYPES[o.dtype], len(o.shape), o.shape) for o in call.outputs)
        )
        s = call.shape
        description = _Description(
            vendor=1 if call.image.kind == "hsaco" else 0,
            device=call.device.index or 0,
            device_type=_DEVICE_TYPES[call.device.type],
            num_inputs=len(call.slots),
            num_slots=len(slots),
            num_maps=len(maps),
            num_outputs=len(outputs),
            param_bytes=ctypes.sizeof(call.params),
            image_bytes=len(call.image.code),
            shape=_Shape(s.grid, s.block, s.cluster, s.shared_bytes, s.overlap),
            aligned_inputs=(1 << call.aligned) - 1,
            queue_offset=-1 if call.queue is None else call.queue,
            image=ctypes.cast(ctypes.c_char_p(call.image.code), _PTR),
            key=call.image.key.encode(),
            symbol=call.symbol.encode(),
            about=call.about().encode(),
            params=ctypes.addressof(call.params),
            slots=ctypes.addressof(slot_array),
            maps=ctypes.addressof(maps),
            outputs=ctypes.addressof(outputs),
        )
        message = ctypes.create_string_buffer(4096)
        handle = self._functions.xattn_prepare(ctypes.addressof(description), message, len(message))
        if handle < 0:
            raise load_error(f"{message.value.decode()} for {call.about()}")
        return PreparedHere(self, handle)

    def forget(self, handle: int) -> None:
        self._functions.xattn_forget(handle)


class PreparedHere:
    """A handle of the launcher's; forgotten with this object."""

    def __init__(self, library: Library, handle: int):
        self._library, self._handle, self._launch = library, handle, library.launch

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        try:
            return self._launch(self._handle, inputs)
        except RuntimeError as error:
            raise LaunchError(advised(str(error))) from None

    def __del__(self) -> None:
        self._library.forget(self._handle)
