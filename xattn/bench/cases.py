"""What is timed: one dense call, and a function that makes it by one backend and configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import calls, dispatch, launch
from ..api import attention
from ..inputs import Inputs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
Subject = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A dense call; ``seqlen``: of q and k."""

    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: str
    causal: bool

    def label(self) -> str:
        """For people."""
        heads = str(self.heads) if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        mask = "causal" if self.causal else "full"
        return f"{self.dtype} b{self.batch} s{self.seqlen} h{heads} d{self.head_dim} {mask}"

    def flops(self) -> float:
        """Multiplications and additions of both products; half of them with causal."""
        return 4.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim / (2 if self.causal else 1)

    def inputs(self, place: torch.device) -> Inputs:
        """The call's record, of normal random numbers."""
        generator = torch.Generator(place).manual_seed(0)

        def randn(heads: int) -> torch.Tensor:
            shape = (self.batch, self.seqlen, heads, self.head_dim)
            return torch.randn(shape, generator=generator, device=place).to(DTYPES[self.dtype])

        q, k, v = randn(self.heads), randn(self.heads_kv), randn(self.heads_kv)
        return calls.describe("attention", _arguments(q=q, k=k, v=v, causal=self.causal))


@contextmanager
def quiet() -> Iterator[Callable[[str], Any]]:
    """Progress of which nothing is told."""
    yield lambda text: None


def _arguments(**given: Any) -> dict[str, Any]:
    defaults = attention.__kwdefaults__ or {}
    return {**defaults, **given}


def subject(backend: str, inputs: Inputs, config: Any) -> Subject:
    """Makes the call by that backend with that configuration; what is planned and loaded once is done here."""
    chosen = dispatch.get(backend)
    if chosen.prepare is None:
        return lambda: chosen.run(inputs, config)
    call, tensors = chosen.prepare(inputs, config)
    prepared, given = launch.prepare(call), list(tensors.values())
    return lambda: prepared(given)
