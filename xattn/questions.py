"""Questions about calls and devices, answered without launching anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import api, calls, dispatch, validate
from .capability import Capability, Refusal
from .device import Device, detect, from_arch, is_here
from .device import default as default_device
from .device import of as device_of
from .problem import FEATURES, GRADS, Problem, SizeBucket


def explain(*args: Any, kind: str = "attention", device: Any = None, **kwargs: Any) -> dispatch.Plan:
    """The plan of a call, without making it: which backend, how, and why not the others.

    Args: those of ``attention``, ``attention_varlen`` or ``attention_paged``, by ``kind`` ("attention", "varlen",
    "paged"); meta tensors are welcome. ``device``: a torch device, an ``xattn.device.Device``, or an architecture by
    name ("sm_90", "gfx942", "cpu") that need not be present; default is the device of q, and for meta tensors the best
    device here. Bad arguments raise as in the call.
    """
    functions: dict[str, Callable[..., Any]] = {
        "attention": api.attention,
        "varlen": api.attention_varlen,
        "paged": api.attention_paged,
    }
    if not isinstance(kind, str) or kind not in functions:
        validate.fail("kind", repr(kind), ", ".join(functions))
    bound = inspect.signature(functions[kind]).bind(*args, **kwargs)
    bound.apply_defaults()
    return calls.explain(kind, dict(bound.arguments), None if device is None else _device(device))


def supported(*args: Any, kind: str = "attention", device: Any = None, **kwargs: Any) -> bool:
    """Whether some backend (or the one named by ``backend``) answers the call natively or not; arguments as in
    ``explain``."""
    return explain(*args, kind=kind, device=device, **kwargs).backend is not None


def devices() -> list[Device]:
    """The GPUs of this machine that the process may see, then its CPU. No device context is created."""
    return detect()


@dataclass(frozen=True)
class Capabilities:
    """What a device can do: for each backend its capabilities there, of which one must answer a call, or why it has
    none."""

    device: Device
    backends: tuple[tuple[str, tuple[Capability, ...]], ...]
    refused: tuple[tuple[str, Refusal], ...]

    def __str__(self) -> str:
        lines = [str(self.device)]
        for name, c in ((name, c) for name, found in self.backends for c in found):
            if not c.kinds:
                lines.append(f"  {name}: nothing yet")
                continue
            dtypes = sorted({a for a, _ in c.dtypes})
            lines.append(f"  {name}: {', '.join(sorted(c.kinds))}; {', '.join(dtypes)}; head_dim {c.head_dim}")
            lines.append(f"    with {', '.join(n for n in FEATURES if n in c.features) or 'nothing'}")
            lines.append(f"    gradients of {', '.join(n for n in GRADS if n in c.grads) or 'nothing'}")
        lines += [f"  {name}: no ({refusal})" for name, refusal in self.refused]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "device": asdict(self.device),
            "backends": {name: [c.as_dict() for c in found] for name, found in self.backends},
            "refused": {name: refusal.as_dict() for name, refusal in self.refused},
        }


def capabilities(device: Any = None) -> Capabilities:
    """What can be asked of a device, as data. ``device``: as in ``explain``; default is the best device here."""
    target = default_device() if device is None else _device(device)
    able, refused = [], []
    for backend in dispatch.REGISTRY:
        fits = tuple(c for c in backend.capabilities() if c.is_for(target))
        if fits:
            able.append((backend.name, fits))
        else:
            refused.append((backend.name, backend.check(Problem(), SizeBucket(), target)[0]))
    return Capabilities(target, tuple(able), tuple(refused))


def _device(device: Any) -> Device:
    if isinstance(device, Device):
        return device
    allowed = "a torch device of this machine, an architecture by name (sm_90, gfx942, cpu), an xattn Device, or None"
    if isinstance(device, torch.device):
        place = device
    elif not isinstance(device, str):
        validate.fail("device", type(device).__name__, allowed, TypeError)
    else:
        try:
            return from_arch(device)
        except ValueError as no_arch:
            try:
                place = torch.device(device)
            except RuntimeError:
                raise ValueError(f"device: got {device!r}; allowed: {allowed}. {no_arch}") from None
    if not is_here(place):
        validate.fail("device", f"{str(place)!r}, which this torch ({torch.__version__}) does not have", allowed)
    return device_of(place)
