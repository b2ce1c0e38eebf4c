"""xattn.device against stand-in drivers of both vendors; no GPU is needed and none is looked for."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from unit.fake_drivers import Amd, Instance, Nvidia, build_kfd, build_nvml

import xattn.device as device_module
from xattn import device_amd, device_nvidia
from xattn.device import Detection, Device, base_arch, default, detect, from_arch, of, survey

REPOSITORY = Path(device_module.__file__).parents[1]
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

H200S = [Nvidia(f"GPU-{letter * 8}-0000-0000-0000-000000000000") for letter in "abc"] + [
    Nvidia("GPU-abababab-0000-0000-0000-000000000000")
]
MIG = [
    Nvidia("GPU-11111111-0", mig=[Instance("MIG-aaaa"), Instance("MIG-abbb", 32)]),
    Nvidia("GPU-22222222-0", mig=[Instance("MIG-cccc")]),
    Nvidia("GPU-33333333-0"),
    Nvidia("GPU-44444444-0", mig=[]),
]


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    device_module._known.clear()
    device_module._first_of.cache_clear()
    yield
    device_module._known.clear()
    device_module._first_of.cache_clear()


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    """Fake NVML libraries, each compiled once: name -> ctypes.CDLL."""
    tiny = Nvidia("GPU-00000000-1", "NVIDIA T4", (7, 5), 40 * 64, 16 << 30)
    kinds = {
        "h200s": {"gpus": H200S},
        "mig": {"gpus": MIG},
        "mixed": {"gpus": [tiny, H200S[0]]},
        "mismatch": {"gpus": H200S, "init": 18},
        "unloaded": {"gpus": H200S, "init": 9},
        "broken": {"gpus": H200S, "init": 999},
        "old": {"gpus": H200S, "cuda": 11040, "driver": "470.1", "without": ("nvmlDeviceGetNumGpuCores",)},
        "no_shutdown": {"gpus": H200S, "without": ("nvmlShutdown",)},
        "new_arch": {"gpus": [Nvidia("GPU-0", "NVIDIA R200", (13, 0))]},
        "odd": {"gpus": [Nvidia("GPU-0", failure=15), Nvidia("GPU-1", "NVIDIA GB10", (12, 1), 6144, 0)]},
        "none": {"gpus": []},
    }
    return {
        name: ctypes.CDLL(str(build_nvml(tmp_path_factory.mktemp(name), **options))) for name, options in kinds.items()
    }


def uuids(devices):
    return [found.uuid for found in devices]


# --- NVIDIA ---


def test_nvidia_fields(nvml):
    found, notes = device_nvidia.probe({}, nvml["h200s"])
    assert notes == []
    assert [Device("nvidia", **fields) for fields in found] == [
        Device("nvidia", "sm_90", "NVIDIA H200", i, 132, 32, 227 * 1024, 140 << 30, "575.57.08", "12.9", gpu.uuid)
        for i, gpu in enumerate(H200S)
    ]
    assert nvml["h200s"].fakeRunning() == 0, "NVML is left initialised"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2,0", [2, 0]),
        ("0, 1", [0, 1]),
        ("1gpu,0", [1, 0]),  # read like strtoul
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("0,9,1", [0]),
        ("x", []),
        ("1,0,1", []),
        ("1,7,1", [1]),  # what follows an invalid entry is not read
        ("GPU-b,GPU-c", [1, 2]),
        (H200S[0].uuid, [0]),
        ("GPU-a", []),  # two begin so
        ("GPU-ab,GPU-aa", [3, 0]),
        ("GPU-c,GPU-x,GPU-b", [2]),
        ("GPU-c,GPU-cc", []),
        ("GPU-c,0", [2]),
        ("0,GPU-c", [0]),
        ("MIG-aaaa", []),
    ],
)
def test_cuda_visible_devices(nvml, value, expected):
    found, notes = device_nvidia.probe({"CUDA_VISIBLE_DEVICES": value}, nvml["h200s"])
    assert [fields["uuid"] for fields in found] == [H200S[i].uuid for i in expected]
    assert [fields["index"] for fields in found] == list(range(len(expected)))
    assert bool(notes) == (not expected)
    if notes:
        assert repr(value) in notes[0]


def test_empty_entry_ends_a_list_of_uuids(nvml):
    assert len(device_nvidia.probe({"CUDA_VISIBLE_DEVICES": "GPU-0,"}, nvml["new_arch"])[0]) == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ["MIG-aaaa"]),  # CUDA shows one instance, and no whole GPU beside it
        ("1", ["MIG-cccc"]),
        ("2", ["GPU-33333333-0"]),
        ("2,1", ["MIG-cccc"]),
        ("3", []),  # MIG is on, without an instance
        ("GPU-2", ["MIG-cccc"]),
        ("MIG-abbb", ["MIG-abbb"]),
        ("MIG-cccc,MIG-aaaa", ["MIG-cccc"]),
        ("MIG-a", []),
        ("MIG-dddd", []),
    ],
)
def test_mig(nvml, value, expected):
    visible = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [fields["uuid"] for fields in device_nvidia.probe(visible, nvml["mig"])[0]] == expected


def test_mig_instance_has_its_own_size(nvml):
    (fields,), _ = device_nvidia.probe({"CUDA_VISIBLE_DEVICES": "MIG-abbb"}, nvml["mig"])
    assert (fields["arch"], fields["sm_count"], fields["memory"]) == ("sm_90", 32, 18 << 30)
    assert fields["name"] == "NVIDIA H200 MIG"


def test_device_order(nvml):
    names = [fields["name"] for fields in device_nvidia.probe({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, nvml["mixed"])[0]]
    assert names == ["NVIDIA T4", "NVIDIA H200"]
    found, notes = device_nvidia.probe({}, nvml["mixed"])
    assert [fields["name"] for fields in found] == ["NVIDIA H200", "NVIDIA T4"]
    assert "CUDA_DEVICE_ORDER" in notes[0]
    found, _ = device_nvidia.probe({"CUDA_VISIBLE_DEVICES": "1"}, nvml["mixed"])
    assert [(fields["name"], fields["sm_count"]) for fields in found] == [("NVIDIA T4", 40)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("mismatch", "differ in version"), ("unloaded", "not loaded"), ("broken", "failed to start"), ("none", None)],
)
def test_no_usable_nvidia_driver(nvml, kind, words):
    found, notes = device_nvidia.probe({}, nvml[kind])
    assert found == []
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


def test_nvidia_library_missing(monkeypatch):
    monkeypatch.setattr(device_nvidia, "LIBRARY", "libno-such-driver.so.1")
    found, notes = device_nvidia.probe({})
    assert found == [] and notes == ["no NVIDIA driver: libno-such-driver.so.1 not found"]


def test_library_that_is_not_nvml(nvml):
    found, notes = device_nvidia.probe({}, ctypes.CDLL(None))
    assert found == []
    assert "too old: needs 525" in notes[0] and "nvmlInit_v2" in notes[0]


def test_old_driver(nvml):
    found, notes = device_nvidia.probe({}, nvml["old"])
    assert len(found) == 4 and found[0]["sm_count"] == 0 and found[0]["runtime"] == "11.4"
    assert "driver 470.1 too old: it supports CUDA 11.4; needs CUDA 12.0" in notes[0]
    assert any("nvmlDeviceGetNumGpuCores" in note for note in notes)


def test_shutdown_missing(nvml):
    assert len(device_nvidia.probe({}, nvml["no_shutdown"])[0]) == 4


def test_unknown_nvidia_arch(nvml):
    (fields,), notes = device_nvidia.probe({}, nvml["new_arch"])
    assert (fields["arch"], fields["sm_count"], fields["smem_bytes"]) == ("sm_130", 0, 0)
    assert "sm_130 is newer" in notes[0]


def test_lost_gpu_and_shared_memory(nvml):
    (fields,), notes = device_nvidia.probe({}, nvml["odd"])
    assert (fields["name"], fields["arch"], fields["sm_count"], fields["memory"]) == ("NVIDIA GB10", "sm_121", 48, 0)
    assert "NVIDIA GPU 0 cannot be used" in notes[0] and "memory unknown" in notes[1]


# --- AMD ---

MI300XS = [Amd(0xA0B1C2D3E4F50607), Amd(0xA0B1000000000001), Amd(0xC000000000000002), Amd(0)]


def test_amd_fields(tmp_path):
    rdna = {"simd_count": 192, "simd_per_cu": 2, "wave_front_size": 32, "device_id": 0x744C}
    aldebaran = {"simd_count": 440, "device_id": 0x7408}
    gpus = [
        MI300XS[0],
        Amd(0x0102030405060708, 110000, rdna, 24 << 30),
        Amd(3, 90010, aldebaran, 64 << 30),
        Amd(4, 90500, {"simd_count": 1024, "lds_size_in_kb": 160, "device_id": 0x75A0}, 288 << 30),
    ]
    build_kfd(tmp_path, gpus)
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "sys/module/amdgpu/version").write_text("6.12.12\n")
    found, notes = device_amd.probe({}, tmp_path)
    assert notes == []
    kib, gib, versions = 1024, 2**30, ("6.12.12", "6.4.1")
    assert [Device("amd", **fields) for fields in found] == [
        Device(
            "amd", "gfx942", "AMD Instinct MI300X", 0, 304, 64, 64 * kib, 192 * gib, *versions, "GPU-a0b1c2d3e4f50607"
        ),
        Device("amd", "gfx1100", "AMD GPU gfx1100", 1, 96, 32, 64 * kib, 24 * gib, *versions, "GPU-0102030405060708"),
        Device(
            "amd", "gfx90a", "AMD Instinct MI250X", 2, 110, 64, 64 * kib, 64 * gib, *versions, "GPU-0000000000000003"
        ),
        Device(
            "amd", "gfx950", "AMD Instinct MI350X", 3, 256, 64, 160 * kib, 288 * gib, *versions, "GPU-0000000000000004"
        ),
    ]


def test_nodes_are_ordered_by_number(tmp_path):
    build_kfd(tmp_path, [Amd(1), Amd(2), Amd(3)], first_node=9)  # nodes 9, 10, 11
    assert [fields["uuid"][-1] for fields in device_amd.probe({}, tmp_path)[0]] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("rocr", "hip", "cuda", "expected"),
    [
        (None, None, None, [0, 1, 2, 3]),
        ("2,0", None, None, [2, 0]),
        (" 2 , 0x1", None, None, [2, 1]),
        ("", None, None, []),
        ("-1", None, None, []),
        ("0,7,1", None, None, [0]),
        ("0,one", None, None, [0]),
        ("1,0,1,2", None, None, [1, 0]),  # a repeated one ends the list
        ("GPU-a0b1c2d3e4f50607", None, None, [0]),
        ("gpu-C0,GPU-A0B10", None, None, [2, 1]),
        ("GPU-a0b1", None, None, []),  # two begin so
        ("GPU-,0", None, None, []),
        ("2,GPU-a0b1c,1", None, None, [2, 0, 1]),  # kinds may be mixed
        (None, "3,1", None, [3, 1]),
        (None, "1,0,1,2", None, [1, 0, 2]),  # a repeated one counts once
        (None, "1, 0", None, [1]),  # no blanks
        (None, "-1", None, []),
        (None, "", None, [0, 1, 2, 3]),  # as unset
        (None, "", "1", [1]),
        (None, "GPU-c000000000000002,0", None, [2, 0]),
        (None, "GPU-ffff,0", None, []),
        (None, None, "1,2", [1, 2]),
        (None, "0", "1,2", [0]),
        ("3,2,1", "1,0", None, [2, 3]),  # HIP counts in what ROCR left
        ("3,2", "2", None, []),
        ("3,2", None, "1", [2]),
        (None, None, "GPU-abcd", []),  # an NVIDIA uuid
    ],
)
def test_amd_visibility(tmp_path, rocr, hip, cuda, expected):
    build_kfd(tmp_path, MI300XS)
    given = {"ROCR_VISIBLE_DEVICES": rocr, "HIP_VISIBLE_DEVICES": hip, "CUDA_VISIBLE_DEVICES": cuda}
    visible = {name: value for name, value in given.items() if value is not None}
    everything = [fields["uuid"] for fields in device_amd.probe({}, tmp_path)[0]]
    found, notes = device_amd.probe(visible, tmp_path)
    assert [fields["uuid"] for fields in found] == [everything[i] for i in expected]
    assert [fields["index"] for fields in found] == list(range(len(expected)))
    assert notes == [] if expected else "hides all 4 AMD GPUs" in notes[0]


def test_amd_driver_missing_or_without_access(tmp_path):
    found, notes = device_amd.probe({}, tmp_path)
    assert found == [] and "no AMD driver" in notes[0]
    build_kfd(tmp_path, [])
    assert device_amd.probe({}, tmp_path) == ([], ["the AMD driver offers no GPU"])


def test_kfd_that_cannot_be_opened(tmp_path):
    build_kfd(tmp_path, MI300XS)
    (tmp_path / "dev/kfd").unlink()
    found, notes = device_amd.probe({}, tmp_path)
    assert found == [] and "no access to /dev/kfd" in notes[0]


def test_unreadable_nodes(tmp_path, monkeypatch):
    build_kfd(tmp_path, [Amd(1), Amd(2), Amd(3), Amd(4, gfx_target_version=0)])
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    (nodes / "2/properties").write_text("simd_count many\n")
    read = device_amd._properties

    def denied(path):  # what the kernel answers for a GPU outside the container's cgroup, even to root
        if path == nodes / "1/properties":
            raise PermissionError(1, "Operation not permitted")
        return read(path)

    monkeypatch.setattr(device_amd, "_properties", denied)
    found, notes = device_amd.probe({}, tmp_path)
    assert [fields["uuid"] for fields in found] == ["GPU-0000000000000003"]
    assert ["node 1 is not given" in notes[0], "node 2" in notes[1], "too old" in notes[2]] == [True] * 3


@pytest.mark.parametrize(("rocm", "runtime", "noted"), [("6.2.0-1", "6.2.0", True), ("7.0.2", "7.0.2", False)])
def test_rocm_version(tmp_path, rocm, runtime, noted):
    build_kfd(tmp_path, [Amd(1)], rocm=rocm)
    (fields,), notes = device_amd.probe({}, tmp_path)
    assert fields["runtime"] == runtime
    assert any("needs 6.4" in note for note in notes) == noted


def test_no_rocm_and_the_kernels_own_driver(tmp_path):
    build_kfd(tmp_path, [Amd(1)], rocm=None)
    (fields,), notes = device_amd.probe({}, tmp_path)
    assert (fields["runtime"], fields["driver"], notes) == ("", f"{platform.system()} {platform.release()}", [])


def test_unknown_amd_arch(tmp_path):
    build_kfd(tmp_path, [Amd(1, 130909, {"simd_per_cu": 2, "wave_front_size": 32, "device_id": 1})])
    (fields,), _ = device_amd.probe({}, tmp_path)
    assert (fields["arch"], fields["name"], fields["warp_size"]) == ("gfx1399", "AMD GPU gfx1399", 32)


# --- both ---


def test_both_vendors_and_the_cpu(nvml, tmp_path, monkeypatch):
    build_kfd(tmp_path, MI300XS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2")
    devices, notes = survey(nvml=nvml["h200s"], root=tmp_path)
    assert [(found.vendor, found.index) for found in devices] == [
        ("nvidia", 0),
        ("nvidia", 1),
        ("amd", 0),
        ("cpu", None),
    ]
    assert uuids(devices[:3]) == [H200S[1].uuid, H200S[0].uuid, "GPU-c000000000000002"]
    assert notes == []
    host = devices[-1]
    assert host.arch == platform.machine() and host.sm_count >= 1 and host.memory > 0 and host.warp_size == 1


def test_one_broken_vendor_leaves_the_other(nvml, tmp_path, monkeypatch):
    def broken(visible, library=None):
        raise RuntimeError("beyond all expectation")

    build_kfd(tmp_path, MI300XS)
    monkeypatch.setattr(device_nvidia, "probe", broken)
    devices, notes = survey(root=tmp_path)
    assert [found.vendor for found in devices] == ["amd"] * 4 + ["cpu"]
    assert len(notes) == 1 and "beyond all expectation" in notes[0]


def test_str_and_compute_capability(nvml, tmp_path):
    build_kfd(tmp_path, [MI300XS[0]])
    devices, _ = survey(nvml=nvml["h200s"], root=tmp_path)
    assert str(devices[0]) == "NVIDIA H200 (sm_90, 132 SMs, 140.0 GiB)"
    assert str(devices[4]) == "AMD Instinct MI300X (gfx942, 304 CUs, 192.0 GiB)"
    assert str(Device("nvidia", "sm_130")) == "nvidia (sm_130)"
    assert [found.compute_capability for found in devices[3:]] == [(9, 0), None, None]
    assert from_arch("sm_121").compute_capability == (12, 1)


# --- architectures by name ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx90a:xnack-", "gfx90a"),
        ("GFX1100", "gfx1100"),
        ("gfx1399", "gfx1399"),
        ("sm_90a", "sm_90"),
        ("sm90", "sm_90"),
        ("sm_100f", "sm_100"),
        ("compute_90", "sm_90"),
        ("9.0", "sm_90"),
        ("12.1", "sm_121"),
        (" sm_80 ", "sm_80"),
    ],
)
def test_base_arch(text, expected):
    assert base_arch(text) == expected


@pytest.mark.parametrize(
    "text", ["", "sm_", "sm_9", "sm_90b", "hopper", "gfx", "gfx9", "gfx942:", "gfx942+", "9", "90"]
)
def test_bad_arch(text):
    for function in (base_arch, from_arch):
        with pytest.raises(ValueError, match=r"allowed: sm_NN .*gfx942") as error:
            function(text)
        assert repr(text) in str(error.value)


def test_from_arch():
    assert from_arch("sm_90a") == Device("nvidia", "sm_90", "NVIDIA H100", None, 132, 32, 227 * 1024, 80 << 30)
    mi300x = from_arch("gfx942:xnack-")
    assert mi300x == Device("amd", "gfx942", "AMD Instinct MI300X", None, 304, 64, 65536, 192 << 30)
    assert from_arch("gfx950").smem_bytes == 160 * 1024
    assert from_arch("cpu") == from_arch(platform.machine()) == device_module.cpu()
    assert from_arch("sm_130") == Device("nvidia", "sm_130", warp_size=32)
    assert from_arch("gfx1399") == Device("amd", "gfx1399", warp_size=32)


@pytest.mark.parametrize("arch", [*device_nvidia.ARCHS, *device_amd.ARCHS])
def test_table_rows_are_complete(arch):
    found = from_arch(arch)
    assert found.arch == arch and found.name and found.sm_count and found.memory and found.smem_bytes >= 64 * 1024
    assert found.warp_size == (64 if arch.startswith("gfx9") else 32)


# --- torch devices ---


def pretend(monkeypatch, *, hip=None, cuda=None, properties=(), initialised=True):
    """Let torch claim GPUs; ``properties`` are what get_device_properties answers, calls are counted."""
    torch = pytest.importorskip("torch")
    calls = []

    def get(index):
        calls.append(index)
        return properties[index]

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setattr(torch.cuda, "get_device_properties", get)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: len(properties) - 1)
    return torch, calls


def use(monkeypatch, library=None, root="/nowhere"):
    """Let detect() see only these drivers."""
    missing = ctypes.CDLL(None)
    monkeypatch.setattr(device_module, "survey", lambda: survey(nvml=library or missing, root=Path(root)))


CUDA_PROPERTIES = [
    SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        total_memory=139 << 30,
        multi_processor_count=132,
        warp_size=32,
        shared_memory_per_block_optin=232448,
        uuid=gpu.uuid.removeprefix("GPU-"),
    )
    for gpu in reversed(H200S)
]


def test_of_cuda(nvml, monkeypatch):
    torch, calls = pretend(monkeypatch, cuda="12.9", properties=CUDA_PROPERTIES)
    use(monkeypatch, nvml["h200s"])
    found = of(torch.device("cuda:1"))
    expected = ("NVIDIA H200", 1, 132, 32, 232448, 139 << 30, "575.57.08", "12.9")
    assert found == Device("nvidia", "sm_90", *expected, H200S[2].uuid)  # matched by uuid, not by number
    assert of(torch.device("cuda:1")) is found and calls == [1]
    assert of("cuda").index == 3  # the current device, and not remembered under "cuda"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert of("cuda").index == 0


def test_of_rocm(tmp_path, monkeypatch):
    build_kfd(tmp_path, MI300XS)
    properties = SimpleNamespace(
        name="",
        gcnArchName="gfx942:sramecc+:xnack-",
        total_memory=191 << 30,
        multi_processor_count=304,
        shared_memory_per_block=65536,
        uuid="not in the form of the driver",
    )
    torch, _ = pretend(monkeypatch, hip="6.4.43482", properties=[properties] * 2)
    use(monkeypatch, root=tmp_path)
    found = of(torch.device("cuda", 1))
    sizes = (1, 304, 64, 65536, 191 << 30)
    versions = (f"{platform.system()} {platform.release()}", "6.4.1", "GPU-a0b1000000000001")
    assert found == Device("amd", "gfx942", "AMD Instinct MI300X", *sizes, *versions)


def test_of_works_without_an_answering_driver(monkeypatch):
    torch, _ = pretend(monkeypatch, cuda="12.9", properties=CUDA_PROPERTIES)
    use(monkeypatch)
    found = of(torch.device("cuda", 0))
    assert (found.arch, found.index, found.driver, found.uuid) == ("sm_90", 0, "", "")


def test_of_before_torch_is_initialised(nvml, tmp_path, monkeypatch):
    build_kfd(tmp_path, MI300XS)
    _, calls = pretend(monkeypatch, hip="6.4", initialised=False)
    use(monkeypatch, nvml["h200s"], tmp_path)
    assert of("cuda:1") == [found for found in detect() if found.vendor == "amd"][1]
    assert of("cuda").index == 0 and of("cuda:0").uuid == "GPU-a0b1c2d3e4f50607"
    with pytest.raises(ValueError, match=r"'cuda:4'.* does not have; here: NVIDIA H200"):
        of("cuda:4")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    assert of("cuda:0").uuid == ""  # not remembered
    assert calls == []


def test_of_a_gpu_beside_a_cpu_torch(nvml, monkeypatch):
    pretend(monkeypatch, initialised=False)
    use(monkeypatch, nvml["h200s"])
    with pytest.raises(ValueError, match="does not have"):
        of("cuda:0")


def test_of_others(monkeypatch):
    torch, _ = pretend(monkeypatch, initialised=False)
    use(monkeypatch)
    assert of(torch.device("cpu")).vendor == "cpu" and of("cpu") is of("cpu")
    assert of("mps") == Device("other", "mps", "mps")
    assert of(torch.device("xpu", 1)) == Device("other", "xpu", "xpu", 1)
    assert of(torch.device("meta")) == default()


@pytest.mark.parametrize(
    ("build", "expected"),
    [({"cuda": "12.9"}, "nvidia"), ({"hip": "6.4"}, "amd"), ({}, "cpu")],
)
def test_default_is_what_torch_can_use(nvml, tmp_path, monkeypatch, build, expected):
    build_kfd(tmp_path, MI300XS)
    pretend(monkeypatch, initialised=False, **build)
    use(monkeypatch, nvml["h200s"], tmp_path)
    assert default().vendor == expected
    assert default() is default()


def test_default_without_gpus(monkeypatch):
    pretend(monkeypatch, cuda="12.9", initialised=False)
    use(monkeypatch)
    assert default().vendor == "cpu"


def test_default_after_initialisation(nvml, monkeypatch):
    _, calls = pretend(monkeypatch, cuda="12.9", properties=CUDA_PROPERTIES)
    use(monkeypatch, nvml["h200s"])
    assert default().uuid == H200S[3].uuid and calls == [0]
    assert of("meta") == default()


# --- in a process of its own ---


def run(code, **env):
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment = {**kept, "PYTHONPATH": str(REPOSITORY), **env}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


BLOCK_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "pynvml", "cuda", "hip", "amdsmi"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
"""

