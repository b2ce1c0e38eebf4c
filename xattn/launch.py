"""Loads images and launches kernels: the only module that does. On NVIDIA through cuda-python's driver bindings."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from .images import Image

_functions: dict[tuple[str, int], Any] = {}
_lock = threading.Lock()


class LaunchError(RuntimeError):
    """The driver refused to load or launch an image."""


def launch(
    image: Image,
    symbol: str,
    device: torch.device,
    blocks: int,
    threads: int,
    shared_bytes: int,
    params: ctypes.Structure,
) -> None:
    """Launches ``symbol`` of a CUDA image on torch's current stream of ``device``, whatever the current device is.

    The parameter block is copied by the driver before this returns. Nothing is synchronised.
    """
    from cuda.bindings import driver

    index = device.index if device.index is not None else torch.cuda.current_device()
    stream = torch.cuda.current_stream(
        index
    ).cuda_stream  # this also makes sure that the device's primary context exists
    with torch.cuda.device(index):
        _enter_context(driver, index)
        function = _function(driver, image, symbol, index, shared_bytes)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        result = driver.cuLaunchKernel(
            function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.addressof(arguments), 0
        )
    _check(
        driver, result, f"launch of {blocks} blocks of {threads} threads, {shared_bytes} bytes of shared memory", image
    )


def _function(driver: Any, image: Image, symbol: str, index: int, shared_bytes: int) -> Any:
    key = (image.key, index)
    found = _functions.get(key)
    if found is None:
        with _lock:
            (module,) = _check(driver, driver.cuModuleLoadData(image.code), "loading", image)
            (found,) = _check(driver, driver.cuModuleGetFunction(module, symbol.encode()), f"finding {symbol}", image)
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            what = f"asking for {shared_bytes} bytes of shared memory"
            _check(driver, driver.cuFuncSetAttribute(found, attribute, shared_bytes), what, image)
            _functions[key] = found
    return found


def _enter_context(driver: Any, index: int) -> None:
    """A thread that torch has not used yet has no current context: give it the device's primary one."""
    _, current = driver.cuCtxGetCurrent()
    if int(current) == 0:
        _, device = driver.cuDeviceGet(index)
        _, context = driver.cuDevicePrimaryCtxRetain(device)
        driver.cuCtxSetCurrent(context)


def _check(driver: Any, result: tuple, what: str, image: Image) -> tuple:
    error = result[0]
    if int(error) == 0:
        return result[1:]
    _, name = driver.cuGetErrorName(error)
    _, text = driver.cuGetErrorString(error)
    advice = ""
    if name in (b"CUDA_ERROR_NO_BINARY_FOR_GPU", b"CUDA_ERROR_INVALID_PTX", b"CUDA_ERROR_UNSUPPORTED_PTX_VERSION"):
        advice = (
            f"; the image was made by {image.compiler} for {image.arch}: it needs a driver as new, or that architecture"
        )
    raise LaunchError(f"{what} failed: {name.decode()} ({text.decode()}) for {image.name}{advice}")
