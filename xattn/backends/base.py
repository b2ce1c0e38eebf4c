"""What a backend is: its capabilities as data, and functions that run a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

from torch import Tensor

from ..append_call import AppendBody
from ..capability import Capability, Refusal, check
from ..device import Device
from ..images import ImageSpec
from ..inputs import Inputs
from ..kernel_call import Call
from ..problem import Problem, SizeBucket

Config = tuple[tuple[str, object], ...]  # (name, value) pairs: hashable, printable


class Unavailable(RuntimeError):
    """Raised by a backend's ``run`` that turns out not to work for a problem on a device: it is not asked again."""


_unavailable: dict[tuple[str, Problem, Device], str] = {}


def give_up(name: str, problem: Problem, device: Device, reason: str) -> None:
    """From now on backend ``name`` refuses ``problem`` on ``device``."""
    _unavailable[name, problem, device] = reason


def _absent(*args: object) -> NoReturn:
    raise AssertionError("planned a backend whose capability is empty")


@dataclass(frozen=True)
class Backend:
    """``capabilities`` is asked at planning time, so that it may look at what the machine has; each covers other
    devices.

    ``run(inputs, config) -> (out, lse or None)``; lse is None only where ``inputs.return_lse`` is False.
    A native backend has ``prepare(inputs, config)`` instead: the call to launch, whose outputs are out and, where it is
    wanted, lse; and the call's input tensors by the names of ``Inputs``, in the order of its slots. Its kernels report
    bad values on the device themselves. Where gradients are asked for it gives lse, too, and its ``backward`` raises
    what making and loading an image raises.
    ``backward(inputs, config, out, lse, dout, dlse, wanted) -> gradients``: one for each True of ``wanted``, which runs
    parallel to ``inputs.differentiable()``. ``double_backward(inputs, dout, dlse, wanted, grads_of_grads)`` is None
    where it is not offered. ``config(problem, size, device)`` names what the plan prints: tile, splits, copies.
    ``notes`` stand in every plan. ``missing(device)`` says what a device of this machine lacks to be served, "" where
    nothing. ``too_large(problem, size)`` refuses what its kernels cannot count; it is asked about problems that a
    capability answers. ``yields(problem)`` names a backend that is known to answer such problems faster, "" where none:
    where no backend is named and that one answers, it does. ``images(arch)`` yields all images that it may ask for on
    that architecture ("sm_80", "compute_80", "gfx942"), so that they can be built ahead of time. ``append``: its kernel
    that writes new tokens.
    """

    name: str
    native: bool
    capabilities: Callable[[], tuple[Capability, ...]]
    run: Callable[[Inputs, Config], tuple[Tensor, Tensor | None]] = _absent
    backward: Callable[..., list[Tensor]] = _absent
    double_backward: Callable[..., tuple[Tensor, Tensor | None, list[Tensor | None]]] | None = None
    prepare: Callable[[Inputs, Config], tuple[Call, dict[str, Tensor]]] | None = None
    config: Callable[[Problem, SizeBucket, Device], Config] = lambda problem, size, device: ()
    notes: tuple[str, ...] = ()
    missing: Callable[[Device], str] = lambda device: ""
    too_large: Callable[[Problem, SizeBucket], tuple[Refusal, ...]] = lambda problem, size: ()
    images: Callable[[str], Iterable[ImageSpec]] = lambda arch: ()
    append: AppendBody | None = None
    yields: Callable[[Problem], str] = lambda problem: ""

    def check(self, problem: Problem, size: SizeBucket, device: Device) -> tuple[Refusal, ...]:
        """Why the backend cannot answer; empty where one of its capabilities can. Of several, the one that comes
        closest speaks: one for the device first, then for the kind, then for the dtypes, of which all are named."""
        reason = _unavailable.get((self.name, problem, device))
        if reason is not None:
            return (Refusal("failed", "device", reason),)
        if device.index is not None and (lacking := self.missing(device)):
            return (Refusal("missing", "installation", lacking),)
        found = [check(problem, size, device, c) for c in self.capabilities()]
        best = min(found, key=lambda refusals: (*(_any(refusals, *codes) for codes in _FIRST), len(refusals)))
        dtypes = sorted({a for refusals in found for r in refusals if r.code == "dtype" for a in r.allowed}, key=str)
        told = tuple(replace(r, allowed=tuple(dtypes)) if r.code == "dtype" else r for r in best)
        return told or self.too_large(problem, size)


_FIRST = (("vendor", "arch"), ("kind",), ("dtype",))


def _any(refusals: tuple[Refusal, ...], *codes: str) -> bool:
    return any(r.code in codes for r in refusals)
