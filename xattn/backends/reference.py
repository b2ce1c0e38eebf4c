"""The oracle as a backend: every argument, every device, slow."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import chunks, reference
from ..capability import Capability
from ..inputs import DTYPES, FP8, Inputs
from ..problem import FEATURES, GRADS, KINDS
from .base import Backend, Config

CAPABILITY = Capability(
    vendors=frozenset({"nvidia", "amd", "cpu", "other"}),
    kinds=frozenset(KINDS),
    dtypes=frozenset({(d, d) for d in DTYPES.values()} | {(d, kv) for d in ("bf16", "fp16", "fp32") for kv in FP8}),
    dtypes_out=frozenset(DTYPES.values()) | {"int8", "uint8"},
    features=frozenset(FEATURES),
    grads=frozenset(GRADS),
)


def _run(inputs: Inputs, config: Config) -> tuple[Tensor, Tensor | None]:
    return chunks.forward(inputs, *_how(inputs))


def _backward(
    inputs: Inputs, config: Config, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    return chunks.backward(inputs, *_how(inputs), dout, dlse, wanted)


def _double_backward(
    inputs: Inputs, dout: Tensor, dlse: Tensor | None, wanted: list[bool], grads_of_grads: list[Tensor | None]
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    return chunks.double_backward(inputs, *_how(inputs), dout, dlse, wanted, grads_of_grads)


def _how(inputs: Inputs) -> tuple[chunks.Attend, torch.dtype, int]:
    return reference.attend, reference.compute_dtype(inputs.q, inputs.attn_mask), reference.chunk_scores(inputs)


BACKEND = Backend(
    "reference",
    native=False,
    capabilities=lambda: (CAPABILITY,),
    run=_run,
    backward=_backward,
    double_backward=_double_backward,
    config=lambda problem, size, device: (("compute", "float64" if problem.dtype == "fp64" else "float32"),),
)
