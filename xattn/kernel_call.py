"""What a launch is told: an image, a shape, a parameter block, and where the tensors' addresses go in it.

Plain data, for whatever launches it (launch.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .images import Image


class LaunchError(RuntimeError):
    """The driver refused to load or launch an image. The message names the call, the image and its architecture."""


class ImageRefused(LaunchError):
    """The driver refused to load an image: it is of another architecture, or of a newer compiler than the driver."""


@dataclass(frozen=True)
class Shape:
    """Blocks and threads of a launch. ``overlap``: the kernel may start before the one ahead of it in the stream has
    ended."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cluster: tuple[int, int, int] = (1, 1, 1)
    overlap: bool = False


@dataclass(frozen=True)
class TensorMap:
    """How a kernel sees a tensor through the tensor memory accelerator: the arguments of cuTensorMapEncodeTiled,
    innermost dimension first.

    ``offset``: of the descriptor in the parameter block; ``tensor``: its number, inputs first, then outputs;
    ``strides`` in bytes, the first the size of an element.
    """

    offset: int
    tensor: int
    element: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    l2_promotion: int


@dataclass(frozen=True)
class Output:
    """A dense tensor that the call allocates; its address goes to ``offset`` of the parameter block."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """A launch without its tensors. ``slots``: the offsets in ``params`` where the addresses of the inputs go.

    ``aligned``: so many of the first inputs must lie at multiples of 16 bytes. ``other_image``: gives the image to load
    instead of one that the driver refused. ``queue``: the offset in ``params`` of the number of a work queue, which is
    the same only for launches that never overlap; -1 where there is none.
    """

    image: Image
    symbol: str
    device: torch.device
    shape: Shape
    params: ctypes.Structure
    slots: tuple[int, ...]
    outputs: tuple[Output, ...]
    aligned: int = 0
    other_image: Callable[[Image], Image] | None = None
    maps: tuple[TensorMap, ...] = ()
    queue: int | None = None

    def about(self) -> str:
        """The image, for messages."""
        return f"{self.image.name}, compiled by {self.image.compiler}"


class Prepared(Protocol):
    """A call whose image is loaded."""

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Launches on torch's current stream of the call's device, whatever the current device is, and returns the
        outputs; none where an input is not aligned as the call needs it."""


def slot(params: type[ctypes.Structure], name: str) -> int:
    """The offset of the address that belongs to a field: the field's own, or that of its ``data``."""
    return int(getattr(params, name).offset)


# What to do about an error of the driver, by what its message holds. The first two rows: the image is refused.
_ADVICE = (
    (
        ("NO_BINARY_FOR_GPU", "INVALID_IMAGE", "INVALID_PTX", "UNSUPPORTED_PTX_VERSION"),
        "the image needs a driver at least as new as its compiler, or another architecture: update the driver, or "
        "install a compiler as old as it (pip install 'xattn[cuda12]')",
    ),
    (
        ("hipErrorNoBinaryForGpu", "hipErrorInvalidImage", "hipErrorInvalidDeviceFunction"),
        "the image is for another architecture than this device, or of a newer compiler than this ROCm: update ROCm, "
        "or compile with its own HIPRTC (pip install 'xattn[rocm]')",
    ),
    (("OUT_OF_MEMORY", "hipErrorOutOfMemory"), "free memory on the device: the image itself found no room"),
    (
        ("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "LAUNCH_FAILED"),
        "a kernel launched before this one failed: set CUDA_LAUNCH_BLOCKING=1 to see which",
    ),
    (
        ("hipErrorIllegalAddress", "hipErrorLaunchFailure"),
        "a kernel launched before this one failed: set AMD_SERIALIZE_KERNEL=3 to see which",
    ),
    (
        ("hipErrorNoDevice", "hipErrorInvalidDevice"),
        "HIP sees no such GPU: look at rocminfo, at HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and whether this "
        "user may open /dev/kfd",
    ),
    (
        ("OUT_OF_RESOURCES", "INVALID_VALUE", "hipErrorInvalidValue", "hipErrorInvalidConfiguration"),
        "the kernel wants more registers or shared memory than this device has: please report it",
    ),
)


def load_error(message: str) -> LaunchError:
    """The error for an image that could not be loaded, by what the driver said."""
    refused = any(name in message for names, _ in _ADVICE[:2] for name in names)
    return (ImageRefused if refused else LaunchError)(advised(message))


def advised(message: str) -> str:
    """The message with what to do about it."""
    for names, advice in _ADVICE:
        if any(name in message for name in names):
            return f"{message}; {advice}"
    return message


def filled(call: Call, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Any] | None:
    """For launchers in Python: the outputs, allocated, and a copy of the parameter block with every address in it; None
    where an input is not aligned."""
    if any(t.data_ptr() % 16 for t in inputs[: call.aligned]):
        return None
    outputs = [torch.empty(o.shape, dtype=o.dtype, device=call.device) for o in call.outputs]
    params = type(call.params).from_buffer_copy(call.params)
    start = ctypes.addressof(params)
    for offset, t in zip((*call.slots, *(o.offset for o in call.outputs)), (*inputs, *outputs), strict=True):
        ctypes.c_void_p.from_address(start + offset).value = t.data_ptr()
    return outputs, params
