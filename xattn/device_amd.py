"""AMD GPUs through the kernel's KFD topology in sysfs: files are read, nothing of ROCm is loaded or initialised.

Layout: /sys/class/kfd/kfd/topology/nodes/<n>/{properties, mem_banks/<m>/properties}, lines of "key value"; the
meaning of the keys is that of libhsakmt's topology.c, and HIP numbers GPUs in the order of the nodes.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MIN_ROCM = (6, 4)
_HEAPS_OF_THE_GPU = (1, 2)  # HSA_HEAPTYPE_FRAME_BUFFER_PUBLIC and _PRIVATE


class Arch(NamedTuple):
    """One board that stands for an architecture; LDS in KiB, memory in GiB."""

    board: str
    cu_count: int
    lds_kib: int
    memory_gib: int


ARCHS = {
    "gfx908": Arch("AMD Instinct MI100", 120, 64, 32),
    "gfx90a": Arch("AMD Instinct MI250X (one die)", 110, 64, 64),
    "gfx942": Arch("AMD Instinct MI300X", 304, 64, 192),
    "gfx950": Arch("AMD Instinct MI355X", 256, 160, 288),
    "gfx1030": Arch("AMD Radeon RX 6900 XT", 80, 64, 16),
    "gfx1100": Arch("AMD Radeon RX 7900 XTX", 96, 64, 24),
    "gfx1101": Arch("AMD Radeon RX 7800 XT", 60, 64, 16),
    "gfx1102": Arch("AMD Radeon RX 7600", 32, 64, 8),
    "gfx1151": Arch("AMD Radeon 8060S", 40, 64, 96),
    "gfx1200": Arch("AMD Radeon RX 9060 XT", 32, 64, 16),
    "gfx1201": Arch("AMD Radeon RX 9070 XT", 64, 64, 16),
}

# PCI device ids, as in libdrm's amdgpu.ids. The kernel knows no marketing name; Radeons would also need the revision.
_BOARDS = {
    0x738C: "AMD Instinct MI100",
    0x7408: "AMD Instinct MI250X",
    0x740C: "AMD Instinct MI250X / MI250",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A2: "AMD Instinct MI308X",
    0x74A5: "AMD Instinct MI325X",
    0x74B5: "AMD Instinct MI300X VF",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
    0x75B0: "AMD Instinct MI350X VF",
    0x75B3: "AMD Instinct MI355X VF",
}


def warp_size(arch: str) -> int:
    """Lanes of a wave as compilers choose it: 64 on GCN and CDNA (gfx9), 32 on RDNA (gfx10 and above)."""
    return 64 if len(arch) == len("gfx90a") else 32


def arch_of_version(version: int) -> str:
    """KFD's gfx_target_version, major * 10000 + minor * 100 + stepping, as a name: 90402 is gfx942, 90010 gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def probe(visible: Mapping[str, str], root: Path = Path("/")) -> tuple[list[dict[str, Any]], list[str]]:
    """The fields of a Device for each visible AMD GPU, in HIP's order, and notes on what is missing or broken.

    ``visible`` holds ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES as far as they are set;
    ``root`` is where /sys, /dev and /opt/rocm are looked for.
    """
    topology = root / "sys/class/kfd/kfd/topology/nodes"
    if not topology.is_dir():
        return [], ["no AMD driver: the amdgpu kernel module offers no /sys/class/kfd"]
    notes: list[str] = []
    gpus = list(_gpus(topology, notes))
    if not gpus:
        return [], notes or ["the AMD driver offers no GPU"]
    if not os.access(root / "dev/kfd", os.R_OK | os.W_OK):
        notes.append(
            f"{len(gpus)} AMD GPUs cannot be used: no access to /dev/kfd (join group render, or pass the device)"
        )
        return [], notes
    common = {"driver": _driver(root), "runtime": _rocm(root, notes)}
    devices = select(gpus, visible)
    if not devices:
        names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        values = ", ".join(f"{name}={visible[name]!r}" for name in names if name in visible)
        notes.append(f"{values} hides all {len(gpus)} AMD GPUs")
    return [{**fields, **common, "index": index} for index, fields in enumerate(devices)], notes


