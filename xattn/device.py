"""Devices of this machine and of any other: vendor, architecture, size. Asking creates no device context.

Drivers are asked through NVML (device_nvidia) and KFD's files (device_amd), so a process may fork afterwards.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xattn import device_amd, device_nvidia, settings

if TYPE_CHECKING:
    import ctypes

    import torch


@dataclass(frozen=True)
class Device:
    """One device. ``arch`` is the base name: "sm_90", "gfx942", or the CPU's machine name ("x86_64").

    ``index`` is torch's ordinal; None for a device that is not here. ``sm_count`` counts SMs, compute units (pairs of
    them where torch counts so: RDNA's work-group processors) or cores.
    ``memory`` and ``smem_bytes`` (shared memory a block may use) are in bytes; 0 where unknown. ``runtime`` is the
    CUDA version that the driver supports, or the version of ROCm; "" where unknown, like the other strings.
    """

    vendor: str  # "nvidia" | "amd" | "cpu" | "other"
    arch: str
    name: str = ""
    index: int | None = None
    sm_count: int = 0
    warp_size: int = 1
    smem_bytes: int = 0
    memory: int = 0
    driver: str = ""
    runtime: str = ""
    uuid: str = ""

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """(9, 0) for sm_90; None for what is not NVIDIA's."""
        if self.vendor != "nvidia":
            return None
        major, minor = divmod(int(self.arch.removeprefix("sm_")), 10)
        return major, minor

    def __str__(self) -> str:
        parts = [self.arch]
        if self.sm_count:
            unit = {"nvidia": "SMs", "amd": "CUs"}.get(self.vendor, "cores")
            parts.append(f"{self.sm_count} {unit}")
        if self.memory:
            parts.append(f"{self.memory / 2**30:.1f} GiB")
        return f"{self.name or self.vendor} ({', '.join(parts)})"


class Detection(NamedTuple):
    """What was found, and, in words, what was not: drivers missing, too old or broken, devices hidden."""

    devices: list[Device]
    notes: list[str]


def detect() -> list[Device]:
    """All visible devices of this machine: NVIDIA's, AMD's, each in torch's order, and the CPU last. Never raises."""
    return survey().devices


def survey(*, nvml: ctypes.CDLL | None = None, root: Path = Path("/")) -> Detection:
    """``detect`` with its notes. ``nvml`` and ``root`` replace the system's NVML and its /sys, /dev and /opt."""
    visible = settings.visible_devices()
    devices: list[Device] = []
    notes: list[str] = []
    for vendor, probe in (
        ("nvidia", partial(device_nvidia.probe, visible, nvml)),
        ("amd", partial(device_amd.probe, visible, root)),
    ):
        try:
            found, said = probe()
        except Exception as error:  # a driver broken in a way not foreseen must not break those who only ask
            found, said = [], [f"asking the {vendor} driver failed: {error!r}"]
        devices += [Device(vendor, **fields) for fields in found]
        notes += said
    return Detection([*devices, cpu()], notes)


