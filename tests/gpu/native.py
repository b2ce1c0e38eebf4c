"""Which native backends and launchers the tests of this folder run on."""

from __future__ import annotations

import importlib.util

import cases
import torch

from xattn import launch_library
from xattn.backends import REGISTRY

CUDA = torch.device("cuda")
TARGETS = [t for t in cases.targets() if t.device == "cuda" and next(b for b in REGISTRY if b.name == t.backend).native]
BACKENDS = [t.backend for t in TARGETS] or ["sm80"]  # without a GPU all of this is skipped
LAUNCHERS = [
    *(["library"] if launch_library.find() else []),
    *(["bindings"] if importlib.util.find_spec("cuda") or importlib.util.find_spec("hip") else []),
]
