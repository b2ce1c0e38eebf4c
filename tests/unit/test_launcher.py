"""The compiled launcher over stand-ins for both vendors' drivers: kernels of the host build run through the real op and
its error paths, without a GPU. Nothing here was run on AMD hardware."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from unit.fake_drivers import Amd, build_kfd

import xattn
from xattn import kernel_call, launch_bindings, launch_library
from xattn.images import ImageSpec, source_roots

pytestmark = pytest.mark.one_worker("launcher")

HERE = Path(__file__).parent / "launcher"
CONFIG = (
    ("element", "bf16"),
    ("head_dim", 64),
    ("head_dim_v", 64),
    ("tile_m", 64),
    ("tile_n", 64),
    ("num_warps", 4),
    ("min_blocks", 1),
    ("keep_q", False),
    ("paged", False),
    ("any_scale", False),
    ("softcap", False),
    ("alibi", False),
    ("attn_mask", "none"),
)


def compiler() -> str:
    found = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    assert found, "the tests of the launcher need a C++ compiler"
    return found


def sources() -> Path:
    return next(root for root in source_roots() if (root / "launcher").is_dir())


DRIVERS = {"nvidia": ("fake_cuda.cpp", "libcuda.so.1", "sm80"), "amd": ("fake_hip.cpp", "libamdhip64.so.7", "cdna")}


def compile_library(out: Path, *flags: object) -> Path:
    command = [compiler(), "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared", *flags, "-o", out, "-ldl"]
    subprocess.run([str(part) for part in command], check=True)
    return out


def compile_driver(folder: Path, vendor: str, *flags: str, soname: str = "") -> Path:
    source, name, _ = DRIVERS[vendor]
    return compile_library(folder / (soname or name), HERE / source, f"-Wl,-soname,{soname or name}", *flags)


def run_scenarios(script: str, *arguments: object, **env: str) -> dict:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    path = os.pathsep.join(map(str, (Path(xattn.__file__).parents[1], HERE)))  # whatever PYTHONSAFEPATH says
    full = {**os.environ, "PYTHONPATH": path, **env}
    done = subprocess.run(command, env=full, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory) -> Path:
    files = sorted((sources() / "launcher").glob("*.cpp"))
    flags = ("-Wall", "-Wextra", "-Werror", "-fvisibility=hidden")
    return compile_library(tmp_path_factory.mktemp("launcher") / "launcher.so", *files, *flags)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, Path]:
    """Kernels for the stand-in of each vendor's driver."""
    made = {}
    for vendor, (_, _, layer) in DRIVERS.items():
        folder = tmp_path_factory.mktemp(f"kernels-{vendor}")
        (folder / "config.h").write_text(ImageSpec(f"arch/host/forward_{layer}.cpp", CONFIG, f"host-{layer}").header())
        paths = [f"-I{folder}", *(f"-I{root}" for root in source_roots())]
        layer_flag = f'-DLAYER="arch/host/forward_{layer}.cpp"'
        made[vendor] = compile_library(folder / "kernels.so", HERE / "kernels.cpp", "-DXATTN_HOST", layer_flag, *paths)
    return made


@pytest.fixture(scope="module", params=DRIVERS)
def found(request, tmp_path_factory, launcher, kernels):
    """What scenarios.py saw over one vendor's driver."""
    vendor = request.param
    driver = compile_driver(tmp_path_factory.mktemp(vendor), vendor)
    return {"vendor": vendor, **run_scenarios("scenarios.py", vendor, launcher, driver, kernels[vendor])}


@pytest.fixture(scope="module")
def amd(tmp_path_factory, launcher):
    """What scenarios_amd.py saw."""
    folder = tmp_path_factory.mktemp("amd")
    torch_hip = compile_library(folder / "libtorch_hip.so", HERE / "fake_torch_hip.cpp", "-Wl,-soname,libtorch_hip.so")
    root = build_kfd(folder / "root", [Amd(0xA0B1C2D3E4F50607)])
    return run_scenarios("scenarios_amd.py", launcher, compile_driver(folder, "amd"), torch_hip, root, folder)


