"""Good arguments of every kind of call by name, for tests that spoil them, and what is checked then."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xattn

FUNCTIONS = {
    "attention": xattn.attention,
    "varlen": xattn.attention_varlen,
    "paged": xattn.attention_paged,
    "packed": xattn.attention_paged,  # paged, with packed queries and packed new tokens
}
KINDS = list(FUNCTIONS)
POSITIONAL = {
    "attention": ("q", "k", "v"),
    "varlen": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "paged": ("q", "k_cache", "v_cache", "page_table", "seqlens_k"),
}
POSITIONAL["packed"] = POSITIONAL["paged"]
NAN, INF = math.nan, math.inf


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def rotary(width: int = 4, positions: int = 16) -> xattn.Rotary:
    angle = torch.arange(positions)[:, None] / torch.arange(1, width + 1)
    return xattn.Rotary(angle.cos(), angle.sin())


def made(kind: str, append: bool = True) -> dict[str, Any]:
    """Good arguments: 2 sequences, 4 query heads on 2, head_dim 8, head_dim_v 16."""
    if kind == "attention":
        return {"q": randn(2, 5, 4, 8), "k": randn(2, 6, 2, 8), "v": randn(2, 6, 2, 16)}
    if kind == "varlen":
        found: dict[str, Any] = {"q": randn(7, 4, 8), "k": randn(9, 2, 8), "v": randn(9, 2, 16)}
        found |= {"cu_seqlens_q": torch.tensor([0, 5, 7]), "cu_seqlens_k": torch.tensor([0, 3, 9], dtype=torch.int32)}
        return found | {"max_seqlen_q": 5, "max_seqlen_k": 6}
    found = {"q": randn(2, 2, 4, 8), "k_cache": randn(4, 4, 2, 8), "v_cache": randn(4, 4, 2, 16)}
    found |= {"page_table": torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), "seqlens_k": torch.tensor([5, 3])}
    if append:
        found |= {"k_new": randn(2, 2, 2, 8), "v_new": randn(2, 2, 2, 16), "rotary": rotary()}
    if kind == "packed":
        cu_seqlens = torch.tensor([0, 3, 4])
        found |= {"q": randn(4, 4, 8), "cu_seqlens_q": cu_seqlens, "max_seqlen_q": 3}
        if append:
            found |= {"k_new": randn(4, 2, 8), "v_new": randn(4, 2, 16), "cu_seqlens_new": cu_seqlens.int()}
    return found


def everything(kind: str) -> dict[str, Any]:
    """Good arguments with each optional tensor in its place."""
    found = made(kind)
    found |= {"alibi_slopes": randn(4), "sinks": randn(4), "dropout_rng": torch.tensor([1, 2]), "q_scale": randn(2, 2)}
    found |= {"k_scale": torch.tensor(2.0), "v_scale": torch.full((2, 2), 3.0), "out": out_like(found)}
    if kind in ("attention", "varlen"):
        return found | {"attn_mask": torch.ones(5, 6, dtype=torch.bool), "seqused_k": torch.tensor([3, 4])}
    return found | {"attn_mask": torch.ones(4, 3 if kind == "packed" else 2, dtype=torch.bool)}


def out_like(given: dict[str, Any]) -> torch.Tensor:
    return torch.full((*given["q"].shape[:-1], 16), 7.0)


def call(kind: str, given: dict[str, Any], **more: Any) -> Any:
    args = [given[name] for name in POSITIONAL[kind]]
    return FUNCTIONS[kind](*args, **{n: v for n, v in given.items() if n not in POSITIONAL[kind]}, **more)


def explain(kind: str, given: dict[str, Any]) -> xattn.Plan:
    return _asked(xattn.explain, kind, given)


def supported(kind: str, given: dict[str, Any]) -> bool:
    return _asked(xattn.supported, kind, given)


def _asked(question: Callable[..., Any], kind: str, given: dict[str, Any]) -> Any:
    args = [given[name] for name in POSITIONAL[kind]]
    kwargs = {n: v for n, v in given.items() if n not in POSITIONAL[kind]}
    return question(*args, kind="paged" if kind == "packed" else kind, **kwargs)


def bits(given: dict[str, Any]) -> dict[str, bytes]:
    """Every byte of every dense tensor that lies on the CPU."""
    return {
        name: t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, t in given.items()
        if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.layout is torch.strided
    }


class unchanged:
    """A context in which no byte of the tensors changes."""

    def __init__(self, given: dict[str, Any]):
        self.given, self.before = given, bits(given)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        after = bits(self.given)
        assert [name for name in self.before if self.before[name] != after[name]] == []


each_kind = pytest.mark.parametrize("kind", KINDS)


def assert_message(error: BaseException, blamed: str) -> None:
    assert re.match(rf"({blamed})(\[\d+\])?\b.*: got .*; allowed: .+", str(error), re.DOTALL), str(error)
    assert not isinstance(error, xattn.DeviceValueError)