def cpu() -> Device:
    """The CPU: the cores this process may use, the memory of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not POSIX
        memory = 0
    return Device("cpu", platform.machine(), name=_cpu_name(), sm_count=cores, memory=memory)


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        found = None
    return found[1].strip() if found else "CPU"


def base_arch(text: str) -> str:
    """The base name of an architecture however it is written: "sm_90" for "sm90", "sm_90a", "compute_90" and "9.0",
    "gfx942" for "gfx942:sramecc+:xnack-". ValueError for anything else."""
    name = text.strip().lower()
    if found := re.fullmatch(r"(?:sm|compute)_?(\d{2,3})[af]?", name, re.ASCII):
        return f"sm_{found[1]}"
    if found := re.fullmatch(r"(\d{1,2})\.(\d)[af]?", name, re.ASCII):
        return f"sm_{found[1]}{found[2]}"
    if found := re.fullmatch(r"(gfx\d{1,2}[0-9a-f]{2})(?::\w+[+-])*", name, re.ASCII):
        return found[1]
    known = ", ".join([*device_nvidia.ARCHS, *device_amd.ARCHS])
    forms = "sm_NN (also sm_90a, compute_90, 9.0) or gfxNNN (also gfx942:xnack-)"
    raise ValueError(f"architecture is {text!r}; allowed: {forms}, such as {known}")


def from_arch(text: str) -> Device:
    """A device that need not be here: "sm_90", "gfx942" (any form of ``base_arch``), "cpu".

    Name and sizes are those of one board of that architecture. A well-formed name that is not in the table gives a
    Device of unknown sizes. ValueError for anything else.
    """
    if text.strip().lower() in ("cpu", platform.machine().lower()):
        return cpu()
    arch = base_arch(text)
    if arch.startswith("sm_"):
        unknown = Device("nvidia", arch, warp_size=32)
        nvidia = device_nvidia.ARCHS.get(arch)
        if nvidia is None:
            return unknown
        smem, memory = device_nvidia.smem_bytes(arch), nvidia.memory_gib << 30
        return replace(unknown, name=nvidia.board, sm_count=nvidia.sm_count, smem_bytes=smem, memory=memory)
    unknown = Device("amd", arch, warp_size=device_amd.warp_size(arch))
    amd = device_amd.ARCHS.get(arch)
    if amd is None:
        return unknown
    smem, memory = amd.lds_kib * 1024, amd.memory_gib << 30
    return replace(unknown, name=amd.board, sm_count=amd.cu_count, smem_bytes=smem, memory=memory)


_known: dict[torch.device | str, Device] = {}  # what `of` answered; only answers that cannot change


def of(device: torch.device | str) -> Device:
    """The Device behind a torch device; ValueError for a GPU that is not here.

    "cuda" is NVIDIA's or AMD's by the build of torch; "meta" is answered by ``default``; other accelerators have the
    vendor "other". The second call costs a dict lookup. A GPU is asked through torch where torch has initialised it
    (as it has wherever a tensor on it exists), else as ``detect`` does, which creates no context.
    """
    found = _known.get(device)
    return found if found is not None else _look_up(device)


def _look_up(device: torch.device | str) -> Device:
    import torch

    place = torch.device(device)
    if place.type == "meta":
        return default()
    if place.type == "cpu":
        return _known.setdefault(device, cpu())
    if place.type != "cuda":
        return _known.setdefault(device, Device("other", place.type, name=place.type, index=place.index))
    if not torch.cuda.is_initialized():
        return _detected(torch, place)
    if place.index is None:
        return of(torch.device("cuda", torch.cuda.current_device()))
    return _known.setdefault(device, _initialised(torch, place.index))


def is_here(device: torch.device) -> bool:
    """Whether this torch drives accelerators of that type on this machine. GPUs ("cuda") are not asked after: ``of``
    says which there are."""
    import torch

    if device.type in ("cpu", "cuda", "meta"):
        return True
    try:
        module = torch.get_device_module(device)
        return bool(module.is_available()) and (device.index is None or device.index < module.device_count())
    except (RuntimeError, AttributeError):  # no such module, or one that does not say
        return False


def _detected(torch: Any, place: torch.device) -> Device:
    """The answer before torch has initialised the GPU. Not remembered: the environment may still change."""
    devices = detect()
    for found in devices:
        if found.vendor == vendor_of_torch(torch) and found.index == (place.index or 0):
            return found
    here = "; ".join(str(found) for found in devices)
    raise ValueError(f"device is {str(place)!r}, which this torch ({torch.__version__}) does not have; here: {here}")


def _initialised(torch: Any, index: int) -> Device:
    """The answer from torch, completed by what only the drivers tell: their versions, the uuid in the vendor's form."""
    properties = torch.cuda.get_device_properties(index)
    vendor = vendor_of_torch(torch)
    detected = [found for found in detect() if found.vendor == vendor]
    if vendor == "amd":
        arch = base_arch(properties.gcnArchName)
        same = [found for found in detected if (found.index, found.arch) == (index, arch)]
        lanes, smem = device_amd.warp_size(arch), properties.shared_memory_per_block
    else:  # CUDA's numbering may differ from detect's where GPUs of several kinds are mixed: the uuid decides
        arch = base_arch(f"{properties.major}.{properties.minor}")
        same = [found for found in detected if found.uuid.endswith(str(getattr(properties, "uuid", "none")))]
        lanes, smem = 32, getattr(properties, "shared_memory_per_block_optin", 0) or device_nvidia.smem_bytes(arch)
    return Device(
        vendor,
        arch,
        name=properties.name or (same[0].name if same else ""),
        index=index,
        sm_count=properties.multi_processor_count,
        warp_size=getattr(properties, "warp_size", lanes),
        smem_bytes=smem,
        memory=properties.total_memory,
        driver=detected[0].driver if detected else "",
        runtime=detected[0].runtime if detected else "",
        uuid=same[0].uuid if same else "",
    )


def vendor_of_torch(torch: Any) -> str:
    """Whose GPUs a build of torch drives as "cuda": "nvidia", "amd"; "cpu" where it drives none."""
    return "amd" if torch.version.hip else "nvidia" if torch.version.cuda else "cpu"


def versions_of_torch(torch: Any) -> dict[str, str | None]:
    """The version of a build of torch, and of what it was built for."""
    return {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "torch_hip": torch.version.hip}


def default() -> Device:
    """The device meant where none is named: the first GPU that this torch can drive, else the CPU.

    What torch can use decides: a GPU of the other vendor, or a GPU beside a CPU build of torch, is not taken. Without
    torch it is the first GPU of the machine. torch.cuda.is_available() is not asked: on ROCm, with MIG, or without
    NVML it initialises the runtime, which forbids a later fork.
    """
    try:
        import torch
    except (ImportError, OSError):
        return _first_of("")
    if torch.cuda.is_initialized():
        return of(torch.device("cuda", 0))
    return _first_of(vendor_of_torch(torch))


@cache
def _first_of(vendor: str) -> Device:
    """The first device of a vendor, or of any where it is "", the CPU where there is none."""
    devices = detect()
    return next((found for found in devices if found.vendor == vendor), devices[0] if not vendor else devices[-1])
