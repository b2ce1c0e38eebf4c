"""When user functions are traced, and what is read of them meanwhile."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import xattn
from xattn import UnsupportedError, fusion

CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class _Indexed(TorchDispatchMode):
    """Notes which tensors with values are indexed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "index" in str(func) and not isinstance(args[0], FakeTensor) and args[0].device.type != "meta":
            self.found.append(args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("role", ["score_mod", "epilogue"])
def test_what_a_function_holds_is_not_read_while_it_is_traced(role):
    """A GPU does not survive an index out of range, which may be one that is never asked for."""
    held, starts = randn(3), torch.tensor([-9, -9])
    with _Indexed() as indexed:
        held[torch.tensor([1])]
        assert len(indexed.found) == 1
        fusion.trace(role, lambda x, b, h, i, j: x + held[starts[b] + i] + 0.125, CPU)
    assert len(indexed.found) == 1


@pytest.fixture
def traces(monkeypatch):
    """How often functions were traced since."""
    module, found = sys.modules["xattn.fusion.trace"], []
    real = module._trace
    monkeypatch.setattr(module, "_traced", {})
    monkeypatch.setattr(module, "_trace", lambda *args: (found.append(args[0]), real(*args))[1])
    return found


WEIGHT = 0.5


class Settings:
    weight = 0.5


def test_a_function_is_traced_once(traces, monkeypatch):
    """And again where what it holds has changed, but for the elements of tensors."""

    def key(held, number, kind=0.25):
        return fusion.trace("score_mod", lambda s, b, h, i, j: s * number + held[h] * WEIGHT + kind, CPU)

    first, aux = key(randn(4), 2)
    other = randn(4, seed=1)
    again, aux_again = key(other, 2)
    assert again == first and aux_again[0] is other and aux[0] is not other and len(traces) == 1
    changes = [
        (randn(5), 2),
        (randn(4).half(), 2),
        (randn(8)[::2], 2),
        (randn(4), 3),
        (randn(4), 2.0),
        (randn(4), -0.0),
    ]
    for n, change in enumerate(changes):
        key(*change)
        assert len(traces) == n + 2, change
    key(randn(4), 0.0)
    assert len(traces) == len(changes) + 2
    monkeypatch.setitem(globals(), "WEIGHT", 0.75)
    changed, _ = key(randn(4), 2)
    assert len(traces) == len(changes) + 3 and changed != first


def test_a_function_that_another_calls_is_noticed(traces):
    def call(inner):
        return fusion.trace("score_mod", lambda s, b, h, i, j: inner(s), CPU)[0]

    assert call(lambda s: s * 2) != call(lambda s: s * 3) and len(traces) == 2


def test_what_may_change_unseen_is_traced_each_time(traces, monkeypatch):
    settings, values = Settings(), []
    for value in (0.5, 0.75):
        settings.weight = Settings.weight = value
        monkeypatch.setattr(sys.modules[__name__], "WEIGHT", value)
        for fn in (
            lambda s, b, h, i, j: s * settings.weight,
            lambda s, b, h, i, j: s * Settings.weight,
            lambda s, b, h, i, j: s * xattn.some_weight,
        ):
            monkeypatch.setattr(xattn, "some_weight", value, raising=False)
            values.append(fusion.trace("score_mod", fn, CPU)[0])
    assert len(traces) == 6 and all(a != b for a, b in zip(values[:3], values[3:], strict=True))
    Settings.weight = 0.5


def test_errors_of_a_function_come_each_time(traces):
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="reads a value"):
            fusion.trace("score_mod", lambda s, b, h, i, j: s if i > j else s * 2, CPU)
    assert len(traces) == 2
