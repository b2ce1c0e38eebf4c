"""Which compiler makes an image, and which image serves a device: with stand-ins for compilers and stores."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from xattn import jit, nvrtc12
from xattn.backends import REGISTRY
from xattn.errors import UnsupportedError
from xattn.images import Image, ImageSpec, Store

ENTRY = "arch/sm80/forward.cu"
CONFIG = (("element", "bf16"), ("head_dim", 64), ("head_dim_v", 64))


class Fake:
    """A compiler for every architecture, or for ``knows`` only; it refuses the others as too new."""

    name = "fake"

    def __init__(self, version: str = "fake 1.0", knows: tuple[str, ...] = (), missing: str = ""):
        self._version, self.knows, self._missing = version, knows, missing
        self.compiled: list[str] = []

    def missing(self) -> str:
        return self._missing

    def serves(self, arch: str) -> bool:
        return not arch.startswith("host")

    def version(self) -> str:
        assert not self._missing, "asked for the version of what is not there"
        return self._version

    def compile(self, spec: ImageSpec) -> tuple[bytes, str, str]:
        self.compiled.append(spec.arch)
        if self.knows and spec.arch not in self.knows:
            raise jit.CompileError(f"invalid value {spec.arch}")
        return f"compiled by {self._version}".encode(), "ptx" if spec.arch.startswith("compute") else "cubin", ""


ABSENT = Fake(missing="pip install it")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name, empty in (("_chosen", {}), ("_refused", set()), ("_locks", {})):
        monkeypatch.setattr(jit, name, empty)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(compilers, shipped archs, cached archs) -> its store."""

    def make(compilers=(), shipped=(), cached=()) -> Store:
        from xattn import images

        monkeypatch.setattr(jit, "COMPILERS", compilers)
        for folder, archs in (("shipped", shipped), ("cache", cached)):
            for arch in archs:
                images.publish(ready(arch, folder), tmp_path / folder)
        return Store(shipped=(tmp_path / "shipped",), cache=tmp_path / "cache")

    return make


def ready(arch: str, where: str = "shipped") -> Image:
    spec = ImageSpec(ENTRY, CONFIG, arch)
    return Image(spec.key(), arch, "cubin", spec.name(), "nvrtc 12.9", where.encode())


def choose(arch: str, store: Store) -> Image:
    return jit.choose(ENTRY, CONFIG, arch, store)


# ---------------------------------------------------------------- what is ready is taken, and nothing is compiled
@pytest.mark.parametrize(
    "device, lies, taken",
    [
        ("sm_80", ["sm_80", "compute_80"], "sm_80"),
        ("sm_86", ["sm_80", "compute_80"], "sm_80"),
        ("sm_89", ["sm_80", "compute_80", "sm_89"], "sm_89"),
        ("sm_90", ["sm_80", "compute_80", "sm_90a"], "sm_90a"),
        ("sm_90", ["sm_90a", "sm_90"], "sm_90"),
        ("gfx942", ["gfx90a", "gfx942"], "gfx942"),
    ],
)
@pytest.mark.parametrize("compiler", [True, False])
def test_a_shipped_image_that_runs_as_it_is(machine, device, lies, taken, compiler):
    fake = Fake()
    image = choose(device, machine((fake,) if compiler else (ABSENT,), shipped=lies))
    assert (image.arch, image.code, fake.compiled) == (taken, b"shipped", [])


def test_what_this_machine_compiled_for_itself_comes_before_what_serves_all_of_8x(machine):
    image = choose("sm_86", machine(shipped=["sm_80"], cached=["sm_86"]))
    assert (image.arch, image.code) == ("sm_86", b"cache")


# ---------------------------------------------------------------- else a compiler, else PTX
@pytest.mark.parametrize(
    "device, lies",
    [
        ("sm_86", ["compute_80"]),
        ("sm_87", ["sm_80", "compute_80"]),
        ("sm_90", ["sm_80", "compute_80"]),
        ("sm_120", ["sm_80", "sm_90a", "compute_80"]),
        ("gfx90a", ["gfx942"]),
    ],
)
def test_compiled_for_the_device_and_kept(machine, device, lies):
    fake = Fake()
    store = machine((ABSENT, fake), shipped=lies)
    assert choose(device, store).arch == device
    assert choose(device, store).path.startswith(str(store.cache)), "not found in the cache the second time"
    assert fake.compiled == [device]


