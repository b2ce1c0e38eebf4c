"""The compiled launcher over a stand-in for NVIDIA's driver: kernels of the host build run through the real op and its
error paths, without a GPU."""

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


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What scenarios.py saw."""
    folder = tmp_path_factory.mktemp("launcher")
    (folder / "config.h").write_text(ImageSpec("arch/host/forward_sm80.cpp", CONFIG, "host-sm80").header())
    built = {
        "launcher": [
            *sorted((sources() / "launcher").glob("*.cpp")),
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fvisibility=hidden",
        ],
        "driver": [HERE / "fake_cuda.cpp", "-Wl,-soname,libcuda.so.1"],
        "kernels": [HERE / "kernels.cpp", "-DXATTN_HOST", f"-I{folder}", f"-I{sources()}"],
    }
    for name, flags in built.items():
        out = ["-o", folder / f"{name}.so", "-ldl"]
        command = [compiler(), "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared", *flags, *out]
        subprocess.run([str(part) for part in command], check=True)
    paths = [str(folder / f"{name}.so") for name in built]
    env = {**os.environ, "PYTHONPATH": str(Path(xattn.__file__).parents[1])}
    command = [sys.executable, str(HERE / "scenarios.py"), *paths]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_call_is_launched_on_other_tensors(found):
    assert found["error"] < 0.02
    assert found["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert found["strides"] == [[70 * 4 * 64, 4 * 64, 64, 1], [4 * 70, 70, 1]]
    assert found["again"] and found["without_lse"] == 1
    assert found["shape"] == [2 * 4 * 2, 1, 1, 128, 1, 1, 24576]


def test_an_image_is_loaded_once_and_contexts_are_given_back(found):
    assert found["modules"] == 1 and found["depth"] == 0


def test_nothing_is_launched_on_an_unaligned_input(found):
    assert found["unaligned"] == [0, 0]


@pytest.mark.parametrize(
    "name, kind, words",
    [
        ("refused", "ImageRefused", ["loading failed", "NO_BINARY_FOR_GPU", "update the driver"]),
        ("no_kernel", "LaunchError", ["finding kernel nothing"]),
        ("shared", "LaunchError", ["asking for 1048576 bytes of shared memory"]),
        ("no_device", "LaunchError", ["cuDeviceGet"]),
        ("launch", "LaunchError", ["launch of 16 blocks of 128 threads, 24576 bytes", "CUDA_LAUNCH_BLOCKING"]),
    ],
)
def test_errors_name_the_call_the_image_and_what_to_do(found, name, kind, words):
    message = found[name]
    assert message.startswith(kind)
    for word in (*words, "forward [test] for sm_80", "a compiler 1.0"):
        assert word in message


def test_wrong_use_is_an_error(found):
    assert "got 2 tensors for a call of 3" in found["too_few"]
    assert "no prepared call has handle" in found["forgotten"]


def test_launch_attributes_and_tensor_maps(found):
    assert found["attributes"] == [1, 2]
    assert found["map"] == [True, 9, 3, 4, 128, 1, 3, 3]


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
