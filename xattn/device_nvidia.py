"""NVIDIA GPUs through NVML, with ctypes alone: no Python binding is needed, no CUDA call is made, no context appears.

NVML is the management library of the driver (libnvidia-ml.so.1); it is initialised and shut down within one probe, so
a process may fork afterwards. Facts that NVML does not tell (cores per SM, shared memory) are rows of data here.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MIN_CUDA = (12, 0)
MIN_DRIVER = "525.60.13"  # the first driver of CUDA 12.0 on Linux (CUDA Toolkit release notes, table 3)
LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"


class Arch(NamedTuple):
    """What an architecture fixes, and one board that stands for it."""

    cores_per_sm: int  # FP32 cores: _ConvertSMVer2Cores in helper_cuda.h of NVIDIA's cuda-samples
    smem_kib: int  # largest opt-in shared memory of a block: CUDA programming guide, "Compute Capabilities"
    board: str
    sm_count: int
    memory_gib: int


ARCHS = {
    "sm_70": Arch(64, 96, "NVIDIA V100", 80, 32),
    "sm_75": Arch(64, 64, "NVIDIA T4", 40, 16),
    "sm_80": Arch(64, 163, "NVIDIA A100", 108, 80),
    "sm_86": Arch(128, 99, "NVIDIA RTX A6000", 84, 48),
    "sm_87": Arch(128, 163, "NVIDIA Jetson AGX Orin", 16, 64),
    "sm_89": Arch(128, 99, "NVIDIA L40S", 142, 48),
    "sm_90": Arch(128, 227, "NVIDIA H100", 132, 80),
    "sm_100": Arch(128, 227, "NVIDIA B200", 148, 180),
    "sm_103": Arch(128, 227, "NVIDIA B300", 148, 270),
    "sm_110": Arch(128, 227, "NVIDIA Jetson AGX Thor", 20, 128),
    "sm_120": Arch(128, 99, "NVIDIA GeForce RTX 5090", 170, 32),
    "sm_121": Arch(128, 99, "NVIDIA GB10", 48, 128),
}


def smem_bytes(arch: str) -> int:
    """Largest opt-in shared memory of a block, 0 for an architecture that is not in the table."""
    return ARCHS[arch].smem_kib * 1024 if arch in ARCHS else 0


class NvmlError(Exception):
    """A call that NVML refused, or that this driver's NVML does not have (``code`` is then None)."""

    def __init__(self, function: str, code: int | None, text: str) -> None:
        super().__init__(f"{function}: {text}")
        self.function = function
        self.code = code


class _Memory(ctypes.Structure):  # nvmlMemory_t, bytes
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Attributes(ctypes.Structure):  # nvmlDeviceAttributes_t; answered for MIG devices only
    _fields_ = (
        ("multiprocessors", ctypes.c_uint),
        ("engines", ctypes.c_uint * 5),
        ("gpu_slices", ctypes.c_uint),
        ("compute_slices", ctypes.c_uint),
        ("memory_mib", ctypes.c_ulonglong),
    )


@dataclass
class _Gpu:
    """A physical GPU: the fields of its Device, its core count, and its MIG instances where MIG is on."""

    fields: dict[str, Any]
    cores: int = 0
    mig: bool = False
    instances: list[dict[str, Any]] = field(default_factory=list)


