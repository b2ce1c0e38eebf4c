"""Stand-ins for drivers: an NVML compiled from C, so that the ctypes path is the real one, and a KFD tree of files."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

_SOURCE = r"""
#include <stdio.h>
#include <string.h>
typedef struct { const char *name, *uuid; int major, minor; unsigned cores, sms; unsigned long long memory;
                 int failure, mig, first, count; } Gpu;
static const Gpu gpus[] = { @GPUS@ {0} };
static const Gpu instances[] = { @INSTANCES@ {0} };
static int running = 0;
#define READY if (!running) return 1
int nvmlInit_v2(void) { if (@INIT@) return @INIT@; running++; return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "fake error"; }
#ifndef WITHOUT_nvmlShutdown
int nvmlShutdown(void) { READY; running--; return 0; }
#endif
int fakeRunning(void) { return running; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { READY; snprintf(out, n, "@DRIVER@"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *out) { READY; *out = @CUDA@; return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { READY; *out = @COUNT@; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, const Gpu **out) { READY; *out = &gpus[i]; return gpus[i].failure; }
int nvmlDeviceGetName(const Gpu *g, char *out, unsigned n) { READY; snprintf(out, n, "%s", g->name); return 0; }
int nvmlDeviceGetUUID(const Gpu *g, char *out, unsigned n) { READY; snprintf(out, n, "%s", g->uuid); return 0; }
int nvmlDeviceGetCudaComputeCapability(const Gpu *g, int *a, int *b) { READY; *a = g->major; *b = g->minor; return 0; }
int nvmlDeviceGetMemoryInfo(const Gpu *g, unsigned long long *out) {
  READY; if (!g->memory) return 3; out[0] = g->memory; out[1] = out[2] = 0; return 0; }
int nvmlDeviceGetMigMode(const Gpu *g, unsigned *now, unsigned *then) {
  READY; if (g->mig < 0) return 3; *now = *then = g->mig; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(const Gpu *g, unsigned *out) { READY; *out = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(const Gpu *g, unsigned i, const Gpu **out) {
  READY; if ((int)i >= g->count) return 6; *out = &instances[g->first + i]; return 0; }
int nvmlDeviceGetAttributes_v2(const Gpu *g, unsigned *out) {
  READY; if (g < instances || g > instances + sizeof instances / sizeof *instances) return 3;
  unsigned long long mib = g->memory >> 20; memset(out, 0, 40); out[0] = g->sms; memcpy(out + 8, &mib, 8); return 0; }
#ifndef WITHOUT_nvmlDeviceGetNumGpuCores
int nvmlDeviceGetNumGpuCores(const Gpu *g, unsigned *out) {
  READY; if (g->mig > 0) return 3; *out = g->cores; return 0; }
#endif
"""


@dataclass
class Instance:
    """A MIG instance."""

    uuid: str
    sm_count: int = 16
    memory: int = 18 << 30


@dataclass
class Nvidia:
    """A GPU of the fake NVML; ``failure`` is the nvmlReturn_t of asking for its handle; mig None: not supported."""

    uuid: str
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    cores: int = 132 * 128
    memory: int = 140 << 30
    failure: int = 0
    mig: list[Instance] | None = None


def build_nvml(
    folder: Path,
    gpus: list[Nvidia],
    *,
    init: int = 0,
    cuda: int = 12090,
    driver: str = "575.57.08",
    without: tuple[str, ...] = (),
) -> Path:
    """Compile a libnvidia-ml.so.1 that knows ``gpus``; ``without`` names functions an old driver lacks."""
    rows, instances = [], []
    for gpu in gpus:
        mig = -1 if gpu.mig is None else 1
        major, minor = gpu.capability
        numbers = f"{major}, {minor}, {gpu.cores}, 0, {gpu.memory}ull, {gpu.failure}, {mig}"
        rows.append(f'{{ "{gpu.name}", "{gpu.uuid}", {numbers}, {len(instances)}, {len(gpu.mig or [])} }},')
        for part in gpu.mig or []:
            numbers = f"{major}, {minor}, 0, {part.sm_count}, {part.memory}ull, 0, 0, 0, 0"
            instances.append(f'{{ "{gpu.name} MIG", "{part.uuid}", {numbers} }},')
    source = _SOURCE
    values = {"GPUS": "".join(rows), "INSTANCES": "".join(instances), "COUNT": len(gpus)}
    for key, value in {**values, "INIT": init, "CUDA": cuda, "DRIVER": driver}.items():
        source = source.replace(f"@{key}@", str(value))
    library = folder / "libnvidia-ml.so.1"
    defines = [f"-DWITHOUT_{name}" for name in without]
    command = [
        os.environ.get("CC", "cc"),
        "-shared",
        "-fPIC",
        "-w",
        "-O0",
        *defines,
        "-x",
        "c",
        "-",
        "-o",
        str(library),
    ]
    subprocess.run(command, input=source, text=True, check=True)
    return library


@dataclass
class Amd:
    """A GPU of the fake KFD tree; the numbers are the kernel's own words, an MI300X by default."""

    unique_id: int
    gfx_target_version: int = 90402
    properties: dict[str, int] = field(default_factory=dict)
    memory: int = 192 << 30


_MI300X = {"simd_count": 1216, "simd_per_cu": 4, "wave_front_size": 64, "lds_size_in_kb": 64, "device_id": 0x74A1}


def build_kfd(root: Path, gpus: list[Amd], *, rocm: str | None = "6.4.1-83", first_node: int = 1) -> Path:
    """Write /sys/class/kfd, /dev/kfd and /opt/rocm under ``root``: one CPU node, then ``gpus``."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    _write(nodes / "0/properties", {"cpu_cores_count": 96, "simd_count": 0, "gfx_target_version": 0})
    _write(nodes / "0/mem_banks/0/properties", {"heap_type": 0, "size_in_bytes": 1 << 40})
    for number, gpu in enumerate(gpus, first_node):
        own = {"gfx_target_version": gpu.gfx_target_version, "unique_id": gpu.unique_id}
        _write(nodes / f"{number}/properties", {"cpu_cores_count": 0, **_MI300X, **own, **gpu.properties})
        _write(nodes / f"{number}/mem_banks/0/properties", {"heap_type": 1, "size_in_bytes": gpu.memory})
        _write(nodes / f"{number}/mem_banks/1/properties", {"heap_type": 4, "size_in_bytes": 65536})
    (root / "dev").mkdir()
    (root / "dev/kfd").touch()
    if rocm:
        (root / "opt/rocm/.info").mkdir(parents=True)
        (root / "opt/rocm/.info/version").write_text(rocm + "\n")
    return root


def _write(path: Path, values: dict[str, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{key} {value}\n" for key, value in values.items()))
