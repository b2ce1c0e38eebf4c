"""score_mod and mask_mod inside the kernels of both layers, against the oracle that calls them as they are."""

from __future__ import annotations

import warnings
from typing import Any

import oracle
import pytest
import torch

import xattn
from xattn import status

HEADS, RATIO, DIM = 4, 2, 32
DOCUMENTS = torch.arange(200).div(9, rounding_mode="floor").expand(3, 200) + torch.tensor([[0], [5], [9]])
BIAS = torch.randn(HEADS, 400, generator=torch.Generator().manual_seed(5))
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625]).bfloat16()


def captured(window: int, factor: float) -> Any:
    return lambda s, b, h, q, k: torch.where(q - k < window, s * factor + b, s - h)


FUNCTIONS: dict[str, dict[str, Any]] = {
    "relative": {"score_mod": lambda s, b, h, q, k: s + BIAS[h, q - k + 200]},
    "alibi": {"score_mod": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs()},
    "captured numbers": {"score_mod": captured(11, 0.5)},
    "documents": {"mask_mod": lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k]},
    "both": {
        "score_mod": lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0) + BIAS[h, k],
        "mask_mod": lambda b, h, q, k: (k < 7) | ((q + h) % 3 != 0),
    },
    "hides by -inf": {"score_mod": lambda s, b, h, q, k: torch.where((q + k) % 5 < 3, -torch.inf, s)},
    "hides all": {"mask_mod": lambda b, h, q, k: (q < 0) | (b == 1)},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "causal": {"causal": True},
    "window, softcap, sinks": {"window": (30, 3), "softcap": 2.0, "sinks": torch.tensor([0.1, -1.0, 2.0, 0.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]), "softmax_scale": -0.2},
}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(autouse=True)
def word(monkeypatch):
    found = torch.zeros(len(status.MESSAGES), dtype=torch.int32)
    monkeypatch.setattr(status, "word", lambda device: found)
    return found


def compared(got, call, args, options) -> None:
    """By the one rule of tests/oracle.py's callers: twice the error of plain torch operations in bf16."""

    def within(dtype: torch.dtype):
        def cast(t):
            return t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t

        return call(*map(cast, args), **{name: cast(value) for name, value in options.items()})

    (true, true_lse), (plain, _) = within(torch.float64), within(torch.bfloat16)
    out, lse = got
    for measure in (lambda t: t.abs().amax(), lambda t: t.norm()):
        allowed = 2 * measure(plain.double() - true) + measure(true) * 2**-8 + 1e-6
        assert measure(out.double() - true) <= allowed
    torch.testing.assert_close(lse.double(), true_lse.double(), rtol=1e-4, atol=1e-4)
    assert torch.equal(out[true.abs().sum(-1) == 0], torch.zeros_like(out[true.abs().sum(-1) == 0]))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dense(target, word, name, options):
    q, k, v = randn(2, 70, HEADS, DIM), randn(2, 90, HEADS // RATIO, DIM, seed=1), randn(2, 90, 2, DIM, seed=2)
    given = FUNCTIONS[name] | OPTIONS[options]
    got = xattn.attention(q, k, v, return_lse=True, backend=target.backend, **given)
    compared(got, oracle.attention, (q, k, v), given)
    assert not word.any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_varlen(target, word, name):
    """Indices count within the sequence."""
    ends = torch.tensor([[0, 3, 70, 70], [0, 40, 130, 141]], dtype=torch.int32)
    q, k, v = randn(75, HEADS, DIM), randn(141, 2, DIM, seed=1), randn(141, 2, DIM, seed=2)
    given = FUNCTIONS[name] | {"causal": True}
    args = (q, k, v, ends[0], ends[1], 67, 90)
    got = xattn.attention_varlen(*args, return_lse=True, backend=target.backend, **given)
    compared(got, oracle.varlen, args, given)
    assert not word.any()


@pytest.mark.parametrize("seqlen_q", [2, 40])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_paged(target, word, name, seqlen_q):
    """Few queries: the decode kernel; many: the forward body. q_idx is a token's position in its sequence."""
    q, cache = randn(3, seqlen_q, HEADS, DIM), randn(40, 8, 2, DIM, seed=1)
    v_cache = randn(40, 8, 2, DIM, seed=2)
    table = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:39].view(3, 13).int()
    lengths = torch.tensor([seqlen_q + 50, seqlen_q, 104 - seqlen_q], dtype=torch.int32)
    given = FUNCTIONS[name] | {"causal": True}
    args = (q, cache, v_cache, table, lengths)
    plan = xattn.explain(*args, kind="paged", backend=target.backend, **given)
    assert (dict(plan.config).get("kernel") == "decode") == (seqlen_q == 2)
    got = xattn.attention_paged(*args, return_lse=True, backend=target.backend, **given)
    compared(got, oracle.paged, args, given)
    assert not word.any()