class _Nvml:
    """The few calls that are needed, each raising NvmlError instead of returning a code."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, function: str, *args: Any) -> None:
        try:
            code = getattr(self._library, function)(*args)
        except AttributeError:
            raise NvmlError(function, None, "this driver does not have it") from None
        if code != 0:
            raise NvmlError(function, code, self._error_text(code))

    def _error_text(self, code: int) -> str:
        try:
            describe = self._library.nvmlErrorString
        except AttributeError:
            return f"error {code}"
        describe.restype = ctypes.c_char_p
        return f"{(describe(code) or b'unknown').decode(errors='replace')} (error {code})"

    def number(self, function: str, *args: Any) -> int:
        value = ctypes.c_uint()
        self.call(function, *args, ctypes.byref(value))
        return value.value

    def text(self, function: str, *args: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        self.call(function, *args, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode(errors="replace")

    def handle(self, function: str, *args: Any) -> ctypes.c_void_p:
        value = ctypes.c_void_p()
        self.call(function, *args, ctypes.byref(value))
        return value


def probe(visible: Mapping[str, str], library: ctypes.CDLL | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """The fields of a Device for each visible NVIDIA GPU, in CUDA's order, and notes on what is missing or broken.

    ``visible`` holds CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER as far as they are set; ``library`` replaces the
    system's NVML.
    """
    try:
        nvml = _Nvml(library or ctypes.CDLL(LIBRARY))
    except OSError:
        return [], [f"no NVIDIA driver: {LIBRARY} not found"]
    try:
        nvml.call("nvmlInit_v2")
    except NvmlError as error:
        return [], [_init_note(error)]
    try:
        return _probe(nvml, visible)
    except NvmlError as error:
        return [], [f"NVIDIA driver does not answer: {error}"]
    finally:
        with contextlib.suppress(NvmlError):  # what was learnt stands
            nvml.call("nvmlShutdown")


def _init_note(error: NvmlError) -> str:
    """Why NVML did not start, in words, with what to do. Codes: nvmlReturn_t in nvml.h."""
    hints = {
        None: f"NVIDIA driver too old: needs {MIN_DRIVER} or newer",
        9: "NVIDIA driver library found, but the kernel module is not loaded",
        18: "NVIDIA driver updated while loaded: library and kernel module differ in version; reload it or reboot",
    }
    return f"{hints.get(error.code, 'NVIDIA driver failed to start')} ({error})"


def _probe(nvml: _Nvml, visible: Mapping[str, str]) -> tuple[list[dict[str, Any]], list[str]]:
    notes: list[str] = []
    driver, runtime = _versions(nvml, notes)
    gpus = _gpus(nvml, {"driver": driver, "runtime": runtime}, notes)
    gpus = _cuda_order(gpus, visible.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST"), notes)
    devices = select(gpus, visible.get("CUDA_VISIBLE_DEVICES"))
    if gpus and not devices and "CUDA_VISIBLE_DEVICES" in visible:
        notes.append(f"CUDA_VISIBLE_DEVICES={visible['CUDA_VISIBLE_DEVICES']!r} hides all {len(gpus)} NVIDIA GPUs")
    return [{**fields, "index": index} for index, fields in enumerate(devices)], notes


def _versions(nvml: _Nvml, notes: list[str]) -> tuple[str, str]:
    """Version of the driver, and the CUDA version that it supports ("12.9"); "" where it does not say."""
    try:
        driver = nvml.text("nvmlSystemGetDriverVersion")
        cuda = nvml.number("nvmlSystemGetCudaDriverVersion")  # 1000 * major + 10 * minor
    except NvmlError as error:
        notes.append(f"NVIDIA driver too old or broken: needs {MIN_DRIVER} or newer ({error})")
        return "", ""
    version = (cuda // 1000, cuda % 1000 // 10)
    if version < MIN_CUDA:
        supports = f"NVIDIA driver {driver} too old: it supports CUDA {version[0]}.{version[1]}"
        notes.append(f"{supports}; needs CUDA {MIN_CUDA[0]}.{MIN_CUDA[1]}, driver {MIN_DRIVER} or newer")
    return driver, f"{version[0]}.{version[1]}"


def _gpus(nvml: _Nvml, common: dict[str, Any], notes: list[str]) -> list[_Gpu]:
    """The physical GPUs in NVML's order, which is that of nvidia-smi: by PCI bus."""
    gpus = []
    for position in range(nvml.number("nvmlDeviceGetCount_v2")):
        try:
            handle = nvml.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(position))
            gpus.append(_gpu(nvml, handle, common, notes))
        except NvmlError as error:  # no permission for this one, fallen off the bus
            notes.append(f"NVIDIA GPU {position} cannot be used: {error}")
    return gpus


def _gpu(nvml: _Nvml, handle: ctypes.c_void_p, common: dict[str, Any], notes: list[str]) -> _Gpu:
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
    nvml.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    arch = f"sm_{major.value}{minor.value}"
    fields = {**common, "arch": arch, "warp_size": 32, "smem_bytes": smem_bytes(arch)}
    fields["uuid"] = nvml.text("nvmlDeviceGetUUID", handle)
    fields["name"] = nvml.text("nvmlDeviceGetName", handle)
    try:
        nvml.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    except NvmlError as error:  # shared with the CPU on GB10 and Jetson: "not supported"
        notes.append(f"{fields['name']}: size of its memory unknown ({error})")
    gpu = _Gpu({**fields, "memory": memory.total})
    gpu.mig = _mig_mode(nvml, handle)
    if gpu.mig:
        gpu.instances = _instances(nvml, handle, fields)
    else:
        gpu.cores, gpu.fields["sm_count"] = _sm_count(nvml, handle, fields, notes)
    return gpu


