"""ci/build_wheels: what it makes of a wheel, that its audit finds what is wrong, that it says early what it lacks."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "ci" / "build_wheels"


def wheel_files_module():
    spec = importlib.util.spec_from_file_location("wheel_files", ROOT / "ci" / "wheel_files.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wheel_files = wheel_files_module()
Contents = wheel_files.Contents
METADATA = (
    "Metadata-Version: 2.4\nName: xattn\nVersion: 1.0\nRequires-Dist: torch>=2.10\n\nVersion: as it is in the text\n"
)
PURE, PLATFORM = "py3-none-any", "py3-none-manylinux_2_28_x86_64"


def compile_launcher(folder: Path, *flags: str, more: str = "") -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    assert compiler, "the tests of wheels need a C++ compiler"
    source = "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in sorted(wheel_files.EXPORTED)) + more
    target = folder / "launcher.so"
    shared = flags if "-static-libstdc++" in flags else ("-Wl,--no-as-needed", *flags)
    command = [compiler, "-x", "c++", "-", "-shared", "-fPIC", *shared, "-o", str(target)]
    subprocess.run(command, input=source, text=True, check=True)
    return target


@pytest.fixture(scope="module")
def launcher(tmp_path_factory) -> bytes:
    return compile_launcher(tmp_path_factory.mktemp("launcher")).read_bytes()


def base(folder: Path, launcher: bytes | None = None, *, metadata: str = METADATA, **files: str) -> Path:
    """A wheel as the build backend makes it, without a right RECORD."""
    tag = PLATFORM if launcher else PURE
    path = folder / f"xattn-1.0-{tag}.whl"
    info = "xattn-1.0.dist-info"
    texts: dict[str, str | bytes] = dict.fromkeys(
        ("xattn/__init__.py", "xattn/py.typed", "xattn/csrc_cuda/kernels/params.h", "xattn/csrc_hip/hipify.py"), "text"
    )
    texts |= {
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n",
        f"{info}/RECORD": "old",
    }
    if launcher:
        texts[wheel_files.LAUNCHER] = launcher
    with zipfile.ZipFile(path, "w") as made:
        for name, text in {**texts, **{n.replace("__", "/"): t for n, t in files.items()}}.items():
            made.writestr(name, text)
    return path


@pytest.fixture
def images(tmp_path) -> Path:
    for arch, number in (("gfx90a", 1), ("gfx942", 2), ("sm_80", 3)):
        (tmp_path / "images" / arch).mkdir(parents=True)
        for n in range(number):
            (tmp_path / "images" / arch / f"{n}.image").write_text(f"{arch} {n}")
    return tmp_path / "images"


# ---------------------------------------------------------------- making
def test_images_and_a_local_version_are_put_in(tmp_path, launcher, images):
    out = tmp_path / "out"
    out.mkdir()
    made = wheel_files.assemble(base(tmp_path, launcher), out, "rocm", images, ("gfx90a", "gfx942"))
    assert made.name == f"xattn-1.0+rocm-{PLATFORM}.whl" and wheel_files.local_version(made) == "1.0+rocm"
    assert wheel_files.image_counts(made) == {"gfx90a": 1, "gfx942": 2}
    assert wheel_files.audit(made, Contents("1.0+rocm", {"gfx90a": 1, "gfx942": 2}, True)) == []
    with zipfile.ZipFile(made) as opened:
        metadata = opened.read("xattn-1.0+rocm.dist-info/METADATA").decode()
        assert opened.read("xattn/images/gfx942/1.image") == b"gfx942 1" and opened.testzip() is None
    assert metadata == METADATA.replace("Version: 1.0\n", "Version: 1.0+rocm\n", 1)


def test_equal_inputs_give_equal_wheels(tmp_path, launcher, images):
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.append(
            wheel_files.assemble(base(tmp_path, launcher), tmp_path / name, "cu", images, ("sm_80",)).read_bytes()
        )
    assert made[0] == made[1]


# ---------------------------------------------------------------- the audit
@pytest.mark.parametrize(
    "wanted, words",
    [
        (Contents("1.0+x", {"gfx90a": 1}, True), "2 images for gfx942, wanted 0"),
        (Contents("1.0+x", {"gfx90a": 1, "gfx942": 3}, True), "2 images for gfx942, wanted 3"),
        (Contents("1.0+x", {"gfx90a": 1, "gfx942": 2, "sm_80": 1}, True), "0 images for sm_80, wanted 1"),
        (Contents("1.0+x", {"gfx90a": 1, "gfx942": 2}, False), f"{wheel_files.LAUNCHER} is in a pure wheel"),
        (Contents("1.0+y", {"gfx90a": 1, "gfx942": 2}, True), "there is no xattn-1.0+y.dist-info/METADATA"),
    ],
)
def test_what_is_not_as_wanted(tmp_path, launcher, images, wanted, words):
    made = wheel_files.assemble(base(tmp_path, launcher), images, "x", images, ("gfx90a", "gfx942"))
    assert words in wheel_files.audit(made, wanted)


FAULTS = {
    "xattn/a.pyc should not be there": {"xattn__a.pyc": ""},
    "xattn/k.cubin should not be there": {"xattn__k.cubin": ""},
    "other/a.py is outside the package": {"other__a.py": ""},
    "requires torch==2.10: an exact version": {"metadata": METADATA.replace(">=", "==")},
}


@pytest.mark.parametrize("words", FAULTS)
def test_files_and_metadata(tmp_path, words):
    made = wheel_files.assemble(base(tmp_path, **FAULTS[words]), tmp_path, "x", None, ())
    assert wheel_files.audit(made, Contents("1.0+x", {}, False)) == [words]


def test_a_pure_wheel_that_is_right_and_one_without_a_launcher(tmp_path):
    made = wheel_files.assemble(base(tmp_path), tmp_path, "x", None, ())
    assert wheel_files.audit(made, Contents("1.0+x", {}, False)) == []
    found = wheel_files.audit(made, Contents("1.0+x", {}, True))
    assert f"{wheel_files.LAUNCHER} is missing" in found and any("wanted manylinux" in text for text in found)


def test_what_differs_from_its_record(tmp_path):
    made = wheel_files.assemble(base(tmp_path), tmp_path, "x", None, ())
    changed = tmp_path / "changed" / made.name
    changed.parent.mkdir()
    with zipfile.ZipFile(made) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            if name != "xattn/csrc_hip/hipify.py":
                target.writestr(name, source.read(name) + (b"!" if name == "xattn/py.typed" else b""))
        target.writestr("xattn/new.py", "")
    assert wheel_files.audit(changed, Contents("1.0+x", {}, False)) == [
        "xattn/csrc_hip/hipify.py is missing",
        "xattn/py.typed differs from RECORD",
        "RECORD names xattn/csrc_hip/hipify.py, which is not there",
        "RECORD does not name xattn/new.py",
    ]


def test_a_wheel_that_is_too_large(tmp_path, monkeypatch):
    made = wheel_files.assemble(base(tmp_path), tmp_path, "x", None, ())
    monkeypatch.setattr(wheel_files, "MOST_BYTES", 100)
    assert wheel_files.audit(made, Contents("1.0+x", {}, False)) == [f"{made.stat().st_size} bytes, allowed 100"]


@pytest.mark.parametrize(
    "more, flags, words",
    [
        ("", (), ""),
        ('extern "C" int another() { return 0; }', (), "the launcher exports another, xattn_"),
        ("namespace xattn { int shown() { return 0; } }", (), "the launcher shows _ZN5xattn5shownEv"),
        ('extern "C" int cuInit(int); int (*wanted)(int) = cuInit;', (), "the launcher wants cuInit when it is loaded"),
        ("", ("-Wl,-rpath,/opt",), "the launcher has a RUNPATH"),
        ("", ("-static-libstdc++",), "the launcher has a C++ library of its own"),
    ],
)
def test_the_library(tmp_path, more, flags, words):
    found = wheel_files.library(compile_launcher(tmp_path, *flags, more=more))
    assert any(text.startswith(words) for text in found) if words else found == []


def test_what_is_no_library(tmp_path):
    (tmp_path / "text").write_text("text")
    (text,) = wheel_files.library(tmp_path / "text")
    assert text.startswith("the launcher is no shared library")


# ---------------------------------------------------------------- the command
def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)


def test_wrong_usage():
    done = run("--variants", "cuda")
    assert done.returncode == 2 and "--variants: got 'cuda'; allowed: pure, cpu, cu, rocm, all" in done.stderr
    done = run("--jobs", "0")
    assert done.returncode == 2 and "--jobs: got 0; allowed: a whole number from 1" in done.stderr


def test_what_is_missing_is_said_before_anything_is_built(tmp_path):
    done = run("--out", str(tmp_path / "out"), PATH="/nonexistent")
    assert done.returncode == 2 and done.stdout == "" and "readelf: binutils" in done.stderr
    assert not (tmp_path / "out").exists()
