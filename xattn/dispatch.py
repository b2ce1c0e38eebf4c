"""Chooses the backend of a call. ``plan`` is pure: the same question gives the same plan, on any machine, for any
device."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import backends, settings
from .backends import REGISTRY as REGISTRY
from .backends import Backend, Config
from .capability import Refusal
from .concurrency import ForkSafeLock
from .device import Device
from .errors import FallbackWarning, UnsupportedError
from .problem import Problem, SizeBucket

log = logging.getLogger("xattn")


class _ToStderr(logging.StreamHandler):
    """For who asked for a level and set up no logging; silent as soon as the application has."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def _set_level() -> None:
    try:
        level = settings.log_level()
    except ValueError as error:
        if sys.argv[:1] != ["-m"]:  # python -m xattn says it itself
            log.warning("%s; it is ignored", error)
        return
    if level:
        log.setLevel(level)
        if not log.handlers:
            handler = _ToStderr()
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            log.addHandler(handler)


_set_level()

Rejected = tuple[tuple[str, tuple[Refusal, ...]], ...]


@dataclass(frozen=True)
class Plan:
    """Which backend answers a problem on a device, how, and why those before it do not.

    ``backend`` is None where none can. ``config`` holds (name, value) pairs: tile, splits, copies. ``notes`` say what
    the caller might not expect, ``sources`` what kernels have of user functions, by their roles. ``str(plan)`` explains
    all of it.
    """

    backend: str | None
    config: Config
    rejected: Rejected
    problem: Problem
    size: SizeBucket
    device: Device
    native: bool = False
    notes: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        head = f"{self.problem}\non {self.device}:"
        if self.backend is None:
            lines = [head, "  no backend answers"]
        else:
            config = ", ".join(f"{name} {value}" for name, value in self.config)
            kind = "native" if self.native else "fallback"
            lines = [head, f"  {self.backend} ({kind}{', ' + config if config else ''})"]
        lines += [f"  note: {note}" for note in self.notes]
        if self.rejected:
            lines.append("rejected:")
            lines += [f"  {name}: {refusal}" for name, refusals in self.rejected for refusal in refusals]
        for role, source in self.sources:
            lines += [f"{role}:", *(f"  {line}" for line in source.splitlines())]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "backend": self.backend,
            "native": self.native,
            "config": {
                name: value if isinstance(value, (int, float, bool)) else str(value) for name, value in self.config
            },
            "notes": list(self.notes),
            "sources": dict(self.sources),
            "rejected": {name: [r.as_dict() for r in refusals] for name, refusals in self.rejected},
            "problem": self.problem.as_dict(),
            "device": {"vendor": self.device.vendor, "arch": self.device.arch, "name": self.device.name},
        }


def plan(
    problem: Problem,
    size: SizeBucket,
    device: Device,
    registry: Sequence[Backend] = REGISTRY,
    backend: str | None = None,
) -> Plan:
    """The first backend of ``registry`` that refuses nothing. ``backend`` names one: then no other is asked."""
    check_name(backend, registry)
    rejected: list[tuple[str, tuple[Refusal, ...]]] = []
    for candidate in registry:
        if backend is not None and candidate.name != backend:
            continue
        refusals = candidate.check(problem, size, device)
        if not refusals and backend is None:
            refusals = _yielded(candidate, problem, size, device, registry)
        if not refusals:
            config = candidate.config(problem, size, device)
            notes = _notes(problem, candidate)
            return Plan(candidate.name, config, tuple(rejected), problem, size, device, candidate.native, notes)
        rejected.append((candidate.name, refusals))
    return Plan(None, (), tuple(rejected), problem, size, device)


def _yielded(
    candidate: Backend, problem: Problem, size: SizeBucket, device: Device, registry: Sequence[Backend]
) -> tuple[Refusal, ...]:
    """A refusal where another backend answers, and is known to be faster."""
    faster = candidate.yields(problem)
    if not any(b.name == faster and not b.check(problem, size, device) for b in registry):
        return ()
    return (Refusal("slower", "backend", candidate.name, (faster,)),)


def check_name(backend: str | None, registry: Sequence[Backend] = REGISTRY) -> None:
    """ValueError where no backend has that name."""
    names = [b.name for b in registry]
    if backend is not None and backend not in names:
        raise ValueError(f"backend: got {backend!r}; allowed: {', '.join(names)}, or None for the best")


def _notes(problem: Problem, backend: Backend) -> tuple[str, ...]:
    if backend.native and not problem.direct:
        copied = "q, k or v is copied: its rows do not start at multiples of 16 bytes, or its last stride is not 1"
        return (*backend.notes, copied)
    return backend.notes


# ---------------------------------------------------------------- the cache, and what is said about fallbacks
_MOST_PLANS = 4096
_plans: OrderedDict[tuple, Plan] = OrderedDict()
_told: set[tuple] = set()
_lock = ForkSafeLock()


def cached_plan(problem: Problem, size: SizeBucket, device: Device, backend: str | None = None) -> Plan:
    """``plan`` over the registry, remembered. Raises UnsupportedError where no backend answers; tells of fallbacks on
    GPUs once."""
    key = (problem, size, device, backend)
    with _lock:
        found = _plans.get(key)
        if found is not None:
            _plans.move_to_end(key)
    if found is None:
        found = plan(problem, size, device, REGISTRY, backend)
        with _lock:
            _plans[key] = found
            if len(_plans) > _MOST_PLANS:
                _plans.popitem(last=False)
        log.debug("plan: %s", found)
    must_answer(found, backend)
    if not found.native and device.vendor != "cpu" and backend is None:
        _tell(found)
    return found


def must_answer(found: Plan, backend: str | None) -> None:
    """Raises UnsupportedError, with every refusal, where no backend answers."""
    if found.backend is None:
        who = "no backend answers" if backend is None else f"backend {backend!r} does not answer"
        raise UnsupportedError(f"{who}: {found.problem}\non {found.device}", dict(found.rejected))


def give_up(found: Plan, reason: str) -> None:
    """Forgets a plan whose backend does not work after all, and asks it no more for such problems on that device."""
    assert found.backend is not None
    backends.give_up(found.backend, found.problem, found.device, reason)
    log.warning("backend %s is not asked any more for %s on %s: %s", found.backend, found.problem, found.device, reason)
    with _lock:
        _plans.clear()


def get(name: str | None) -> Backend:
    """The backend of that name."""
    return next(b for b in REGISTRY if b.name == name)


def appender(device: Device, backend: str | None = None) -> Backend | None:
    """The backend whose kernel writes new tokens on ``device``: that one, or the first that has one; None where none
    has."""
    for b in REGISTRY:
        if b.append is not None and backend in (None, b.name) and any(c.is_for(device) for c in b.capabilities()):
            return None if device.index is not None and b.missing(device) else b
    return None


def _tell(found: Plan) -> None:
    key = (found.problem, found.device)
    with _lock:
        if key in _told:
            return
        _told.add(key)
    log.info("fallback: %s", found)
    warnings.warn(f"xattn leaves the native kernels for this call.\n{found}", FallbackWarning, stacklevel=2)