def _gpus(topology: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    nodes = [node for node in topology.iterdir() if node.name.isdigit()]
    for node in sorted(nodes, key=lambda path: int(path.name)):
        try:
            properties = _properties(node / "properties")
            if properties.get("simd_count", 0) == 0:  # a CPU
                continue
            yield _gpu(node, properties)
        except PermissionError:  # closed by a device cgroup
            notes.append(f"AMD GPU at KFD node {node.name} is not given to this container")
        except (OSError, ValueError) as error:
            notes.append(f"AMD GPU at KFD node {node.name} cannot be read: {error}")


def _gpu(node: Path, properties: dict[str, int]) -> dict[str, Any]:
    if not properties.get("gfx_target_version"):
        raise ValueError("the kernel gives no gfx_target_version: driver too old, needs Linux 5.16 or ROCm's amdgpu")
    arch = arch_of_version(properties["gfx_target_version"])
    unique = properties.get("unique_id", 0)
    return {
        "arch": arch,
        "name": _BOARDS.get(properties.get("device_id", 0), f"AMD GPU {arch}"),
        "sm_count": properties["simd_count"] // (properties.get("simd_per_cu") or 4),
        "warp_size": properties.get("wave_front_size") or warp_size(arch),
        "smem_bytes": properties.get("lds_size_in_kb", 0) * 1024,
        "memory": _memory(node),
        "uuid": f"GPU-{unique:016x}" if unique else "",
    }


def _memory(node: Path) -> int:
    """Bytes in the memory banks of the GPU itself (LDS, scratch and system memory are other heaps)."""
    banks = [_properties(path) for path in node.glob("mem_banks/*/properties")]
    return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _HEAPS_OF_THE_GPU)


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text().splitlines())
    return {key: int(value) for key, value in pairs}


def _driver(root: Path) -> str:
    """Version of ROCm's amdgpu module; where the kernel's own is in use, the kernel's."""
    try:
        return (root / "sys/module/amdgpu/version").read_text().strip()
    except OSError:
        return f"{platform.system()} {platform.release()}"


def _rocm(root: Path, notes: list[str]) -> str:
    """Version of an installed ROCm ("6.4.1"); "" where there is none at /opt/rocm (torch may bring its own)."""
    try:
        version = (root / "opt/rocm/.info/version").read_text().strip().split("-")[0]
        if tuple(int(part) for part in version.split(".")[:2]) < MIN_ROCM:
            notes.append(f"ROCm {version} too old: needs {MIN_ROCM[0]}.{MIN_ROCM[1]} or newer")
    except (OSError, ValueError):
        return ""
    return version


def select(gpus: list[dict[str, Any]], visible: Mapping[str, str]) -> list[dict[str, Any]]:
    """The devices that HIP shows: ROCR_VISIBLE_DEVICES picks first, HIP's own variable picks among what is left.

    HIP_VISIBLE_DEVICES counts before CUDA_VISIBLE_DEVICES; HIP takes an empty one as unset, where ROCR hides all
    (clr's rocdevice.cpp, ROCR-Runtime's amd_filter_device.cpp). An invalid entry hides itself and all behind it.
    """
    rocr = visible.get("ROCR_VISIBLE_DEVICES")
    if rocr is not None:
        gpus = _rocr(gpus, rocr)
    hip = visible.get("HIP_VISIBLE_DEVICES") or visible.get("CUDA_VISIBLE_DEVICES")
    return _hip(gpus, hip) if hip else gpus


def _rocr(gpus: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Numbers in C's notation, or unambiguous prefixes of GPU-<16 hex digits> in either case; a repeated one ends."""
    chosen: list[int] = []
    for entry in (part.strip().lower() for part in text.split(",")):
        if entry.startswith("g"):
            matches = [i for i, gpu in enumerate(gpus) if len(entry) > 4 and gpu["uuid"].lower().startswith(entry)]
        else:
            try:
                matches = [int(entry, 0)]
            except ValueError:
                break
        if len(matches) != 1 or not 0 <= matches[0] < len(gpus) or matches[0] in chosen:
            break
        chosen += matches
    return [gpus[i] for i in chosen]


def _hip(gpus: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Plain numbers, or parts of GPU-<16 hex digits> (the first GPU that has it); a repeated one counts once."""
    chosen: list[int] = []
    for entry in text.split(","):
        if "GPU-" in entry:
            matches = [i for i, gpu in enumerate(gpus) if entry in gpu["uuid"]]
        else:
            matches = [i for i in range(len(gpus)) if str(i) == entry]
        if not matches:
            break
        if matches[0] not in chosen:
            chosen.append(matches[0])
    return [gpus[i] for i in chosen]
