"""Launching through the vendors' Python bindings, over stand-ins for them that note what they are asked for."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import sys
import types

import pytest
import torch

from xattn import launch, launch_bindings, launch_library
from xattn.images import Image
from xattn.kernel_call import Call, ImageRefused, LaunchError, Output, Shape, TensorMap


class Params(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("number", ctypes.c_int64),
        ("pad", ctypes.c_uint64 * 5),
        ("map", ctypes.c_uint64 * 16),
    )


def image(kind: str, key: str = "k", arch: str = "sm_80") -> Image:
    return Image(key, arch, kind, f"forward [test] for {arch}", "a compiler 1.0", b"code")


def call(kind: str, **changes) -> Call:
    given = {
        "image": image(kind),
        "symbol": "xattn_forward",
        "device": torch.device("cpu", 0),
        "shape": Shape((3, 2, 1), (128, 1, 1), 4096),
        "params": Params(number=7),
        "slots": (Params.q.offset,),
        "outputs": (Output(Params.out.offset, (2, 3), torch.float32),),
        "aligned": 1,
    }
    return Call(**(given | changes))


class Status(enum.IntEnum):
    """As hip-python's."""

    success = 0
    hipErrorInvalidValue = 1
    hipErrorNoBinaryForGpu = 209


@pytest.fixture
def seen(monkeypatch):
    """Stand-ins for torch's streams and for both bindings; what they saw."""
    log: list[tuple] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: types.SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())

    def note(name, *results):
        def function(*args, **kwargs):
            log.append((name, args, kwargs))
            return (Status(0), *results)

        return function

    def launched(name, address_of):
        def function(*args, **kwargs):
            address = ctypes.c_void_p.from_address(address_of(args, kwargs)).value
            log.append((name, args, kwargs, Params.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(Params)))))
            return (Status(0),)

        return function

    hip = types.ModuleType("hip.hip")
    hip.hipModuleLoadData = lambda code: note("load", "module")(code) if code != b"refuse" else (Status(209), None)
    hip.hipModuleGetFunction = note("function", "kernel")
    hip.hipModuleLaunchKernel = launched("launch", lambda args, kwargs: kwargs["kernelParams"])
    package = types.ModuleType("hip")
    package.hip = hip
    monkeypatch.setitem(sys.modules, "hip", package)
    monkeypatch.setitem(sys.modules, "hip.hip", hip)

    driver = pytest.importorskip("cuda.bindings.driver", reason="the test extra installs cuda-bindings")
    fakes = {
        "cuCtxGetCurrent": note("current", 0),
        "cuDeviceGet": note("device", 0),
        "cuDevicePrimaryCtxRetain": note("retain", 5),
        "cuCtxSetCurrent": note("set"),
        "cuModuleLoadData": lambda code: note("load", "module")(code) if code != b"refuse" else (Status(209), None),
        "cuModuleGetFunction": note("function", "kernel"),
        "cuFuncSetAttribute": note("attribute"),
        "cuLaunchKernel": launched("launch", lambda args, kwargs: args[9]),
        "cuLaunchKernelEx": launched("launch ex", lambda args, kwargs: args[2]),
        "cuGetErrorName": lambda status: (0, b"CUDA_ERROR_NO_BINARY_FOR_GPU"),
        "cuGetErrorString": lambda status: (0, b"no kernel image"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(driver, name, fake)
    return log


@pytest.mark.parametrize("bindings, kind", [(launch_bindings.Cuda, "cubin"), (launch_bindings.Hip, "hsaco")])
def test_addresses_and_shape_reach_the_kernel(seen, bindings, kind):
    launcher = bindings()
    prepared = launcher.prepare(call(kind))
    q = torch.zeros(64)
    (out,) = prepared([q])
    entry = next(e for e in seen if e[0] == "launch")
    params = entry[3]
    assert (params.q, params.out, params.number) == (q.data_ptr(), out.data_ptr(), 7)
    assert out.shape == (2, 3) and out.dtype == torch.float32
    numbers = [*entry[1], *entry[2].values()]
    for number in (3, 2, 128, 4096, 77):
        assert number in numbers
    assert prepared([torch.zeros(65)[1:]]) == []
    launcher.prepare(call(kind))
    assert sum(e[0] == "load" for e in seen) == 1


@pytest.mark.parametrize("bindings, kind", [(launch_bindings.Cuda, "cubin"), (launch_bindings.Hip, "hsaco")])
def test_a_refused_image_is_named(seen, bindings, kind):
    refused = Image("r", "sm_80", kind, "forward [test] for sm_80", "a compiler 1.0", b"refuse")
    with pytest.raises(ImageRefused, match=r"loading failed: .*forward \[test\] for sm_80, compiled by a compiler 1.0"):
        bindings().prepare(call(kind, image=refused))


class HipStreams:
    """Streams by their handles: 0 is the default one."""

    def __init__(self, ids: dict[int, int] | None, capturing: bool = False):
        self._ids, self._capturing = ids, capturing

    def hipStreamIsCapturing(self, stream):
        return Status(0), int(self._capturing)

    def hipStreamGetId(self, stream):
        if self._ids is None:
            raise RuntimeError("libamdhip64.so has no symbol hipStreamGetId")
        return Status(0), self._ids[stream]


def test_work_queues_on_hip(seen):
    """One for each stream and for each captured launch; where HIP gives no ids, only the default stream has one."""
    hip = launch_bindings.Hip()
    hip._hip = HipStreams({0: 4, 77: 9})
    first, second = hip.queue(0, 0), hip.queue(0, 77)
    assert first >= 0 and second >= 0 and first != second and hip.queue(0, 0) == first
    hip._hip = HipStreams({}, capturing=True)
    captured = {hip.queue(0, 77), hip.queue(0, 77)}
    assert len(captured | {first, second}) == 4
    hip = launch_bindings.Hip()
    hip._hip = HipStreams(None)
    assert hip.queue(0, 0) == 0 and hip.queue(1, 0) == 1 and hip.queue(0, 77) == -1


def test_the_queue_reaches_the_kernel_on_hip(seen):
    hip = launch_bindings.Hip()
    streams = HipStreams({77: 9})
    hip._hip.hipStreamIsCapturing, hip._hip.hipStreamGetId = streams.hipStreamIsCapturing, streams.hipStreamGetId
    q = torch.zeros(64)
    for expected in (0, 0):
        hip.prepare(call("hsaco", params=Params(number=-7), queue=Params.number.offset))([q])
        params = [e for e in seen if e[0] == "launch"][-1][3]
        assert params.number & 0xFFFFFFFF == expected and params.q == q.data_ptr()


def test_cluster_and_tensor_maps_on_cuda(seen, monkeypatch):
    from cuda.bindings import driver

    encoded = []

    class Made:
        def __init__(self):
            self.words = (ctypes.c_uint64 * 16)(*range(100, 116))

        def getPtr(self):
            return ctypes.addressof(self.words)

    def encode(*args):
        encoded.append(args)
        return (0, Made())

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    maps = (TensorMap(Params.map.offset, 0, 9, (64, 8), (2, 128), (64, 8), 3, 3),)
    shape = Shape((2, 1, 1), (128, 1, 1), 0, cluster=(2, 1, 1), overlap=True)
    q = torch.zeros(64)
    launch_bindings.Cuda().prepare(call("cubin", maps=maps, shape=shape))([q])
    entry = next(e for e in seen if e[0] == "launch ex")
    assert entry[1][0].numAttrs == 2 and list(entry[3].map) == list(range(100, 116))
    assert encoded[0][1:3] == (2, q.data_ptr())


def test_which_launcher_is_taken(monkeypatch):
    monkeypatch.setattr(launch, "_chosen", {})
    monkeypatch.setattr(launch_library, "find", lambda: None)
    monkeypatch.setattr(launch_library, "missing", lambda: "it is not there")
    with launch.using("bindings"):
        assert isinstance(launch.launcher(), launch_bindings.Cuda)
    assert isinstance(launch.launcher(), launch_bindings.Cuda)
    with launch.using("library"), pytest.raises(LaunchError, match="it is not there"):
        launch.launcher()
    assert "cuda-python" in launch.description()


def test_the_next_image_is_taken_where_the_driver_refuses_one(monkeypatch):
    class Picky:
        def prepare(self, call):
            if call.image.key != "third":
                raise ImageRefused(call.image.key)
            return call

    monkeypatch.setattr(launch, "launcher", Picky)
    following = {"k": "second", "second": "third"}
    other = lambda refused: image("cubin", following[refused.key])  # noqa: E731
    assert launch.prepare(call("cubin", other_image=other)).image.key == "third"
    with pytest.raises(ImageRefused):
        launch.prepare(call("cubin"))
