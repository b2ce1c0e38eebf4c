"""Loading and launching through the vendors' Python bindings, where the compiled launcher is not there."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch
from torch import Tensor

from .concurrency import ForkSafeLock
from .kernel_call import Call, filled, load_error

_lock = ForkSafeLock()

WORK_QUEUES = 4096  # that a kernel has; kQueues of csrc_cuda/arch/sm90/tiles.h, kWorkQueues of csrc_cuda/launcher
_STREAM_QUEUES = 512


class WorkQueues:
    """Numbers of work queues: one for each stream, and one for each launch that a graph captures, as nobody knows
    beside what it is replayed."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._streams: dict[tuple[int, int], int] = {}
        self._captured = _STREAM_QUEUES

    def number(self, device: int, stream: int | None) -> int:
        """Of a launch; ``stream``: its id, None while it captures. -1: none is left."""
        with self._lock:
            if stream is None:
                if self._captured == WORK_QUEUES:
                    return -1
                self._captured += 1
                return self._captured - 1
            known = self._streams.get((device, stream))
            if known is None and len(self._streams) < _STREAM_QUEUES:
                known = self._streams[device, stream] = len(self._streams)
            return -1 if known is None else known


class Cuda:
    """cuda-python's driver bindings."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._kernels: dict[tuple[str, str, int, int], Any] = {}
        self._queues = WorkQueues()

    def description(self) -> str:
        from importlib.metadata import version

        return f"cuda-python {version('cuda-bindings')}"

    def prepare(self, call: Call) -> PreparedCuda:
        key = (call.image.key, call.symbol, call.device.index, call.shape.shared_bytes)
        with _lock:
            if key not in self._kernels:
                with self.context(call.device.index):
                    self._kernels[key] = self._load(call)
        return PreparedCuda(self, self._kernels[key], call)

    @contextlib.contextmanager
    def context(self, index: int):
        """The device's primary context, current within it: a thread that torch has not used yet has none."""
        driver = self._driver
        _, current = driver.cuCtxGetCurrent()
        _, device = driver.cuDeviceGet(index)
        with torch.cuda.device(index):
            if int(current) == 0:
                torch.cuda.current_stream(index)
                _, context = driver.cuDevicePrimaryCtxRetain(device)
                driver.cuCtxSetCurrent(context)
            yield

    def queue(self, index: int, stream: int) -> int:
        """The number of a launch's work queue."""
        driver = self._driver
        if not hasattr(driver, "cuStreamGetId"):  # older than CUDA 12
            return -1
        status, capturing = driver.cuStreamIsCapturing(stream)
        if int(status) or int(capturing):
            return -1 if int(status) else self._queues.number(index, None)
        status, name = driver.cuStreamGetId(stream)
        return -1 if int(status) else self._queues.number(index, int(name))

    def _load(self, call: Call) -> Any:
        driver = self._driver
        (module,) = self.check(driver.cuModuleLoadData(call.image.code), "loading", call)
        name = call.symbol
        (kernel,) = self.check(driver.cuModuleGetFunction(module, name.encode()), f"finding kernel {name}", call)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        shared = call.shape.shared_bytes
        what = f"asking for {shared} bytes of shared memory"
        self.check(driver.cuFuncSetAttribute(kernel, attribute, shared), what, call)
        return kernel

    def check(self, result: tuple, what: str, call: Call) -> tuple:
        if int(result[0]) == 0:
            return result[1:]
        _, name = self._driver.cuGetErrorName(result[0])
        _, text = self._driver.cuGetErrorString(result[0])
        raise load_error(f"{what} failed: {name.decode()} ({text.decode()}) for {call.about()}")