NOTHING_LOADED = """
maps = open("/proc/self/maps").read()
assert "libnvidia-ml.so.1" in maps
assert not any(name in maps for name in ("libcuda.so", "libcudart", "libamdhip64", "libhsa-runtime"))
"""


# The package's own __init__ imports torch, which may load CUDA: an empty one stands in for it.
BARE_PACKAGE = f"""
import sys, types
package = types.ModuleType("xattn")
package.__path__ = [{str(REPOSITORY / "xattn")!r}]
sys.modules["xattn"] = package
"""


@pytest.fixture(scope="module")
def nvml_folder(tmp_path_factory):
    return str(build_nvml(tmp_path_factory.mktemp("path"), H200S).parent)


def test_without_torch_and_bindings(nvml_folder):
    code = f"""{BLOCK_TORCH}{BARE_PACKAGE}
from xattn import device
print(len([d for d in device.detect() if d.vendor == "nvidia"]), device.default().uuid)
assert "torch" not in sys.modules
{NOTHING_LOADED}"""
    assert run(code, LD_LIBRARY_PATH=nvml_folder) == ["4", H200S[0].uuid]


def test_import_alone_asks_no_driver(nvml_folder):
    code = f"""{BARE_PACKAGE}
import xattn.device
assert "torch" not in sys.modules
assert "libnvidia-ml" not in open("/proc/self/maps").read()
"""
    run(code, LD_LIBRARY_PATH=nvml_folder)


def test_fork_after_detect(nvml_folder):
    code = f"""{BARE_PACKAGE}
import os
from xattn import device
before = device.detect()
{NOTHING_LOADED}
child = os.fork()
if child == 0:
    os._exit(0 if device.detect() == before and len(before) > 4 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code, LD_LIBRARY_PATH=nvml_folder, CUDA_VISIBLE_DEVICES="3,2,1,0") == ["0"]


def test_environment_is_read_through_settings(nvml_folder):
    code = "from xattn import device; print(*[d.uuid for d in device.detect() if d.vendor == 'nvidia'])"
    assert run(code, LD_LIBRARY_PATH=nvml_folder, CUDA_VISIBLE_DEVICES="GPU-c") == [H200S[2].uuid]
    assert run(code, LD_LIBRARY_PATH=nvml_folder, CUDA_VISIBLE_DEVICES="") == []


def test_detect_on_this_machine():
    devices, notes = survey()
    assert isinstance(survey(), Detection) and devices == detect()
    assert [found.vendor for found in devices].count("cpu") == 1 and devices[-1].vendor == "cpu"
    assert all(isinstance(note, str) and note for note in notes)
