"""Compilers of kernel images, behind one protocol: NVRTC, HIPRTC, clang for AMD without ROCm, and the host's C++
compiler for tests. And the choice of the image that serves a device."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Container, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from . import nvrtc12, settings
from .concurrency import ForkSafeLock
from .errors import UnsupportedError
from .images import CONFIG_HEADER, ConfigValue, Image, ImageSpec, Store, listed, sources

log = logging.getLogger("xattn")


class CompileError(RuntimeError):
    """A compiler refused an image: a fault of this package or of the compiler, with its log."""


class Compiler(Protocol):
    """Makes code from (sources, config.h, architecture)."""

    name: str

    def missing(self) -> str:
        """What is not there to run it, in words; "" where it can run."""

    def serves(self, arch: str) -> bool: ...

    def version(self) -> str: ...

    def compile(self, spec: ImageSpec) -> tuple[bytes, str, str]:
        """(code, its kind, the compiler's log). Raises CompileError."""


class Nvrtc:
    """NVIDIA's run-time compiler, through cuda-python's bindings; its Python wheel suffices."""

    name = "nvrtc"

    def missing(self) -> str:
        if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
            return "cuda-python is not installed: pip install 'xattn[cuda13]' or 'xattn[cuda12]', as your torch is"
        try:
            self.version()
        except Exception as error:  # the bindings are there and the library is not
            return f"NVRTC cannot be loaded ({error}): pip install 'xattn[cuda13]' or 'xattn[cuda12]', as your torch is"
        return ""

    def serves(self, arch: str) -> bool:
        """Of an NVRTC that is not there, also what it might know: ``missing`` has the word then."""
        vendor, _, number = arch.partition("_")
        return vendor in ("sm", "compute") and (bool(self.missing()) or number.rstrip("af") in self._numbers())

    @lru_cache  # noqa: B019 - instances live as long as the process
    def _numbers(self) -> tuple[str, ...]:
        """The architectures that it knows: "80", "90"."""
        (numbers,) = self._check(self.library().nvrtcGetSupportedArchs())
        return tuple(map(str, numbers))

    @lru_cache  # noqa: B019 - instances live as long as the process
    def version(self) -> str:
        major, minor = self._check(self.library().nvrtcVersion())
        return f"nvrtc {major}.{minor}"

    def library(self) -> Any:
        """The functions of NVRTC, each of which returns a status and its results."""
        from cuda.bindings import nvrtc

        return nvrtc

    def compile(self, spec: ImageSpec) -> tuple[bytes, str, str]:
        nvrtc = self.library()
        texts = {**sources(spec.entry, spec.arch), CONFIG_HEADER: spec.header()}
        main = texts.pop(spec.entry)
        names = [n.encode() for n in texts]
        bodies = [t.encode() for t in texts.values()]
        (program,) = self._check(
            nvrtc.nvrtcCreateProgram(main.encode(), spec.entry.encode(), len(names), bodies, names)
        )
        # 128: a loop that a constant condition leaves out
        flags = [f"--gpu-architecture={spec.arch}", "--std=c++17", "--ptxas-options=-v", "-diag-suppress=128"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
        text = self._get(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0 ").decode()
        try:
            if int(status) != 0:
                raise CompileError(f"{self.version()} refused {spec.name()}:\n{text}")
            if spec.arch.startswith("compute_"):
                return self._get(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program), "ptx", text
            return self._get(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), "cubin", text
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _get(self, size_of: Any, get: Any, program: Any) -> bytes:
        (size,) = self._check(size_of(program))
        buffer = bytes(size)
        self._check(get(program, buffer))
        return buffer

    @staticmethod
    def _check(result: tuple) -> tuple:
        if int(result[0]) != 0:
            raise CompileError(f"NVRTC: {result[0]!s}")
        return result[1:]


class Nvrtc12(Nvrtc):
    """NVRTC 12.9, beside a newer one: drivers of CUDA 12 and of CUDA 13 take what it makes. It needs no cuda-python."""

    name = "nvrtc12"

    def missing(self) -> str:
        try:
            self.version()
        except (OSError, RuntimeError) as error:
            return f"NVRTC 12.9 cannot be loaded ({error}): pip install 'nvidia-cuda-nvrtc-cu12>=12.9'"
        return ""

    def library(self) -> Any:
        return nvrtc12.library()


class Hiprtc:
    """AMD's run-time compiler, through hip-python."""

    name = "hiprtc"

    def missing(self) -> str:
        if find_spec("hip") is None:
            return "hip-python is not installed: pip install 'xattn[rocm]'"
        try:
            self.version()
        except Exception as error:
            return f"HIPRTC cannot be loaded ({error})"
        return ""

    def serves(self, arch: str) -> bool:
        return arch.startswith("gfx")

    @lru_cache  # noqa: B019 - instances live as long as the process
    def version(self) -> str:
        from hip import hiprtc

        _, major, minor = hiprtc.hiprtcVersion()
        return f"hiprtc {major}.{minor}"

    def compile(self, spec: ImageSpec) -> tuple[bytes, str, str]:
        from hip import hiprtc

        texts = {**sources(spec.entry, spec.arch), CONFIG_HEADER: spec.header()}
        main = texts.pop(spec.entry)
        names, bodies = [n.encode() for n in texts], [t.encode() for t in texts.values()]
        status, program = hiprtc.hiprtcCreateProgram(main.encode(), spec.entry.encode(), len(names), bodies, names)
        flags = [f"--offload-arch={spec.arch}".encode(), b"-std=c++17", b"-O3"]
        (status,) = hiprtc.hiprtcCompileProgram(program, len(flags), flags)
        _, size = hiprtc.hiprtcGetProgramLogSize(program)
        text = bytearray(size)
        hiprtc.hiprtcGetProgramLog(program, text)
        if status != hiprtc.hiprtcResult.HIPRTC_SUCCESS:
            raise CompileError(f"{self.version()} refused {spec.name()}:\n{text.decode()}")
        _, size = hiprtc.hiprtcGetCodeSize(program)
        code = bytearray(size)
        hiprtc.hiprtcGetCode(program, code)
        hiprtc.hiprtcDestroyProgram(program.createRef())
        return bytes(code), "hsaco", text.decode()


class _OnDisk:
    """A compiler that is a program: sources and config.h are laid into a temporary folder."""

    name = ""
    candidates: Sequence[str] = ()

    def program(self) -> str | None:
        return next((found for c in self.candidates if (found := shutil.which(c))), None)

    def missing(self) -> str:
        if not (program := self.program()):
            return f"none of {', '.join(self.candidates)} is on the PATH"
        try:
            self.version()
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            return f"{program} does not say its version ({error})"
        return ""

    @lru_cache  # noqa: B019 - instances live as long as the process
    def version(self) -> str:
        program = self.program()
        assert program is not None
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        if not said.strip():
            raise ValueError("it prints nothing")
        return said.strip().splitlines()[0]

    def run(self, spec: ImageSpec, flags: Sequence[str], kind: str) -> tuple[bytes, str, str]:
        program = self.program()
        assert program is not None
        try:
            with tempfile.TemporaryDirectory(prefix="xattn-") as folder:
                for name, text in {**sources(spec.entry, spec.arch), CONFIG_HEADER: spec.header()}.items():
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text)
                target = Path(folder, "image")
                command = [program, *flags, f"-I{folder}", "-o", str(target), str(Path(folder, spec.entry))]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise CompileError(f"{self.version()} refused {spec.name()}:\n{done.stderr}")
                return target.read_bytes(), kind, done.stderr
        except OSError as error:  # the temporary folder is full, or only read
            raise CompileError(f"{self.version()} could not be run for {spec.name()}: {error}") from error


class Clang(_OnDisk):
    """Plain clang for AMD: neither ROCm nor its headers are needed."""

    name = "clang"
    candidates = ("clang++-23", "clang++-22", "amdclang++", "clang++")

    def serves(self, arch: str) -> bool:
        return arch.startswith("gfx")

    def compile(self, spec: ImageSpec) -> tuple[bytes, str, str]:
        flags = [
            "-x",
            "hip",
            f"--offload-arch={spec.arch}",
            "--cuda-device-only",
            "--no-gpu-bundle-output",
            "-nogpuinc",
        ]
        flags += ["-nogpulib", "-fdeclspec", "-O3", "-std=c++17", "-munsafe-fp-atomics", "-c"]
        return self.run(spec, flags, "hsaco")


class HostCompiler(_OnDisk):
    """The machine's C++ compiler, for kernels that tests run on the CPU."""

    name = "host"
    candidates = (*settings.host_compilers(), "g++", "clang++", "c++")

    def serves(self, arch: str) -> bool:
        return arch.startswith("host")

    def compile(self, spec: ImageSpec) -> tuple[bytes, str, str]:
        return self.run(spec, ["-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-DXATTN_HOST"], "host")


# For this machine, and for others: what is shipped should serve older drivers too.
COMPILERS: tuple[Compiler, ...] = (Nvrtc(), Nvrtc12(), Hiprtc(), Clang(), HostCompiler())
SHIPPING: tuple[Compiler, ...] = (COMPILERS[1], COMPILERS[0], *COMPILERS[2:])

_locks: dict[str, ForkSafeLock] = {}
_guard = ForkSafeLock()


def compiler_for(arch: str, compilers: Sequence[Compiler] | None = None, without: Container[str] = ()) -> Compiler:
    """The first compiler that serves ``arch`` and is there; UnsupportedError says what each lacks. ``without``:
    versions not to take."""
    reasons = []
    for compiler in COMPILERS if compilers is None else compilers:
        if compiler.serves(arch):
            missing = compiler.missing()
            if not missing and compiler.version() not in without:
                return compiler
            reasons.append(f"{compiler.name}: {missing or 'the driver refused what it made'}")
    raise UnsupportedError(f"no compiler for {arch}: " + ("; ".join(reasons) or "no compiler knows this architecture"))


def build(spec: ImageSpec, compiler: Compiler | None = None) -> Image:
    """Compiles an image, whether or not it is in a store."""
    compiler = compiler or compiler_for(spec.arch)
    start = time.perf_counter()
    code, kind, text = compiler.compile(spec)
    log.info("compiled %s with %s in %.2f s", spec.name(), compiler.version(), time.perf_counter() - start)
    return Image(spec.key(), spec.arch, kind, spec.name(), compiler.version(), code, text)


def get(spec: ImageSpec, store: Store | None = None) -> Image:
    """The image of ``spec``: from the store, else compiled and kept. Threads that want the same one compile it once.
    Neither is one that a driver refused (see ``refuse``)."""
    store = store or Store()
    with _guard:
        lock = _locks.setdefault(spec.key(), ForkSafeLock())
    with lock:
        image = store.find(spec, _refused)
        if image is None:
            refused = {version for key, version in tuple(_refused) if key == spec.key()}
            image = build(spec, compiler_for(spec.arch, without=refused))
            store.put(image)
        return image


# ---------------------------------------------------------------- the choice of an image
PTX = "compute_80"  # what serves NVIDIA architectures that no image and no compiler knows

_chosen: dict[tuple, Image] = {}
_refused: set[tuple[str, str]] = set()


def choose(entry: str, config: tuple[tuple[str, ConfigValue], ...], arch: str, store: Store | None = None) -> Image:
    """The image of a kernel for a device of architecture ``arch``; remembered where no ``store`` is named.

    First what lies in the store and runs as it is: an image of that architecture, or on 8.x one of sm_80. Then one
    compiled for it now. Then PTX of compute_80, which the driver compiles; not for "sm_90a", by which a kernel says
    that it needs that architecture's own instructions. UnsupportedError says what each lacked; CompileError is a
    compiler's refusal where nothing else serves.
    """
    question = (entry, config, arch)
    found = _chosen.get(question) if store is None else None
    if found is None:
        found = _choose(entry, config, arch, store or Store())
        if store is None:
            _chosen[question] = found
    return found


@lru_cache
def missing(arch: str) -> str:
    """Why no image for ``arch`` could be had here, in words; "" where one can be compiled or some are ready."""
    store, ready = Store(), (*_ready_made(arch), *((PTX,) if _is_general(arch) else ()))
    if any(file.parent.name in ready for folder in (*store.shipped, store.cache) for file in listed(folder)):
        return ""
    try:
        compiler_for(arch)
    except UnsupportedError as error:
        return str(error)
    return ""


def _choose(entry: str, config: tuple[tuple[str, ConfigValue], ...], arch: str, store: Store) -> Image:
    first: UnsupportedError | CompileError
    ready = _ready_made(arch)
    for name in ready:
        image = store.find(ImageSpec(entry, config, name), _refused)
        if image is not None:
            return image
    try:
        return get(ImageSpec(entry, config, arch), store)
    except (UnsupportedError, CompileError) as error:  # none, or one that is older than the architecture
        first = error
    lacking = f"no image of {entry} for {arch} in the wheel or in {store.cache} (looked for: {', '.join(ready)})"
    if _is_general(arch):
        try:
            return get(ImageSpec(entry, config, PTX), store)
        except (UnsupportedError, CompileError) as error:
            lacking += f"; no PTX either: {error}"
    if isinstance(first, CompileError):
        raise first
    raise UnsupportedError(f"{lacking}; {first}")


def _ready_made(arch: str) -> tuple[str, ...]:
    """The architectures whose images a device of ``arch`` runs as they are, the best first."""
    if not _is_general(arch):
        return (arch,)
    if int(arch.removeprefix("sm_")) < 90:
        # Not on Tegra (CUDA C++ Programming Guide, "Binary Compatibility").
        return (arch,) if arch in ("sm_80", "sm_87") else (arch, "sm_80")
    return (arch, f"{arch}a")


def _is_general(arch: str) -> bool:
    """Whether it is NVIDIA's, and the kernel one for several architectures: not for sm_90a's own instructions."""
    return arch.startswith("sm_") and arch.removeprefix("sm_").isdigit()


def refuse(image: Image) -> None:
    """Notes that the driver refused to load ``image``, as an older one does what a newer compiler made: ``choose``,
    asked again, gives another one of its address, compiles it with another compiler, or gives PTX."""
    log.warning("the driver refused %s, made by %s; another is looked for", image.name, image.compiler)
    _refused.add(image.made())
    for question in [q for q, chosen in tuple(_chosen.items()) if chosen.made() == image.made()]:
        _chosen.pop(question, None)


# ---------------------------------------------------------------- what a compiler's log says
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def spilled_bytes(image: Image) -> int:
    """Bytes that ptxas spilled, as its log says."""
    return sum(int(stores) + int(loads) for _, stores, loads in _SPILLS.findall(image.log))


_SERIALISED = re.compile(r"^.*\bC75(?:1\d|20)\b.*$", re.MULTILINE)


def serialised(image: Image) -> str:
    """The line in which ptxas says that it made asynchronous matrix products wait for each other; "" where it did
    not."""
    found = _SERIALISED.search(image.log)
    return found[0].strip() if found else ""
