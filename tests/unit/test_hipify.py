"""hipify: what is renamed, what stays, the gate that catches each kind of leftover, and images made from its text."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from xattn import images, jit
from xattn.images import ImageSpec

PROGRAM = next(p for root in images.source_roots() if (p := root / "hipify.py").is_file())
AMD = ImageSpec("arch/cdna/forward.hip", (("element", "bf16"),), "gfx942")


@pytest.fixture
def hipify():
    """The module, fresh."""
    spec = importlib.util.spec_from_file_location("hipify_under_test", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fresh_sources():
    """Nothing of the sources is remembered from before, nor afterwards."""
    images.sources.cache_clear()
    yield
    images.sources.cache_clear()


def run(*arguments: str | Path, program: Path = PROGRAM) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(program), *map(str, arguments)], capture_output=True, text=True)


def copied(tmp_path: Path, **changes: str) -> Path:
    """hipify.py in a tree of its own, with lines put behind kernels that are named by their stem."""
    program = tmp_path / "csrc_hip" / "hipify.py"
    kernels = tmp_path / "csrc_cuda" / "kernels"
    for path in sorted((PROGRAM.parents[1] / "csrc_cuda" / "kernels").glob("*.h")):
        kernels.mkdir(parents=True, exist_ok=True)
        (kernels / path.name).write_text(path.read_text() + changes.get(path.stem, ""))
    for path in (PROGRAM, PROGRAM.parent / "arch" / "cdna" / "language.h"):
        target = tmp_path / "csrc_hip" / path.relative_to(PROGRAM.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    return program


# ---------------------------------------------------------------- what is renamed
@pytest.mark.parametrize(
    "cuda, hip",
    [
        ("cudaStream_t s = nullptr; CUdevice d;", "hipStream_t s = nullptr; hipDevice_t d;"),
        ("#include <cuda_fp16.h>", "#include <hip/hip_fp16.h>"),
        ("#include <cuda.h>", "#include <hip/hip_runtime.h>"),
        ('  #  include "cuda_runtime.h"', '  #  include "hip/hip_runtime.h"'),
        ("#ifdef __CUDACC__", "#ifdef __HIPCC__"),
        ("__nv_bfloat162 x;", "__hip_bfloat162 x;"),
        # not in torch's tables
        ("#include <cuda_fp8.h>", "#include <hip/hip_fp8.h>"),
        ("nv_bfloat16 x; __nv_fp8_e4m3 y;", "__hip_bfloat16 x; __hip_fp8_e4m3 y;"),
        (
            "__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)",
            "__hip_cvt_float_to_fp8(x, __HIP_SATFINITE, __HIP_E4M3)",
        ),
        ("x = __shfl_xor_sync(0xffffffffu, x, 4);", "x = __shfl_xor(x, 4);"),
        ("if (__any_sync(~0u, p)) f();", "if (__any(p)) f();"),
        ("constexpr int kWarpSize = 32;", "constexpr int kWarpSize = 64;"),
        ("#define WARP_SIZE 32", "#define WARP_SIZE 64"),
        ("f(const __grid_constant__ P p)", "f(const P p)"),
    ],
)
def test_renamed(hipify, cuda, hip):
    assert hipify.hipify(cuda) == hip
    assert hipify.leftovers("kernels/x.h", hip) == []


def test_a_warp_barrier_orders_memory(hipify):
    text = hipify.hipify("__syncwarp();")
    assert "wave_barrier" in text and text.count("fence") == 2 and hipify.leftovers("x.h", text) == []


@pytest.mark.parametrize(
    "text",
    [
        "// cudaMalloc, __shfl_xor_sync(0xffffffff, x, 1), kWarpSize = 32",
        "/* CUdevice\n __syncwarp() */ int x;",
        "const void* cu_seqlens_q;  int current, cube, cut;",
        'const char* s = "// cudaMalloc"; int tile = 32;',
        "tile % 32 == 0 && kCols / 32 && chunk << 5",
        "__syncthreads(); int i = threadIdx.x;",
    ],
)
def test_stays(hipify, text):
    assert hipify.hipify(text) == text


def test_a_neutral_text_costs_no_import_of_torch():
    code = f"""
import runpy, sys
sys.modules["torch"] = None  # any import of torch raises
h = runpy.run_path({str(PROGRAM)!r})
assert h["generate"]() and h["hipify"]("int cu_seqlens_q;  // cudaMalloc")
try:
    h["hipify"]("cudaMalloc")
except ImportError:
    print("wanted torch")
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "wanted torch\n"