def test_a_call_is_launched_on_other_tensors(found):
    assert found["error"] < 0.02
    assert found["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert found["strides"] == [[70 * 4 * 64, 4 * 64, 64, 1], [4 * 70, 70, 1]]
    assert found["again"] and found["without_lse"] == 1
    threads = 128 if found["vendor"] == "nvidia" else 256
    assert found["shape"] == [2 * 4 * 2, 1, 1, threads, 1, 1, 24576]


def test_an_image_is_loaded_once_and_contexts_are_given_back(found):
    assert found["modules"] == 1 and found["left"] == 0


def test_nothing_is_launched_on_an_unaligned_input(found):
    assert found["unaligned"] == [0, 0]


ERRORS = {  # name: kind, words of both vendors, NVIDIA's, AMD's
    "refused": ("ImageRefused", ["loading failed"], ["NO_BINARY_FOR_GPU"], ["hipErrorNoBinaryForGpu", "update ROCm"]),
    "no_kernel": ("LaunchError", ["finding kernel nothing"], [], ["hipErrorNotFound"]),
    "shared": (
        "LaunchError",
        ["1048576 bytes of shared memory"],
        ["asking for"],
        ["launch of 16 blocks of 256 threads", "hipErrorInvalidConfiguration"],
    ),
    "no_device": ("LaunchError", [], ["cuDeviceGet"], ["hipSetDevice failed: hipErrorInvalidDevice", "rocminfo"]),
    "launch": (
        "LaunchError",
        ["24576 bytes of shared memory"],
        ["launch of 16 blocks of 128 threads", "CUDA_LAUNCH_BLOCKING"],
        ["launch of 16 blocks of 256 threads", "hipErrorLaunchFailure", "AMD_SERIALIZE_KERNEL"],
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_call_the_image_and_what_to_do(found, name):
    kind, of_both, of_nvidia, of_amd = ERRORS[name]
    message, own = found[name], of_nvidia if found["vendor"] == "nvidia" else of_amd
    assert message.startswith(kind)
    arch = "sm_80" if found["vendor"] == "nvidia" else "gfx942"
    for word in (*of_both, *own, f"forward [test] for {arch}", "a compiler 1.0"):
        assert word in message


def test_wrong_use_is_an_error(found):
    assert "got 2 tensors for a call of 3" in found["too_few"]
    assert "no prepared call has handle" in found["forgotten"]


def test_launch_attributes_and_tensor_maps(found):
    if found["vendor"] == "amd":
        assert "tensor maps are NVIDIA's" in found["map"]
        return
    assert found["attributes"] == [1, 2]
    assert found["map"] == [True, 9, 3, 4, 128, 1, 3, 3]


def test_graphs_replay_with_other_contents(found):
    """One launch each time; what is captured does not run before the replay."""
    for launches, error in found["graph"]:
        assert launches == 1 and error < 0.04


def test_launches_that_may_overlap_have_different_work_queues(found):
    first, second, again, captured, another, second_again = found["queues"]
    assert again == first and second_again == second and len({first, second, captured, another}) == 4
    assert all(0 <= n < launch_bindings.WORK_QUEUES for n in found["queues"])
    assert found["no_queue"] == [-1, -1, first]


def test_all_agree_how_many_work_queues_a_kernel_has():
    found = {}
    for name, file in (("kQueues", "arch/sm90/tiles.h"), ("kWorkQueues", "launcher/calls.h")):
        text = (source_roots()[0] / file).read_text()
        found[name] = int(re.search(rf"{name} = (\d+);", text)[1])
    assert set(found.values()) == {launch_bindings.WORK_QUEUES}


def test_work_queues_of_launchers_in_python():
    queues = launch_bindings.WorkQueues()
    first, second = queues.number(0, 5), queues.number(1, 5)
    captured = [queues.number(0, None) for _ in range(launch_bindings.WORK_QUEUES)]
    assert queues.number(0, 5) == first and len({first, second, *captured[:99]}) == 101 and captured[-1] == -1
    assert [queues.number(0, n) for n in range(launch_bindings.WORK_QUEUES)][-1] == -1 and queues.number(1, 5) == second


# ---------------------------------------------------------------- AMD's alone
def test_a_call_goes_from_the_plan_to_the_kernel_on_amd(amd):
    """Of an MI300X that KFD's files describe: planned, packed, launched, and answered by the emulated kernel."""
    assert amd["device"] == ["gfx942", "AMD Instinct MI300X", 304, 64, 65536] and amd["plan"] == "cdna"
    assert amd["forward"] < 0.02 and amd["again"]
    # 64 rows a block, four waves; Q (the output's place too), K and V of 64 rows by 64 channels.
    assert amd["shape"] == [2 * 4 * 2, 1, 1, 256, 1, 1, 3 * 64 * 64 * 2]


def test_decode_is_split_on_amd(amd):
    assert amd["decode"] < 0.02 and amd["splits"] == [2, True, 1]


HIP_ERRORS = {
    "hipGetDevice 100": ["LaunchError: hipGetDevice failed: hipErrorNoDevice", "rocminfo", "/dev/kfd"],
    "hipModuleLoadData 2": ["LaunchError: loading failed: hipErrorOutOfMemory", "free memory on the device"],
    "hipModuleLoadData 209": ["ImageRefused: loading failed: hipErrorNoBinaryForGpu", "another architecture"],
    "hipModuleLoadData 200": ["ImageRefused: loading failed: hipErrorInvalidImage", "another architecture"],
    "hipModuleGetFunction 500": ["LaunchError: finding kernel xattn_forward failed: hipErrorNotFound"],
    "hipModuleLaunchKernel 719": ["LaunchError: launch of 16 blocks of 256 threads", "hipErrorLaunchFailure"],
    "hipModuleLaunchKernel 9": ["LaunchError: launch of 16 blocks of 256 threads, 24576 bytes", "please report it"],
}


@pytest.mark.parametrize("name", HIP_ERRORS)
def test_errors_of_hip(amd, name):
    """They are said once; what failed to load is loaded at the next attempt."""
    first, second = amd["errors"][name]
    assert all(word in first for word in (*HIP_ERRORS[name], "forward", "compiled by a compiler 1.0")), first
    assert second == ""


def test_a_machine_without_an_amd_gpu(amd):
    assert "hipErrorNoDevice" in amd["no_device"] and "ROCR_VISIBLE_DEVICES" in amd["no_device"]


def test_streams_and_devices_of_amd(amd):
    """torch's current stream of the call's device; the device that was current is so again."""
    if amd["stream"] is None:  # a torch that drives GPUs: tests/gpu sees to that
        assert torch.version.cuda or torch.version.hip
        return
    assert amd["stream"] == [0x5001, 1, 0] and amd["on_gpu"] < 0.02
    assert "hipSetDevice failed: hipErrorInvalidDevice" in amd["no_such_device"]


# ---------------------------------------------------------------- drivers that are not there, or old
@pytest.mark.parametrize("vendor, name", [("nvidia", "libcuda.so.1"), ("amd", "libamdhip64.so.6")])
def test_no_driver(launcher, vendor, name):
    driver = {"nvidia": "NVIDIA's driver (libcuda)", "amd": "AMD's driver (libamdhip64)"}[vendor]
    if any(Path(folder, name).exists() for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/opt/rocm/lib")):
        return  # this machine has one
    error = run_scenarios("scenarios_missing.py", vendor, launcher)["error"]
    assert f"opening {driver} failed: none of " in error and name in error and "forward [test]" in error


def test_a_driver_without_a_function(launcher, kernels, tmp_path):
    driver = compile_driver(tmp_path, "amd", "-DWITHOUT_hipModuleLaunchKernel")
    error = run_scenarios("scenarios_missing.py", "amd", launcher, driver, kernels["amd"])["error"]
    assert "AMD's driver (libamdhip64) has no hipModuleLaunchKernel: it is too old" in error


def test_streams_without_an_id(launcher, kernels, tmp_path):
    """Of an older ROCm: the default stream is known all the same."""
    driver = compile_driver(tmp_path, "amd", "-DWITHOUT_hipStreamGetId")
    answer = run_scenarios("scenarios_missing.py", "amd", launcher, driver, kernels["amd"])
    assert answer == {"error": "", "queue": 0}


def test_the_driver_that_torch_has_loaded_is_taken(launcher, kernels, tmp_path):
    """Not a newer one of the system, to which torch's streams would mean nothing."""
    system = compile_driver(tmp_path, "amd", "-DWITHOUT_hipModuleLaunchKernel")  # the first name that is tried
    of_torch = compile_driver(tmp_path, "amd", soname="libamdhip64.so.6")
    arguments = ("scenarios_missing.py", "amd", launcher, of_torch, kernels["amd"])
    assert run_scenarios(*arguments, LD_LIBRARY_PATH=str(system.parent))["error"] == ""


def test_threads(found):
    assert found["threads"] == [20, True]


def test_declarations_agree_with_torch(tmp_path):
    """The functions of torch's stable ABI that the launcher declares itself are those of torch's headers."""
    include = Path(torch.__file__).parent / "include"
    code = """
        #include <torch/csrc/stable/c/shim.h>
        #include <type_traits>
        #include "torch_abi.h"
        using namespace xattn::launcher;
        // Handles are pointers to types that nobody sees, and size_t and uint64_t are one here.
        template <class T> struct Plain { using type = T; };
        template <> struct Plain<AtenTensorHandle> { using type = TensorHandle; };
        template <> struct Plain<AtenTensorHandle*> { using type = TensorHandle*; };
        template <> struct Plain<StableListHandle> { using type = ListHandle; };
        template <> struct Plain<StableListHandle*> { using type = ListHandle*; };
        template <> struct Plain<TorchLibraryHandle> { using type = LibraryHandle; };
        template <> struct Plain<TorchLibraryHandle*> { using type = LibraryHandle*; };
        template <class R, class... A> auto plain(R (*)(A...)) -> R (*)(typename Plain<A>::type...);
        #define COMPARE(name, result, parameters) \\
            static_assert(std::is_same_v<decltype(plain(&::name)), result(*) parameters>, #name);
        XATTN_TORCH_FUNCTIONS(COMPARE)
        static_assert(kTorchTarget == 0x020a000000000000, "2.10");
    """
    source = tmp_path / "compare.cpp"
    source.write_text(code)
    # With the target version that the launcher states, what is newer than it is not declared at all.
    flags = [f"-I{include}", f"-I{sources() / 'launcher'}", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    command = [compiler(), "-std=c++17", "-fsyntax-only", *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_dtype_numbers_are_torchs():
    import ctypes

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    for dtype, number in launch_library._DTYPES.items():
        assert getattr(library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")() == number


def test_it_links_neither_torch_nor_a_driver(tmp_path):
    out = tmp_path / "launcher.so"
    files = [str(p) for p in sorted((sources() / "launcher").glob("*.cpp"))]
    subprocess.run([compiler(), "-std=c++17", "-fPIC", "-shared", *files, "-ldl", "-o", str(out)], check=True)
    names = re.findall(rb"lib[a-z0-9_+]+\.so[.0-9]*", out.read_bytes())
    assert {b"libcuda.so.1", b"libamdhip64.so.7"} <= set(names)  # opened by name when they are needed
    needed = subprocess.run(
        [shutil.which("ldd") or "ldd", str(out)], capture_output=True, text=True, check=False
    ).stdout
    assert not re.search("torch|cuda|hip", needed)


def test_what_to_do_is_told_for_errors_of_both_vendors():
    for message in ("CUDA_ERROR_NO_BINARY_FOR_GPU", "hipErrorNoBinaryForGpu", "CUDA_ERROR_ILLEGAL_ADDRESS"):
        assert len(kernel_call.advised(message)) > len(message) + 20
    assert kernel_call.advised("something else") == "something else"