@pytest.mark.parametrize("device", ["sm_86", "sm_90", "sm_100", "sm_130"])
def test_ptx_where_no_compiler_is(machine, device):
    image = choose(device, machine((ABSENT,), shipped=["compute_80"]))
    assert (image.arch, image.code) == ("compute_80", b"shipped")


@pytest.mark.parametrize("shipped", [["compute_80"], []])
def test_ptx_where_the_compiler_is_older_than_the_device(machine, shipped):
    fake = Fake(knows=("sm_90", "compute_80"))
    image = choose("sm_130", machine((fake,), shipped=shipped))
    assert image.arch == "compute_80"
    assert fake.compiled == (["sm_130"] if shipped else ["sm_130", "compute_80"])


def test_a_kernel_for_the_own_instructions_of_an_architecture(machine):
    """Neither another architecture's image nor PTX stands in."""
    store = machine((ABSENT,), shipped=["sm_80", "sm_90", "compute_80"])
    with pytest.raises(UnsupportedError, match=r"looked for: sm_90a\); no compiler for sm_90a"):
        choose("sm_90a", store)
    fake = Fake()
    assert choose("sm_90a", machine((fake,))).arch == "sm_90a" and fake.compiled == ["sm_90a"]
    assert choose("sm_90a", machine((ABSENT,), shipped=["sm_90a"])).code == b"shipped"


def test_a_fault_of_the_sources_is_raised_as_such(machine):
    fake = Fake(knows=("nothing",))
    with pytest.raises(jit.CompileError, match="invalid value sm_90"):
        choose("sm_90", machine((fake,)))


def test_a_broken_shipped_image_is_passed_over(machine, tmp_path):
    store = machine((Fake(),), shipped=["sm_80"])
    (path,) = (tmp_path / "shipped").rglob("*.image")
    path.write_bytes(path.read_bytes()[:-1])
    assert choose("sm_80", store).code == b"compiled by fake 1.0"


@pytest.mark.parametrize("device, looked_for", [("sm_86", "sm_86, sm_80"), ("gfx942", "gfx942")])
def test_nothing_serves(machine, device, looked_for):
    with pytest.raises(UnsupportedError) as raised:
        choose(device, machine((ABSENT,), shipped=["sm_90a", "gfx950"]))
    text = str(raised.value)
    assert f"no image of {ENTRY} for {device}" in text and f"looked for: {looked_for}" in text
    assert "fake: pip install it" in text and ("no PTX either" in text) == device.startswith("sm_")


# ---------------------------------------------------------------- what the driver refuses
def test_a_refused_shipped_image_is_compiled_here(machine):
    """Also where both have one address, and in processes to come: they find the cached one behind the wheel's."""
    fake = Fake()
    store = machine((fake,), shipped=["sm_80"])
    shipped = choose("sm_80", store)
    jit.refuse(shipped)
    for _ in range(2):
        image = choose("sm_80", store)
        assert (image.key, image.code) == (shipped.key, b"compiled by fake 1.0")
    assert fake.compiled == ["sm_80"]


def test_what_the_newest_compiler_made_is_refused_too(machine):
    newest, older = Fake("fake 13.5"), Fake("fake 12.9")
    store = machine((newest, older))
    jit.refuse(choose("sm_90", store))
    assert choose("sm_90", store).compiler == "fake 12.9"
    jit.refuse(choose("sm_90", store))
    assert choose("sm_90", store).arch == "compute_80", "no compiler is left: PTX"
    for _ in range(2):
        jit.refuse(choose("sm_90", store))
    with pytest.raises(UnsupportedError, match="the driver refused what it made"):
        choose("sm_90", store)


def test_the_choice_is_remembered_until_it_is_refused(machine, monkeypatch):
    store = machine((Fake(),), shipped=["sm_80"])
    monkeypatch.setattr(jit, "Store", lambda: store)
    first = jit.choose(ENTRY, CONFIG, "sm_80")
    monkeypatch.setattr(store, "shipped", ())
    assert jit.choose(ENTRY, CONFIG, "sm_80") is first
    jit.refuse(first)
    assert jit.choose(ENTRY, CONFIG, "sm_80").compiler == "fake 1.0"


# ---------------------------------------------------------------- compilers
def test_a_compiler_that_is_missing_says_so():
    with pytest.raises(UnsupportedError, match="no compiler for sm_80: fake: pip install it"):
        jit.compiler_for("sm_80", (ABSENT,))
    with pytest.raises(UnsupportedError, match="no compiler knows this architecture"):
        jit.compiler_for("host", (ABSENT,))