# ---------------------------------------------------------------- the gate
LEFT = {
    "a runtime call that torch does not know": ("cudaFoo();", "cudaFoo"),
    "a driver type": ("CUtensorMap map;", "CUtensorMap"),
    "a driver constant": ("CU_TENSOR_MAP_SWIZZLE_128B", "CU_TENSOR_MAP_SWIZZLE_128B"),
    "an architecture macro": ("#if __CUDA_ARCH__ >= 800", "__CUDA_ARCH__"),
    "an intrinsic type": ("__nv_fp4_e2m1 x;", "__nv_fp4_e2m1"),
    "a type": ("nvFoo x;", "nvFoo"),
    "a library": ("cutlass::half_t x;", "cutlass"),
    "CuTe": ("cute::Tensor x;", "cute"),
    "CUB": ("cub::WarpReduce<float> r;", "cub"),
    "a header of CUDA": ("#include <cuda/barrier>", "cuda"),
    "WMMA": ("#include <mma.h>", "#include <mma.h>"),
    "PTX": ('asm volatile("cp.async.commit_group;");', "asm"),
    "PTX, spelled otherwise": ('__asm__("ex2.approx.f32 %0, %1;")', "__asm__"),
    "a mask": ("u32 mask = 0xffffffff;", "0xffffffff"),
    "a mask, spelled otherwise": ("u32 mask = 0xFFFFFFFFu;", "0xFFFFFFFFu"),
    "a ballot": ("u32 m = __ballot_sync(0xffffffffu, p);", "__ballot_sync"),
    "a partial mask": ("x = __shfl_sync(mask, x, 0);", "__shfl_sync"),
    "the active lanes": ("u32 m = __activemask();", "__activemask"),
    "a barrier of some lanes": ("__syncwarp(0xffu);", "__syncwarp"),
    "one bit per lane": ("m = 1 << lane;", "1 << lane"),
    "one bit per lane, unsigned": ("m = 1u << (lane_id());", "1u << (lane_id"),
    "warpSize": ("int n = warpSize;", "warpSize"),
    "remainder by 32": ("lane = threadIdx.x % 32;", "threadIdx.x % 32"),
    "quotient by 32": ("warp = thread / 32;", "thread / 32"),
    "31 as a mask": ("lane = tid & 31;", "tid & 31"),
    "a shift by 5": ("warp = threadIdx.x >> 5;", "threadIdx.x >> 5"),
    "threads of some warps": ("n = Config::num_warps * 32;", "num_warps * 32"),
    "threads of some warps, turned": ("n = 32 * kWarps;", "32 * kWarps"),
    "a comparison": ("if (lane < 32) f();", "lane < 32"),
    "a constant": ("constexpr int kLanes = 32;", "kLanes = 32"),
    "shared addresses": ("x = __cvta_generic_to_shared(p);", "__cvta_generic_to_shared"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_a_leftover_is_caught(hipify, kind):
    text, word = LEFT[kind]
    found = hipify.leftovers("kernels/x.h", hipify.hipify(f"// first\n/* second\n*/ {text}\n"))
    assert [(x.file, x.line) for x in found][:1] == [("kernels/x.h", 3)]
    assert word in [x.word for x in found]


def test_every_rule_has_a_leftover_that_only_it_catches(hipify, monkeypatch):
    for rule in hipify._RULES:
        others = tuple(r for r in hipify._RULES if r is not rule)
        monkeypatch.setattr(hipify, "_RULES", others)
        missed = [kind for kind, (text, _) in LEFT.items() if not hipify.leftovers("x.h", hipify.hipify(text))]
        assert missed, f"no case needs the rule: {rule[1]}"


@pytest.mark.parametrize(
    "text",
    [
        "const void* cu_seqlens_q = p.cu_seqlens_q;",
        "static_assert(kCols % 32 == 0);  // 32 lanes, cudaMalloc",
        "const int width = kCols % 64 == 0 ? 64 : 32;",
        "lane = thread % Arch::kWarpSize; s64 far = 0xffffffffffffffff; u64 bit = 1ull << lane;",
        "warp * 16 * kRowGroups; int per_thread = 320; kUnbounded = 0x3fffffff;",
    ],
)
def test_what_is_no_leftover(hipify, text):
    assert hipify.leftovers("x.h", text) == []


def test_the_kernel_tree_is_clean():
    done = run("--check", "--out", "/nonexistent")
    assert done.returncode == 0, done.stderr
    assert " 0 findings" in done.stdout


def test_check_names_file_line_and_word(tmp_path):
    program = copied(tmp_path, softmax="\nint lane = threadIdx.x % 32;\n")
    done = run("--check", program=program)
    lines = (tmp_path / "csrc_cuda" / "kernels" / "softmax.h").read_text().count("\n")
    assert done.returncode == 1
    assert f"kernels/softmax.h:{lines}: 'threadIdx.x % 32'" in done.stderr


def test_check_names_headers_that_are_not_in_the_tree(tmp_path):
    done = run("--check", program=copied(tmp_path, params="\n#include <cuda_fp16.h>\n"))
    assert done.returncode == 1 and "'hip/hip_fp16.h' is not in the tree" in done.stderr


def test_what_was_written_is_the_tree_and_stale_files_are_named(tmp_path):
    program, out = copied(tmp_path, params="\n// cudaMalloc\nstruct cudaEvent_t;\n"), tmp_path / "out"
    assert "1 of them changed" in run("--out", out, program=program).stdout
    text = (out / "kernels" / "params.h").read_text()
    assert text.endswith("// cudaMalloc\nstruct hipEvent_t;\n")
    assert run("--check", "--out", out, program=program).returncode == 0
    (out / "kernels" / "params.h").write_text(text + " ")
    (out / "kernels" / "old.h").write_text("")
    done = run("--check", "--out", out, program=program)
    assert done.returncode == 1 and [f"{n}.h: out of date" in done.stderr for n in ("params", "old")] == [True, True]
    run("--out", out, program=program)
    assert run("--check", "--out", out, program=program).returncode == 0


def test_sources_are_not_overwritten(tmp_path):
    program = copied(tmp_path)
    before = (tmp_path / "csrc_cuda" / "kernels" / "params.h").stat()
    done = run("--out", tmp_path / "csrc_cuda", program=program)
    assert done.returncode == 2 and "holds the sources" in done.stderr
    assert (tmp_path / "csrc_cuda" / "kernels" / "params.h").stat() == before


def test_help_says_what_it_does():
    done = run("--help")
    assert done.returncode == 0 and "--check" in done.stdout and "--out DIR" in done.stdout


# ---------------------------------------------------------------- images
def test_images_for_amd_are_made_from_hipified_text(monkeypatch, fresh_sources):
    """The shared tree in HIP's names, everything else as it lies there; and the address follows the text."""
    before, nvidia = AMD.key(), ImageSpec("arch/sm80/forward.cu", AMD.config, "sm_80")
    read, nvidia_before = images._read, nvidia.key()

    def with_cuda(name):
        return read(name) + ("\nstruct cudaEvent_t;\n" if name in ("kernels/params.h", "arch/cdna/isa.h") else "")

    monkeypatch.setattr(images, "_read", with_cuda)
    images.sources.cache_clear()
    text = images.sources(AMD.entry, AMD.arch)
    assert text["kernels/params.h"].endswith("struct hipEvent_t;\n")
    assert text["arch/cdna/isa.h"].endswith("struct cudaEvent_t;\n")
    assert images.sources(nvidia.entry, nvidia.arch)["kernels/params.h"].endswith("struct cudaEvent_t;\n")
    assert AMD.key() != before and nvidia.key() != nvidia_before


def test_the_address_follows_what_hipify_does(monkeypatch, fresh_sources):
    before = AMD.key()
    images.sources.cache_clear()
    monkeypatch.setattr(images, "_hipify", lambda: lambda text: text + "\n")
    assert AMD.key() != before


def test_a_folder_written_earlier_is_not_compiled(tmp_path, monkeypatch, fresh_sources):
    program = copied(tmp_path)
    run(program=program)
    stale = tmp_path / "csrc_hip" / "hipified" / "kernels" / "params.h"
    stale.write_text("#error stale\n")
    roots = [tmp_path / "csrc_cuda", tmp_path / "csrc_hip", *images.source_roots()]
    monkeypatch.setattr(images, "source_roots", lambda: roots)
    assert "stale" not in images.sources(AMD.entry, AMD.arch)["kernels/params.h"]


def test_every_compiler_for_amd_is_given_the_hipified_text(monkeypatch, tmp_path, fresh_sources):
    """HIPRTC by a stand-in for its bindings, clang by a stand-in for the program: both get what sources() gives."""
    marker = "// through hipify\n"
    monkeypatch.setattr(images, "_hipify", lambda: lambda text: text + marker)

    class Seen(Exception):
        pass

    def create(main, name, count, bodies, names):
        raise Seen(dict(zip(names, bodies, strict=True)))

    hiprtc = SimpleNamespace(hiprtcCreateProgram=create)
    monkeypatch.setitem(sys.modules, "hip", SimpleNamespace(hiprtc=hiprtc))
    with pytest.raises(Seen) as seen:
        jit.Hiprtc().compile(AMD)
    assert seen.value.args[0][b"kernels/params.h"].decode().endswith(marker)

    program = tmp_path / "clang"
    program.write_text(
        '#!/bin/sh\nfor last; do :; done\ncp "$(dirname "$last")/../../kernels/params.h" ' + f"{tmp_path}/got\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(jit.Clang, "program", lambda self: str(program))
    monkeypatch.setattr(jit.Clang, "version", lambda self: "a stand-in")
    with pytest.raises(jit.CompileError):
        jit.Clang().compile(AMD)
    assert (tmp_path / "got").read_text().endswith(marker)