@pytest.mark.parametrize("role", ["score_mod", "mask_mod"])
def test_an_index_out_of_range_is_reported(target, word, role):
    """Where a row sees the key, and nowhere else; 0 is read."""
    q, k = randn(1, 70, HEADS, DIM), randn(1, 70, 2, DIM, seed=1)
    table = torch.ones(70)

    def call(length: int) -> torch.Tensor:
        held = table[:length]
        fns = {
            "score_mod": lambda s, b, h, q, k: s * held[k],
            "mask_mod": lambda b, h, q, k: held[k] == 1,
        }
        return xattn.attention(q, k, k, backend=target.backend, **{role: fns[role]})

    torch.testing.assert_close(call(70), xattn.attention(q, k, k, backend=target.backend), rtol=2e-2, atol=2e-2)
    assert not word.any()
    call(69)
    assert word.tolist() == [int(code == "captured") for code in status.CODES]
    word.zero_()
    future = torch.ones(70)  # what only hidden keys ask for
    ahead = lambda s, b, h, q, k: s * future[torch.where(q < k, 99, k)]  # noqa: E731
    xattn.attention(q, k, k, causal=True, backend=target.backend, score_mod=ahead)
    assert not word.any()


def test_a_new_number_is_not_compiled(target, launchers):
    q = randn(1, 20, HEADS, DIM)
    images = launchers[target.backend].specs
    found = [xattn.attention(q, q, q, backend=target.backend, score_mod=captured(5, 0.5))]
    before = set(images)
    for window, factor in ((9, 1.0), (-3, 1e30), (2**29, 0.0), (0, float("-inf"))):
        found.append(xattn.attention(q, q, q, backend=target.backend, score_mod=captured(window, factor)))
    assert set(images) == before
    assert not torch.equal(found[0], found[1])


def test_what_cannot_be_had_is_named(target):
    q = randn(1, 20, HEADS, DIM)

    def special(s, b, h, q_idx, kv_idx):
        return s + 0 * torch.erfinv(s * 0.0)  # the line

    with pytest.raises(xattn.UnsupportedError, match=r"score_mod = erfinv \(.*test_user_functions_in_kernels.py:\d+\)"):
        xattn.attention(q, q, q, score_mod=special, backend=target.backend)
    plan = xattn.explain(q, q, q, score_mod=special)
    line = special.__code__.co_firstlineno + 1
    assert not plan.native and f"test_user_functions_in_kernels.py:{line})" in str(plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        xattn.attention(q, q, q, score_mod=special)
    assert any(w.category is xattn.FallbackWarning and "erfinv" in str(w.message) for w in caught)


def test_explain_shows_the_source(target):
    q = randn(1, 20, HEADS, DIM)
    plan = xattn.explain(q, q, q, **FUNCTIONS["both"], device=xattn.device.of(torch.device("cpu")))
    assert plan.native and [role for role, _ in plan.sources] == ["score_mod", "mask_mod"]
    assert "A::tanh(" in str(plan) and "kv_idx < 7" in str(plan) and plan.as_dict()["sources"] == dict(plan.sources)


def test_gradients_are_refused(target):
    q = randn(1, 20, HEADS, DIM).requires_grad_()
    with pytest.raises(xattn.UnsupportedError, match="grad"):
        xattn.attention(q, q, q, score_mod=captured(3, 0.5), backend=target.backend)
