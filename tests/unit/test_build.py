"""The command ``build``: with a compiler that stands in for clang, as a process, and within this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import xattn
from xattn import build as build_command
from xattn import cli, device, jit, shipped
from xattn.images import Store

ROOT = str(Path(xattn.__file__).parent.parent)
SET = '[[images]]\nbackends = ["cdna", "sm80"]\nhead_dims = [[64, 64], [128, 128]]\n'  # see EACH
EACH = 14  # images of an architecture: four of the forward; of the backward eight, and two without a head_dim

CLANG = """#!{python}
import sys
if "--version" in sys.argv:
    print("a clang 1.0")
    sys.exit()
text = open(sys.argv[-1].partition("arch/")[0] + "config.h").read()
if "head_dim = {refused};" in text:
    sys.exit("error: head_dim {refused} does not fit")
open(sys.argv[sys.argv.index("-o") + 1], "w").write("code")
"""


@pytest.fixture
def place(tmp_path):
    """place(refused): a folder with a set and, first on the PATH, a clang that refuses a head dimension."""

    def make(refused: int = 0) -> Path:
        for name in ("clang++-23", "hip/__init__.py"):  # an installed hip-python would come first
            (tmp_path / "bin" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "bin" / name).write_text(CLANG.format(python=sys.executable, refused=refused))
        (tmp_path / "bin" / "clang++-23").chmod(0o755)
        (tmp_path / "bin" / "hip" / "__init__.py").write_text("")
        (tmp_path / "set.toml").write_text(SET)
        return tmp_path

    return make


def build(place: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Plain ``build`` of a process of its own, for gfx942 unless said."""
    process = start(place, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def start(place: Path, *args: str, **how) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(place / "bin"), ROOT, os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    env |= {"XATTN_ARCHS": "gfx942", "XATTN_CACHE_DIR": str(place / "cache")}
    command = [sys.executable, "-m", "xattn", "build", "--out", str(place / "out"), "--set", str(place / "set.toml")]
    return subprocess.Popen([*command, *args], env=env, text=True, **how)


def row(text: str, arch: str) -> list[str]:
    """A row of the summary."""
    return next(line for line in text.splitlines() if line.startswith(f"  {arch} ")).split()


# ---------------------------------------------------------------- as a process
def test_build_in_processes_of_their_own(place):
    """Several at once; then nothing is left to do; then all of it again."""
    at = place()
    done = build(at, "--jobs", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{EACH} images, 0 of them there; 2 at once" in done.stdout
    assert "gfx942 arch/cdna/forward.hip: " in done.stdout and f"[{EACH}/{EACH}] " in done.stdout
    assert row(done.stdout, "gfx942")[1:3] == [f"{EACH}"] * 2 and "a clang 1.0" in done.stdout
    store = Store(shipped=(), cache=at / "out")
    wanted = shipped.load(at / "set.toml").specs("gfx942")
    assert all(store.find(spec).code == b"code" for spec in wanted) and len(list(store)) == EACH
    assert not (at / "cache").exists()

    done = build(at)
    assert done.returncode == 0 and f"{EACH} images, {EACH} of them there" in done.stdout
    assert row(done.stdout, "gfx942")[1:3] == [f"{EACH}", "0"]

    (at / "out" / "gfx942" / f"{wanted[0].key()}.image").write_bytes(b"broken")
    done = build(at, "--jobs", "1")
    assert f"{EACH} images, {EACH - 1} of them there; 1 at once" in done.stdout and "passed over" in done.stderr
    done = build(at, "--rebuild", "--jobs", "1")
    assert row(done.stdout, "gfx942")[1:3] == [f"{EACH}"] * 2


def test_a_compiler_that_refuses(place):
    """Exit status 1, with its log; what can be built is built."""
    at = place(refused=128)
    done = build(at, "--jobs", "2")
    assert done.returncode == 1
    assert "6 images failed" in done.stderr and "error: head_dim 128 does not fit" in done.stderr
    assert "also: arch/cdna/forward.hip [element=" in done.stderr
    assert done.stdout.count("] FAILED arch/cdna/forward.hip") == 2
    assert row(done.stdout, "gfx942")[1:3] == [f"{EACH - 6}"] * 2
    assert len(list(Store(shipped=(), cache=at / "out"))) == EACH - 6


SLOW = """#!{python}
import sys, time
from pathlib import Path
if "--version" in sys.argv:
    print("a clang 1.0")
    sys.exit()
Path({started!r}).touch()
time.sleep(2)
sys.exit("too late")
"""


@pytest.fixture
def running(place, tmp_path):
    """A build in two processes that has begun to compile, and is the first of a group of its own."""
    at, started = place(), tmp_path / "started"
    (at / "bin" / "clang++-23").write_text(SLOW.format(python=sys.executable, started=str(started)))
    how = {"start_new_session": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Who runs tests in the background of a shell has interrupts ignored, and so have the processes that tests start.
    process = start(at, "--jobs", "2", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **how)
    deadline = time.monotonic() + 200  # two imports of torch, one after the other, on a loaded machine
    while not started.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started.exists()
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def test_nothing_goes_on_when_a_build_is_ended(running):
    """Its processes let go of what they inherited: who reads its output is not kept waiting."""
    running.send_signal(signal.SIGKILL)
    running.communicate(timeout=200)
    assert running.returncode == -signal.SIGKILL


def test_an_interrupt_is_one_line(running):
    os.killpg(running.pid, signal.SIGINT)
    _, stderr = running.communicate(timeout=200)
    assert (running.returncode, stderr) == (130, "xattn: interrupted\n")


@pytest.mark.parametrize("taken_by", ["main", "another"])
def test_an_interrupt_waits_whichever_thread_takes_it(taken_by):
    """Libraries have threads of their own: the processes that compile are started whole all the same."""
    went_on = []

    def take() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            with build_command._held(signal.SIGINT):
                if taken_by == "main":
                    signal.raise_signal(signal.SIGINT)
                else:
                    thread = threading.Thread(target=take)
                    thread.start()
                    thread.join()
                went_on.append(True)
        assert went_on and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGINT, before)


# ---------------------------------------------------------------- within this process
class Fake:
    """A compiler of every GPU's architecture."""

    name = "fake"

    def __init__(self, missing: str = "", log: str = ""):
        self._missing, self.log = missing, log

    def missing(self) -> str:
        return self._missing

    def serves(self, arch: str) -> bool:
        return True

    def version(self) -> str:
        return "fake 1.0"

    def compile(self, spec):
        return b"x" * 2000, "cubin", self.log


@pytest.fixture
def command(tmp_path, monkeypatch):
    """command(*args, compiler): the exit status of ``build --out tmp_path/out``, with that set."""
    (tmp_path / "set.toml").write_text(SET)
    monkeypatch.delenv("XATTN_ARCHS", raising=False)

    def run(*args: str, compiler: Fake | None = None) -> int:
        monkeypatch.setattr(jit, "SHIPPING", (compiler or Fake(),))
        return cli.main(["build", "--out", str(tmp_path / "out"), "--jobs", "1", *args])

    run.set = ("--set", str(tmp_path / "set.toml"))
    run.out = tmp_path / "out"
    return run


def test_several_architectures(command, capsys):
    log = "40 bytes stack frame, 48 bytes spill stores, 124 bytes spill loads"
    assert command("--arch", "sm_80, gfx90a,sm_80", *command.set, compiler=Fake(log=log)) == 0
    text = capsys.readouterr().out
    assert f"{2 * EACH} images, 0 of them there; 1 at once" in text and f"set: {command.set[1]}" in text
    assert sorted(p.name for p in command.out.iterdir()) == ["gfx90a", "sm_80"]
    assert row(text, "sm_80")[1:3] == [f"{EACH}"] * 2 and f"{EACH} of {EACH}" in text
    assert row(text, "all")[1] == f"{2 * EACH}"


def test_what_is_built_is_for_others(command):
    """Root builds, everybody runs."""
    before = os.umask(0o022)
    try:
        assert command("--arch", "gfx942", *command.set) == 0
    finally:
        os.umask(before)
    for path in (command.out, *command.out.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_the_set_says_which_where_nobody_does(command, capsys):
    Path(command.set[1]).write_text('archs = ["gfx950"]\n' + SET)
    assert command(*command.set) == 0
    assert [p.name for p in command.out.iterdir()] == ["gfx950"]


def test_full(command, capsys, monkeypatch):
    small = shipped.everything("gfx950")[:3]
    monkeypatch.setattr(shipped, "everything", lambda arch: small)
    assert command("--full", "--arch", "gfx950") == 0
    assert "set: everything" in capsys.readouterr().out
    assert len(list(Store(shipped=(), cache=command.out))) == 3


def test_the_default_set_is_that_of_the_checkout(command, capsys, monkeypatch):
    monkeypatch.setattr(shipped, "default", lambda: shipped.load(Path(command.set[1])))
    assert command("--arch", "gfx950") == 0
    assert f"set: {command.set[1]}" in capsys.readouterr().out


def test_files_that_were_not_asked_for(command, capsys):
    assert command("--arch", "gfx942,gfx950", *command.set) == 0
    assert "more files" not in capsys.readouterr().out
    assert command("--arch", "gfx942", *command.set) == 0
    assert f"note: {command.out} holds {EACH} more files" in capsys.readouterr().out


def test_serialised_matrix_products_fail(command, capsys):
    line = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert command("--arch", "sm_80", *command.set, compiler=Fake(log=line)) == 1
    captured = capsys.readouterr()
    assert line in captured.err and f"{EACH} images failed" in captured.err
    assert not list(Store(shipped=(), cache=command.out))


def test_a_disk_that_is_full(command, capsys, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert command("--arch", "gfx942", *command.set) == 1
    assert f"{command.out}: No space left on device" in capsys.readouterr().err
    assert not [p for p in command.out.rglob("*") if p.is_file()]


def test_no_compiler(command, capsys):
    assert command("--arch", "sm_80", *command.set, compiler=Fake(missing="pip install it")) == 2
    captured = capsys.readouterr()
    assert captured.err == "xattn build: no compiler for sm_80: fake: pip install it\n" and captured.out == ""


def test_no_compiler_is_needed_where_all_is_there(command, capsys):
    assert command("--arch", "sm_80", *command.set) == 0
    assert command("--arch", "sm_80", *command.set, compiler=Fake(missing="pip install it")) == 0


@pytest.mark.parametrize("arch", ["sm_75", "hopper", "gfx1100", "9.0", "cpu", "sm_80,gfx9"])
def test_unknown_architectures(command, capsys, arch):
    assert command("--arch", arch, *command.set) == 2
    unknown = arch.split(",")[-1]
    said = f"xattn build: --arch: got {unknown!r}, for which no backend has images; allowed: sm_80, "
    assert capsys.readouterr().err.startswith(said)
    assert not command.out.exists()


def test_an_architecture_that_the_set_leaves_out(command, capsys):
    Path(command.set[1]).write_text(SET.replace('"cdna", ', ""))
    assert command("--arch", "gfx942", *command.set) == 2
    assert "got 'gfx942'; the set has no image for it" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(command, capsys):
    command.out.write_text("a file")
    assert command("--arch", "gfx942", *command.set) == 2
    assert "--out: " in capsys.readouterr().err


USAGE = {
    ("--arch", ","): "argument --arch: ',': names of architectures, separated by commas",
    ("--jobs", "0"): "argument --jobs: '0': a whole number from 1",
    ("--jobs", "many"): "argument --jobs: 'many'",
    ("--full", "--set", "x"): "not allowed with argument",
}


@pytest.mark.parametrize("args", USAGE, ids=" ".join)
def test_wrong_usage(command, capsys, args):
    with pytest.raises(SystemExit) as ended:
        command(*args)
    assert ended.value.code == 2 and USAGE[args] in capsys.readouterr().err


def test_one_job_for_each_core(command, capsys, monkeypatch):
    monkeypatch.setattr("xattn.build._outcomes", lambda waiting, jobs: iter([]))
    monkeypatch.setattr(jit, "SHIPPING", (Fake(),))
    arguments = ["build", "--out", str(command.out), "--arch", "gfx942", *command.set]
    assert cli.main(arguments) == 0
    assert f"; {min(4, device.cpu().sm_count)} at once" in capsys.readouterr().out