@pytest.mark.parametrize(
    ("text", "lacks"),
    [("#!/bin/sh\nexit 1\n", "exit status 1"), ("#!/bin/sh\n", "prints nothing"), ("no\0", "Exec format")],
)
def test_a_program_that_does_not_run_is_no_compiler(tmp_path, monkeypatch, text, lacks):
    """As a link to a clang that is gone, or one of another machine."""
    (tmp_path / "clang++-22").write_text(text)
    (tmp_path / "clang++-22").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler = jit.Clang()
    assert lacks in compiler.missing() and str(tmp_path) in compiler.missing()
    with pytest.raises(UnsupportedError, match=lacks):
        jit.compiler_for("gfx942", (compiler,))


def test_a_temporary_folder_that_is_full_is_a_failed_compilation(monkeypatch):
    """Where one is expected, so that another image or another backend serves."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(jit.CompileError, match="No space left on device"):
        jit.HostCompiler().compile(ImageSpec("arch/host/forward_sm80.cpp", (), "host-sm80"))


def test_what_is_shipped_is_compiled_for_older_drivers():
    names = [c.name for c in jit.SHIPPING]
    assert names[:2] == ["nvrtc12", "nvrtc"] and sorted(names) == sorted(c.name for c in jit.COMPILERS)


FAKE_NVRTC = r"""
#include <cstdio>
#include <cstring>
#include <string>
struct Program { std::string source, log, code; };
static bool refuses(const std::string& s) { return s.find("#error") != std::string::npos; }
extern "C" {
int nvrtcVersion(int* major, int* minor) { *major = 12; *minor = 9; return 0; }
int nvrtcGetNumSupportedArchs(int* n) { *n = 2; return 0; }
int nvrtcGetSupportedArchs(int* numbers) { numbers[0] = 80; numbers[1] = 90; return 0; }
int nvrtcCreateProgram(Program** p, const char* source, const char* name, int n, const char* const* bodies,
                       const char* const* names) {
    *p = new Program{std::string(name) + ":" + source, "", ""};
    for (int i = 0; i < n; ++i) (*p)->source += std::string("|") + names[i] + ":" + bodies[i];
    return 0;
}
int nvrtcCompileProgram(Program* p, int n, const char* const* flags) {
    for (int i = 0; i < n; ++i) p->log += std::string(flags[i]) + "\n";
    p->code = p->source;
    return refuses(p->source) ? 6 : 0;
}
int nvrtcDestroyProgram(Program** p) { delete *p; *p = nullptr; return 0; }
int nvrtcGetProgramLogSize(Program* p, size_t* n) { *n = p->log.size() + 1; return 0; }
int nvrtcGetProgramLog(Program* p, char* to) { strcpy(to, p->log.c_str()); return 0; }
int nvrtcGetCUBINSize(Program* p, size_t* n) { *n = p->code.size(); return 0; }
int nvrtcGetCUBIN(Program* p, char* to) { memcpy(to, p->code.data(), p->code.size()); return 0; }
int nvrtcGetPTXSize(Program* p, size_t* n) { *n = 3; return 0; }
int nvrtcGetPTX(Program*, char* to) { memcpy(to, "PTX", 3); return 0; }
}
"""


@pytest.fixture(scope="module")
def fake_library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvrtc")
    (folder / "nvrtc.cpp").write_text(FAKE_NVRTC)
    program = jit.HostCompiler().program()
    assert program, "tests of kernels on the CPU need a C++ compiler too"
    target = folder / "libnvrtc.so.12"
    subprocess.run([program, "-shared", "-fPIC", "-o", str(target), str(folder / "nvrtc.cpp")], check=True)
    return target


@pytest.fixture
def compiler(fake_library, monkeypatch):
    """NVRTC 12.9 with a library that hands back what it was given."""
    library = nvrtc12.Library(str(fake_library))
    monkeypatch.setattr(nvrtc12, "library", lambda: library)
    return jit.Nvrtc12()


def test_nvrtc_12_is_given_sources_and_flags(compiler):
    spec = ImageSpec(ENTRY, CONFIG, "sm_80")
    assert (compiler.missing(), compiler.version()) == ("", "nvrtc 12.9")
    code, kind, text = compiler.compile(spec)
    assert kind == "cubin" and "--gpu-architecture=sm_80" in text.splitlines()
    given = code.decode()
    assert given.startswith(f"{ENTRY}:// Entry of the sm80 forward kernel")
    assert f"|config.h:{spec.header()}" in given and "|kernels/softmax.h:" in given
    assert compiler.compile(replace(spec, arch="compute_80"))[:2] == (b"PTX", "ptx")


def test_nvrtc_12_serves_what_it_knows(compiler):
    assert [a for a in ("sm_80", "sm_90a", "compute_90", "sm_110", "sm_8", "gfx942", "host") if compiler.serves(a)] == [
        "sm_80",
        "sm_90a",
        "compute_90",
    ]
    newer = Fake("nvrtc 13.5")
    assert jit.compiler_for("sm_80", (compiler, newer)) is compiler
    assert jit.compiler_for("sm_110", (compiler, newer)) is newer
    with pytest.raises(UnsupportedError, match="no compiler for sm_999: no compiler knows this architecture"):
        jit.compiler_for("sm_999", (compiler,))


def test_nvrtc_12_refuses(compiler, monkeypatch):
    spec = ImageSpec(ENTRY, CONFIG, "sm_80")
    monkeypatch.setattr(jit, "sources", lambda entry, arch: {entry: "#error"})
    with pytest.raises(jit.CompileError, match=r"nvrtc 12.9 refused arch/sm80/forward.cu .*\n--gpu-arch"):
        compiler.compile(spec)


def test_nvrtc_12_where_it_is_not(monkeypatch):
    monkeypatch.setattr(nvrtc12, "library", lambda: nvrtc12.Library("/nonexistent/libnvrtc.so.12"))
    absent = jit.Nvrtc12()
    assert "pip install 'nvidia-cuda-nvrtc-cu12>=12.9'" in absent.missing()
    assert absent.serves("sm_80") and not absent.serves("gfx942")
    with pytest.raises(UnsupportedError, match="no compiler for sm_80: nvrtc12: NVRTC 12.9 cannot be loaded"):
        jit.compiler_for("sm_80", (absent,))


def test_the_bindings_load_their_nvrtc_first(fake_library, monkeypatch):
    """They would take 12.9, were it in the process already. That they are not there is no error."""
    order = []
    bindings = ModuleType("cuda.bindings")
    bindings.nvrtc = SimpleNamespace(nvrtcVersion=lambda: order.append("bindings"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(nvrtc12, "_path", lambda: order.append("12.9") or str(fake_library))
    nvrtc12.library.__wrapped__()
    assert order == ["bindings", "12.9"]
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert nvrtc12.library.__wrapped__().nvrtcVersion() == (0, 12, 9)


def test_the_wheel_of_nvrtc_12_comes_before_the_system(tmp_path, monkeypatch):
    lib = tmp_path / "nvidia" / "cuda_nvrtc" / "lib"
    lib.mkdir(parents=True)
    spec = type("Spec", (), {"submodule_search_locations": [str(lib.parent)]})
    monkeypatch.setattr(nvrtc12, "find_spec", lambda name: spec)
    assert nvrtc12._path() == "libnvrtc.so.12"
    (lib / "libnvrtc.so.12").touch()
    assert Path(nvrtc12._path()) == lib / "libnvrtc.so.12"
    monkeypatch.setattr(nvrtc12, "find_spec", lambda name: None)
    assert nvrtc12._path() == "libnvrtc.so.12"


# ---------------------------------------------------------------- logs
@pytest.mark.parametrize(
    "log, spilled, line",
    [
        ("ptxas . 40 bytes stack frame, 48 bytes spill stores, 124 bytes spill loads", 172, ""),
        ("ptxas . 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", 0, ""),
        ("ptxas info : (C7510) Potential Performance Loss: wgmma ...\nmore", 0, "ptxas info : (C7510)"),
        ("first\nptxas info : (C7520) Potential Performance Loss", 0, "ptxas info : (C7520)"),
        ("ptxas info : (C7600) something else", 0, ""),
    ],
)
def test_what_a_log_says(log, spilled, line):
    image = replace(ready("sm_80"), log=log)
    assert jit.spilled_bytes(image) == spilled
    assert jit.serialised(image).startswith(line) and bool(jit.serialised(image)) == bool(line)


# ---------------------------------------------------------------- what the backends name
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "compute_80", "gfx90a", "gfx942", "gfx950"])
def test_backends_name_images_of_the_architecture(arch):
    specs = [spec for b in REGISTRY for spec in b.images(arch)]
    assert specs and len(set(specs)) == len(specs)
    assert {spec.arch for spec in specs} == {arch}


@pytest.mark.parametrize("arch", ["sm_75", "gfx1100", "compute_70", "host-sm80", "sm_", "cpu", ""])
def test_backends_name_no_images_of_others(arch):
    assert not [spec for b in REGISTRY for spec in b.images(arch)]
