"""The command ``build``: compiles kernel images ahead of time into a folder laid out as a store."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path

from . import device, jit, options, settings, shipped, show
from .errors import UnsupportedError
from .images import Image, ImageSpec, Store, encode, publish

ALLOWED_ARCHS = f"{', '.join(shipped.ARCHS)}, or sm_NN from sm_80"
_MODE = 0o755  # what is built here is for others: a wheel's users, a machine's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        type=_archs,
        metavar="ARCH,ARCH",
        help="sm_80, sm_90a, compute_80 (PTX), gfx942, ... (default: XATTN_ARCHS, else those of the set)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder to fill, as DIR/ARCH/KEY.image; it may exist"
    )
    parser.add_argument(
        "--jobs", type=options.positive, metavar="N", help="processes that compile at once (default: one a core)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--set",
        type=Path,
        metavar="FILE",
        help="which images, as ci/images.toml says it (default: that file of the checkout; without a checkout plain "
        "calls, every head dimension)",
    )
    which.add_argument("--full", action="store_true", help="all images that a backend may ever ask for: thousands")
    parser.add_argument("--rebuild", action="store_true", help="compile also those that DIR holds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compiles kernel images ahead of time, for wheels and for machines without a compiler. What DIR holds already is
    not compiled again. Exit status 1: an image failed, with the compiler's log; 2: wrong usage, or no compiler."""
    chosen = shipped.load(args.set) if args.set else shipped.default()
    wanted = {
        arch: _specs(arch, None if args.full else chosen) for arch in args.arch or settings.archs() or chosen.archs
    }
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: {args.out}: {error.strerror}") from error
    kept = {} if args.rebuild else _kept(args.out, wanted)
    waiting = [spec for specs in wanted.values() for spec in specs if spec not in kept]
    try:
        for arch in dict.fromkeys(spec.arch for spec in waiting):
            jit.compiler_for(arch, jit.SHIPPING)
    except UnsupportedError as error:
        print(f"xattn build: {error}", file=sys.stderr)
        return 2
    jobs = min(args.jobs or device.cpu().sm_count or 1, max(1, len(waiting)))
    print(f"{sum(map(len, wanted.values()))} images, {len(kept)} of them there; {jobs} at once")
    print(f"set: {'everything' if args.full else chosen.origin}")
    start = time.perf_counter()
    done, failures = _compile_all(waiting, args.out, jobs)
    _summary(wanted, kept, done, time.perf_counter() - start)
    _note_strangers(args.out, wanted)
    return _report_failures(failures)


def check_settings() -> None:
    """Raises ValueError where XATTN_ARCHS names an architecture that no backend has images for."""
    for arch in settings.archs():
        if not shipped.known(arch):
            raise ValueError(f"XATTN_ARCHS names {arch!r}; allowed, separated by commas: {ALLOWED_ARCHS}")


def _archs(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r}: names of architectures, separated by commas")
    return names


def _specs(arch: str, chosen: shipped.ShippedSet | None) -> list[ImageSpec]:
    """The images of ``arch`` in a set, or (None) all of them. ValueError where no backend has any."""
    if not shipped.known(arch):
        raise ValueError(f"--arch: got {arch!r}, for which no backend has images; allowed: {ALLOWED_ARCHS}")
    specs = chosen.specs(arch) if chosen else shipped.everything(arch)
    if not specs:
        raise ValueError(f"--arch: got {arch!r}; the set has no image for it")
    return specs


def _kept(out: Path, wanted: dict[str, list[ImageSpec]]) -> dict[ImageSpec, Image]:
    """What DIR holds of the wanted images, whole and with the right address."""
    store = Store(shipped=(), cache=out)
    found = {spec: store.find(spec) for specs in wanted.values() for spec in specs}
    return {spec: image for spec, image in found.items() if image is not None}


# ---------------------------------------------------------------- compiling
@dataclass(frozen=True)
class _Compiled:
    image: Image
    seconds: float


def _compile(spec: ImageSpec) -> _Compiled:
    """Runs in a process of its own. CompileError also where ptxas says that it serialised matrix products."""
    start = time.perf_counter()
    image = jit.build(spec, jit.compiler_for(spec.arch, jit.SHIPPING))
    if line := jit.serialised(image):
        raise jit.CompileError(f"{image.compiler} serialised the matrix products of {spec.name()}:\n{line}")
    return _Compiled(image, time.perf_counter() - start)