class PreparedCuda:
    """A kernel and what a launch of it needs."""

    def __init__(self, bindings: Cuda, kernel: Any, call: Call):
        self._bindings, self._kernel, self._call = bindings, kernel, call

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        call, bindings = self._call, self._bindings
        made = filled(call, inputs)
        if made is None:
            return []
        outputs, params = made
        driver = bindings._driver
        stream = torch.cuda.current_stream(call.device).cuda_stream
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        s = call.shape
        with bindings.context(call.device.index):
            for m in call.maps:
                self._encode(m, (*inputs, *outputs)[m.tensor].data_ptr(), params)
            if call.queue is not None:
                number = ctypes.c_int32.from_address(ctypes.addressof(params) + call.queue)
                number.value = bindings.queue(call.device.index, stream)
            start, attributes = ctypes.addressof(arguments), self._attributes()
            if attributes:
                config = driver.CUlaunchConfig()
                config.gridDimX, config.gridDimY, config.gridDimZ = s.grid
                config.blockDimX, config.blockDimY, config.blockDimZ = s.block
                config.sharedMemBytes, config.hStream = s.shared_bytes, stream
                config.attrs, config.numAttrs = attributes, len(attributes)
                result = driver.cuLaunchKernelEx(config, self._kernel, start, 0)
            else:
                result = driver.cuLaunchKernel(self._kernel, *s.grid, *s.block, s.shared_bytes, stream, start, 0)
        blocks, threads = s.grid[0] * s.grid[1] * s.grid[2], s.block[0] * s.block[1] * s.block[2]
        what = f"launch of {blocks} blocks of {threads} threads, {s.shared_bytes} bytes of shared memory"
        bindings.check(result, what, call)
        return outputs

    def _attributes(self) -> list[Any]:
        driver, s = self._bindings._driver, self._call.shape
        ids = driver.CUlaunchAttributeID
        found = []
        if s.cluster != (1, 1, 1):
            a = driver.CUlaunchAttribute()
            a.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z = s.cluster
            found.append(a)
        if s.overlap:
            a = driver.CUlaunchAttribute()
            a.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            a.value.programmaticStreamSerializationAllowed = 1
            found.append(a)
        return found

    def _encode(self, m: Any, address: int, params: ctypes.Structure) -> None:
        driver = self._bindings._driver
        kinds = (driver.CUtensorMapDataType, driver.CUtensorMapSwizzle, driver.CUtensorMapL2promotion)
        numbers = (m.element, m.swizzle, m.l2_promotion)
        element, swizzle, promotion = (kind(n) for kind, n in zip(kinds, numbers, strict=True))
        rank = len(m.sizes)
        words = [
            [driver.cuuint64_t(n) for n in m.sizes],
            [driver.cuuint64_t(n) for n in m.strides[1:]],
            [driver.cuuint32_t(n) for n in m.box],
            [driver.cuuint32_t(1) for _ in range(rank)],
        ]
        interleave = driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
        fill = driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
        result = driver.cuTensorMapEncodeTiled(element, rank, address, *words, interleave, swizzle, promotion, fill)
        (made,) = self._bindings.check(result, "cuTensorMapEncodeTiled", self._call)
        ctypes.memmove(ctypes.addressof(params) + m.offset, int(made.getPtr()), 128)


class Hip:
    """hip-python. Not run on AMD hardware."""

    def __init__(self) -> None:
        from hip import hip

        self._hip = hip
        self._kernels: dict[tuple[str, str, int], Any] = {}
        self._queues = WorkQueues()

    def description(self) -> str:
        from importlib.metadata import version

        return f"hip-python {version('hip-python')}"

    def prepare(self, call: Call) -> PreparedHip:
        key = (call.image.key, call.symbol, call.device.index)
        with _lock:
            if key not in self._kernels:
                with torch.cuda.device(call.device.index):
                    module = self.check(self._hip.hipModuleLoadData(call.image.code), "loading", call)
                    found = self._hip.hipModuleGetFunction(module, call.symbol.encode())
                    self._kernels[key] = self.check(found, f"finding kernel {call.symbol}", call)
        return PreparedHip(self, self._kernels[key], call)

    def queue(self, index: int, stream: int) -> int:
        """The number of a launch's work queue. A handle may come again for another stream, so where HIP gives no id
        (ROCm 7.0 and older) only the default stream has one."""
        hip = self._hip
        status, capturing = hip.hipStreamIsCapturing(stream)
        if int(status) or int(capturing):
            return -1 if int(status) else self._queues.number(index, None)
        try:
            status, name = hip.hipStreamGetId(stream)
        except (AttributeError, RuntimeError):  # older bindings, or newer ones than the library
            return -1 if stream else self._queues.number(index, 0)
        return -1 if int(status) else self._queues.number(index, int(name))

    def check(self, result: tuple, what: str, call: Call) -> Any:
        if int(result[0]) == 0:
            return result[1] if len(result) > 1 else None
        name = getattr(result[0], "name", result[0])  # as text an IntEnum is its number
        raise load_error(f"{what} failed: {name} for {call.about()}")


class PreparedHip:
    """A kernel and what a launch of it needs."""

    def __init__(self, bindings: Hip, kernel: Any, call: Call):
        self._bindings, self._kernel, self._call = bindings, kernel, call

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        call, hip = self._call, self._bindings._hip
        made = filled(call, inputs)
        if made is None:
            return []
        outputs, params = made
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        s = call.shape
        stream = torch.cuda.current_stream(call.device).cuda_stream
        with torch.cuda.device(call.device.index):
            if call.queue is not None:
                number = ctypes.c_int32.from_address(ctypes.addressof(params) + call.queue)
                number.value = self._bindings.queue(call.device.index, stream)
            result = hip.hipModuleLaunchKernel(
                f=self._kernel,
                gridDimX=s.grid[0],
                gridDimY=s.grid[1],
                gridDimZ=s.grid[2],
                blockDimX=s.block[0],
                blockDimY=s.block[1],
                blockDimZ=s.block[2],
                sharedMemBytes=s.shared_bytes,
                stream=stream,
                kernelParams=ctypes.addressof(arguments),
                extra=None,
            )
        blocks, threads = s.grid[0] * s.grid[1] * s.grid[2], s.block[0] * s.block[1] * s.block[2]
        what = f"launch of {blocks} blocks of {threads} threads, {s.shared_bytes} bytes of shared memory"
        self._bindings.check(result, what, call)
        return outputs
