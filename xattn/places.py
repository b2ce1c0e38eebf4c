"""Torch devices as users name them: which are here, and one message for those that are not; whether a tensor lies on
one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

ALLOWED = "a torch device of this machine, such as 'cpu', 'cuda', 'cuda:1' or a number of a GPU"


def readable(t: Tensor) -> bool:
    """Whether ``t`` holds values: not on meta, and not where torch only looks at shapes."""
    return t.device.type != "meta" and not isinstance(t, FakeTensor)


def parsed(name: str, value: Any) -> torch.device:
    """``value`` as a torch device, here or not; TypeError or ValueError that names the argument ``name``."""
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        raise TypeError(f"{name}: got {type(value).__name__}; allowed: {ALLOWED}")
    try:
        return torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except (RuntimeError, OverflowError, ValueError, TypeError) as error:
        raise ValueError(f"{name}: got {value!r}; allowed: {ALLOWED}") from error


def present(name: str, value: Any) -> torch.device:
    """As ``parsed``, with ValueError for a GPU that is not here."""
    found = parsed(name, value)
    if found.type in ("cpu", "meta"):
        return found
    try:
        module = torch.get_device_module(found.type)
        count = module.device_count() if module.is_available() else 0
    except (RuntimeError, AttributeError):
        count = 0
    if (found.index or 0) >= count:
        here = ", ".join(["cpu", *(f"{found.type}:{n}" for n in range(count))])
        raise ValueError(f"{name}: got {str(found)!r}; allowed: what this torch ({torch.__version__}) has here: {here}")
    return found