def _compile_all(
    waiting: list[ImageSpec], out: Path, jobs: int
) -> tuple[dict[ImageSpec, _Compiled], dict[ImageSpec, str]]:
    """What was made, and of what failed the compiler's log. A failure does not stop the others."""
    done: dict[ImageSpec, _Compiled] = {}
    failures: dict[ImageSpec, str] = {}
    if not waiting:
        return done, failures
    with show.progress("compiling", len(waiting)) as tell:
        for spec, outcome in _outcomes(waiting, jobs):
            try:
                if isinstance(outcome, _Compiled):
                    publish(outcome.image, out, _MODE)
                    done[spec] = outcome
                    tell(f"{spec.arch} {outcome.image.words()}: {outcome.seconds:.1f} s")
                    continue
                failures[spec] = str(outcome)
            except OSError as error:
                failures[spec] = f"{out}: {error.strerror}"
            tell(f"FAILED {spec.name()}")
    return done, failures


def _end_with_parent() -> None:
    """A process that compiles ends when the one that started it is gone, however that ended: it would wait for work for
    ever, and keep open what it inherited. An interrupt is for that one too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _held(number: signal.Signals) -> Iterator[None]:
    """A signal waits until the end: for processes that start meanwhile, and for this one, whichever of its threads
    takes it. Called by the main thread."""
    if not hasattr(signal, "pthread_sigmask"):  # not POSIX
        yield
        return
    came: list[int] = []
    handler = signal.getsignal(number)
    if callable(handler):  # else it is ignored, or ends the process
        signal.signal(number, lambda number, frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if callable(handler):
            signal.signal(number, handler)
        if came:
            signal.raise_signal(number)


def _outcomes(waiting: list[ImageSpec], jobs: int) -> Iterator[tuple[ImageSpec, _Compiled | Exception]]:
    """Each image's, as they become ready. Processes, not threads: NVRTC compiles one program at a time."""
    if jobs == 1:
        for spec in waiting:
            try:
                yield spec, _compile(spec)
            except jit.CompileError as error:
                yield spec, error
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        with _held(signal.SIGINT):  # a process that starts has it held, too, until it ignores it
            running = {pool.submit(_compile, spec): spec for spec in waiting}
        try:
            for future in as_completed(running):
                outcome: _Compiled | Exception
                try:
                    outcome = future.result()
                except jit.CompileError as error:
                    outcome = error
                except BrokenProcessPool:
                    outcome = jit.CompileError(
                        "a compiling process died, perhaps for want of memory: fewer --jobs help"
                    )
                yield running[future], outcome
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# ---------------------------------------------------------------- what is said at the end
def _summary(
    wanted: dict[str, list[ImageSpec]], kept: dict[ImageSpec, Image], done: dict[ImageSpec, _Compiled], seconds: float
) -> None:
    columns = ["arch", "images", "compiled", "size", "in a wheel", "seconds", "with spills", "compiler"]
    rows, every = [], []
    for arch, specs in wanted.items():
        images = [kept[s] if s in kept else done[s].image for s in specs if s in kept or s in done]
        compiled = [done[s] for s in specs if s in done]
        compilers = ", ".join(sorted({image.compiler for image in images}))
        rows.append([arch, *_row(images), f"{sum(c.seconds for c in compiled):.1f}", _spills(images), compilers])
        rows[-1].insert(2, str(len(compiled)))
        every += images
    rows.append(["all", *_row(every), f"{seconds:.1f} passed", _spills(every), ""])
    rows[-1].insert(2, str(len(done)))
    show.table("images", columns, rows)


def _row(images: list[Image]) -> list[str]:
    files = [encode(image) for image in images]
    packed = sum(len(zlib.compress(file)) for file in files)  # as a wheel packs them, file by file
    return [str(len(images)), show.size(sum(map(len, files))), show.size(packed)]


def _spills(images: Iterable[Image]) -> str:
    """How many images spill registers, of those whose compiler tells."""
    telling = [image for image in images if image.kind == "cubin"]
    return f"{sum(jit.spilled_bytes(image) > 0 for image in telling)} of {len(telling)}" if telling else "not told"


def _note_strangers(out: Path, wanted: dict[str, list[ImageSpec]]) -> None:
    """Files that an earlier build left: of other sources, another set, or another architecture."""
    keys = {(spec.arch, spec.key()) for specs in wanted.values() for spec in specs}
    strangers = [
        file for file in Store(shipped=(), cache=out).files() if (file.path.parent.name, file.path.stem) not in keys
    ]
    if strangers:
        total = show.size(sum(file.size for file in strangers))
        print(f"\nnote: {out} holds {len(strangers)} more files ({total}), which this build did not ask for")


def _report_failures(failures: dict[ImageSpec, str]) -> int:
    """The first log in full: those that follow mostly say the same."""
    if not failures:
        return 0
    (spec, log), *others = failures.items()
    print(f"\nxattn build: {len(failures)} images failed\n\n{spec.name()}:\n{log}", file=sys.stderr)
    for other, _ in others:
        print(f"also: {other.name()}", file=sys.stderr)
    return 1