def _sm_count(nvml: _Nvml, handle: ctypes.c_void_p, fields: dict[str, Any], notes: list[str]) -> tuple[int, int]:
    """Cores and SMs, 0 where unknown.

    NVML has no SM count of a whole GPU (nvmlDeviceGetAttributes_v2 "currently only supports MIG device handles",
    NVML reference); nvmlDeviceGetNumGpuCores gives CUDA cores, to be divided by the architecture's cores per SM.
    """
    try:
        cores = nvml.number("nvmlDeviceGetNumGpuCores", handle)
    except NvmlError as error:
        notes.append(f"{fields['name']}: number of SMs unknown ({error})")
        return 0, 0
    if fields["arch"] not in ARCHS:
        notes.append(f"{fields['name']}: architecture {fields['arch']} is newer than this xattn; number of SMs unknown")
        return cores, 0
    return cores, cores // ARCHS[fields["arch"]].cores_per_sm


def _mig_mode(nvml: _Nvml, handle: ctypes.c_void_p) -> bool:
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        nvml.call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
    except NvmlError:  # a GPU or a driver without MIG
        return False
    return current.value == 1


def _instances(nvml: _Nvml, handle: ctypes.c_void_p, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The MIG compute instances of a GPU, in the driver's order."""
    found = []
    for position in range(nvml.number("nvmlDeviceGetMaxMigDeviceCount", handle)):
        try:
            instance = nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(position))
        except NvmlError:  # a slot without an instance
            continue
        size = _Attributes()
        nvml.call("nvmlDeviceGetAttributes_v2", instance, ctypes.byref(size))
        own = {"uuid": nvml.text("nvmlDeviceGetUUID", instance), "name": nvml.text("nvmlDeviceGetName", instance)}
        found.append({**fields, **own, "sm_count": size.multiprocessors, "memory": size.memory_mib << 20})
    return found


def _cuda_order(gpus: list[_Gpu], order: str, notes: list[str]) -> list[_Gpu]:
    """NVML's order made CUDA's. They agree for PCI_BUS_ID, and whenever the GPUs are all alike.

    FASTEST_FIRST, the default, puts the GPU that CUDA guesses to be fastest first and leaves the order of the others
    unspecified (CUDA programming guide): here the one with most cores comes first, and a note says that it is a guess.
    """
    if order == "PCI_BUS_ID" or len({gpu.fields["name"] for gpu in gpus}) < 2:
        return gpus
    notes.append("NVIDIA GPUs of several kinds: their order is a guess unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set")
    fastest = max(range(len(gpus)), key=lambda i: gpus[i].cores)
    return [gpus[fastest], *gpus[:fastest], *gpus[fastest + 1 :]]


def select(gpus: list[_Gpu], text: str | None) -> list[dict[str, Any]]:
    """The devices that CUDA shows for a value of CUDA_VISIBLE_DEVICES (None: unset).

    The first entry decides whether all are indices, GPU-<uuid prefix> or MIG-<uuid>. An invalid, unknown or ambiguous
    entry hides itself and all behind it; a repeated one hides everything (as torch.cuda reads it). Where MIG is on,
    CUDA shows a single compute instance, and then no whole GPU beside it (MIG user guide, "Device Enumeration").
    """
    if text is not None and text.startswith("MIG-"):
        instances = [instance for gpu in gpus for instance in gpu.instances]
        uuids = [instance["uuid"] for instance in instances]
        return [instances[i] for i in _positions(text, uuids, "MIG-")][:1]
    if text is not None:
        prefix = "GPU-" if text.startswith("GPU-") else ""
        gpus = [gpus[i] for i in _positions(text, [gpu.fields["uuid"] for gpu in gpus], prefix)]
    instances = [instance for gpu in gpus for instance in gpu.instances]
    return instances[:1] or [gpu.fields for gpu in gpus if not gpu.mig]


def _positions(text: str, uuids: list[str], prefix: str) -> list[int]:
    """Positions named by a list of indices (prefix "") or of uuids that start with ``prefix``."""
    chosen: list[int] = []
    for entry in text.split(","):
        if prefix:
            matches = [i for i, uuid in enumerate(uuids) if entry.startswith(prefix) and uuid.startswith(entry)]
        else:  # like strtoul: "1gpu" is 1
            number = re.match(r"\s*\+?(\d+)", entry)
            matches = [int(number[1])] if number and int(number[1]) < len(uuids) else []
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return []
        chosen += matches
    return chosen
