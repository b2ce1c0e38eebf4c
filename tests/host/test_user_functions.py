"""score_mod and mask_mod as C++: every operation, compiled by the host's compiler, against what torch gives."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xattn import fusion, jit, user_functions
from xattn.images import ImageSpec, Store

CPU = torch.device("cpu")
SHAPE = B, H, Q, K = 2, 3, 21, 37


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TABLE = randn(H, Q + K)
SLOPES = randn(H).bfloat16()
HALF = randn(4, K).half()
WIDE = randn(B, H).double()
DOCUMENTS = torch.arange(K).div(5, rounding_mode="floor").expand(B, K) + torch.tensor([[0], [3]])
BYTES = torch.tensor([3, 200, 7, 255], dtype=torch.uint8)
SMALL = torch.tensor([-128, 127, 5], dtype=torch.int8)
SHORT = torch.arange(-20, 20, dtype=torch.int16)
FLAGS = torch.arange(K) % 3 == 0
ONE = torch.tensor([[0.75]])
SCALAR = torch.tensor(1.25)
LARGE = torch.tensor([2**62, -(2**62), 2**40 + 1])
BIG = 3_000_000_000
WINDOW, SLOPE = 11, 0.3


def t5(s, b, h, q, k):
    distance = torch.clamp(q - k, min=0)
    small = distance < 8
    large = 8 + (torch.log(distance.float() / 8) / math.log(4) * 8).to(torch.long)
    return s + TABLE[h, torch.where(small, distance, torch.minimum(large, torch.full_like(large, 15)))]


def reassigned(s, b, h, q, k):
    x = torch.stack([s, s])[0] if False else s.clone()
    x += 0.5 * (q > k)
    return x


SCORE_MODS: dict[str, Any] = {
    "as it is": lambda s, b, h, q, k: s,
    "a number": lambda s, b, h, q, k: -2.5,
    "alibi": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "gemma": lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0),
    "t5": t5,
    "relative": lambda s, b, h, q, k: s + TABLE[h, q - k + K],
    "a row of a table": lambda s, b, h, q, k: s + TABLE[h][q] * TABLE.t()[k][h],
    "negative indices": lambda s, b, h, q, k: s + TABLE[-1, -1 - q] + TABLE[h, -k - 1],
    "strides": lambda s, b, h, q, k: s + TABLE.transpose(0, 1)[q, h] + HALF.permute(1, 0)[k, b],
    "new axes": lambda s, b, h, q, k: s + TABLE[None][0, h, q] + TABLE.unsqueeze(1)[h, 0, k],
    "one element": lambda s, b, h, q, k: s * ONE.reshape(()) + ONE[0, 0] + ONE.squeeze() + SCALAR,
    "float64": lambda s, b, h, q, k: s + WIDE[b, h] * 1e-3 - WIDE[b, h] / 3,
    "half": lambda s, b, h, q, k: s + HALF[b, k] * HALF[b, k] + (HALF[h, q] * 0.1).float(),
    "bfloat16": lambda s, b, h, q, k: (s.bfloat16() + SLOPES[h] * SLOPES[h]).float(),
    "bytes": lambda s, b, h, q, k: s + (BYTES[h] + BYTES[h]) * 0.01 + (BYTES[b] - BYTES[h]) * 0.1,
    "small": lambda s, b, h, q, k: s + (SMALL[h] - SMALL[b]) * 0.01 + (-SMALL[h]) * 0.1 + SHORT[q],
    "flags": lambda s, b, h, q, k: s + FLAGS[k] * 2 + (FLAGS[k] + FLAGS[q]) - torch.where(FLAGS[q], 1.0, s),
    "large": lambda s, b, h, q, k: s + (LARGE[h] * 4 + q).float() * 1e-9 + ((LARGE[h] + k) // 7) * 1e-18,
    "captured numbers": lambda s, b, h, q, k: torch.where((q - k).abs() <= WINDOW, s * SLOPE, s - BIG * 1e-9),
    "whole numbers": lambda s, b, h, q, k: s + (3 * q - 2 * k + h * b) - (q + 1_000_000) * (k + 1_000_000) * 1e-12,
    "quotients": lambda s, b, h, q, k: s + (q - k) // 4 + (k - q) // 3 + (q - k) // -5 + q // 7 + k // WINDOW,
    "quotients to 0": lambda s, b, h, q, k: (
        s + torch.div(q - k, 4, rounding_mode="trunc") - torch.div(k - q, WINDOW, rounding_mode="trunc")
    ),
    "remainders": lambda s, b, h, q, k: s + (q - k) % 4 + (q - k) % 3 + (q - k) % -5 + k % WINDOW + q % 16,
    "fmod": lambda s, b, h, q, k: s + torch.fmod(q - k, 4) + torch.fmod(s * 10, 3.0) + torch.remainder(s * 10, -3.0),
    "float quotients": lambda s, b, h, q, k: s + q / (k + 1) + (q - k) / 3 + (s * 10) // 3.0 + 2 / (k + 1),
    "trunc of a quotient": lambda s, b, h, q, k: torch.div(s * 7, 2.0, rounding_mode="trunc") + 1 / (1 + q),
    "bits": lambda s, b, h, q, k: s + ((q & 5) | (k ^ 3)) + (~q) * 0.1 + (q << 2) + (k >> 1) + (-k >> 2),
    "extremes": lambda s, b, h, q, k: (
        torch.maximum(q, k) + torch.minimum(s, TABLE[h, k]) + torch.max(s, s * 2) + s.clamp(-0.5, 0.5)
    ),
    "clamps": lambda s, b, h, q, k: (q - k).clamp(-3, 4) + s.clamp(min=0) + torch.clamp(k, max=9) + s.clamp_max(SLOPE),
    "exponentials": lambda s, b, h, q, k: s.exp() * 0.1 + (-k * 0.1).exp() + torch.exp2(s) + torch.expm1(s * 0.01),
    "logarithms": lambda s, b, h, q, k: (
        (s.abs() + 0.1).log() + (q + 1).log() + (k + 1).log2() + torch.log1p(q * 1e-3) + torch.log10(k + 1)
    ),
    "roots": lambda s, b, h, q, k: s.abs().sqrt() + (q + 1).rsqrt() + (k + 1) ** -0.5 + (q + 1).float() ** 0.25,
    "powers": lambda s, b, h, q, k: s**2 + s**3 + q**2 + 2.0 ** (-h - 1) + (k + 1).float() ** SLOPE,
    "waves": lambda s, b, h, q, k: torch.sin(q * 0.1) * torch.cos(k * 0.2) + s,
    "sigmoids": lambda s, b, h, q, k: torch.sigmoid(s) + torch.sigmoid(q * 0.1 - 2) + torch.tanh(k * 0.1),
    "activations": lambda s, b, h, q, k: (
        torch.nn.functional.silu(s) + torch.relu(s) + torch.nn.functional.softplus(s) + torch.nn.functional.elu(s)
        + torch.nn.functional.gelu(s, approximate="tanh") + torch.lerp(s, s * 2, SLOPE)
    ),
    "roundings": lambda s, b, h, q, k: (
        (s * 3).floor() + (s * 3).ceil() + (s * 3).trunc() + (s * 4).round() + (s * 5).frac() + (q / 2).round()
    ),
    "signs": lambda s, b, h, q, k: s.sign() + (q - k).sign() + (q - k).abs() + -s + s.square() + (k + 1).reciprocal(),
    "casts": lambda s, b, h, q, k: (s * 10).int() + (s * 1000).to(torch.int8) * 0 + (q - k).to(torch.uint8) + k.half(),
    "nan": lambda s, b, h, q, k: torch.where((s / 0 * 0).isnan() | (q / 0).isinf(), s, s.nan_to_num()),
    "infinite": lambda s, b, h, q, k: torch.where(q < k, -math.inf, s).masked_fill(k == 3, -1e30),
    "in place": reassigned,
    "not used": lambda s, b, h, q, k: (torch.erfinv(s), s)[1],
}  # fmt: skip
MASK_MODS: dict[str, Any] = {
    "causal": lambda b, h, q, k: q >= k,
    "all": lambda b, h, q, k: True,
    "documents": lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (q >= k),
    "prefix": lambda b, h, q, k: (k < WINDOW) | (q >= k),
    "window": lambda b, h, q, k: torch.logical_and(q - k <= WINDOW, ~(q < k)),
    "logic": lambda b, h, q, k: torch.logical_xor(q > k, FLAGS[k]) | torch.logical_not(q - 3) | (h == 1),
    "mixed": lambda b, h, q, k: (q > 2.5) & (k != b + 7.0) | (SMALL[h] < BYTES[b]) & (k <= True),
    "blocks": lambda b, h, q, k: (q // 4 == k // 4) ^ (FLAGS[q] & FLAGS[k]),
}


def coordinates() -> list[torch.Tensor]:
    return [x.flatten() for x in torch.meshgrid(*(torch.arange(n) for n in SHAPE), indexing="ij")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")

    def evaluate(role: str, fn, score: torch.Tensor, at: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(result, found) of each element, by the kernels' source."""
        key, aux = fusion.trace(role, fn, CPU)
        mod = fusion.lookup(key)
        assert mod is not None and mod.lowered is not None, mod and mod.refusal
        x: Any = SimpleNamespace(functions=lambda: ((role, mod),), **{f"{role}_aux": aux})
        params = user_functions.params_of(x)()
        for name, t in user_functions.fill(params, x).items():
            getattr(params, name).data = t.data_ptr()
        functions = user_functions.of(x)
        spec = ImageSpec("arch/host/functions.cpp", (("functions", user_functions.source(functions)),), "host")
        path = folder / f"{spec.key()}.so"
        if not path.exists():  # what is loaded must not change
            path.write_bytes(jit.get(spec, Store(shipped=(), cache=folder)).code)
        run = ctypes.CDLL(str(path)).xattn_functions
        result, found = torch.full(score.shape, math.nan), torch.zeros(score.shape, dtype=torch.bool)
        places = torch.stack(at, 1).int().contiguous()
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (score, places, result, found)]
        run(ctypes.byref(params), *pointers[:2], ctypes.c_int64(score.numel()), *pointers[2:])
        return result, found

    return evaluate


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(run, name):
    fn, at, score = SCORE_MODS[name], coordinates(), randn(math.prod(SHAPE), seed=1)
    result, found = run("score_mod", fn, score, at)
    key, aux = fusion.trace("score_mod", fn, CPU)
    mod = fusion.lookup(key)
    shaped = [torch.arange(n) for n in SHAPE]
    eager = mod.eager(score.view(SHAPE), *(x.view(-1, *[1] * (3 - n)) for n, x in enumerate(shaped)), *aux)
    wanted = eager.expand(SHAPE).reshape(-1).float()
    assert found.all()
    torch.testing.assert_close(result, wanted, rtol=3e-6, atol=3e-6, equal_nan=True)


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mods(run, name):
    fn, at = MASK_MODS[name], coordinates()
    result, found = run("mask_mod", fn, randn(math.prod(SHAPE)), at)
    key, aux = fusion.trace("mask_mod", fn, CPU)
    shaped = [torch.arange(n) for n in SHAPE]
    eager = fusion.lookup(key).eager(*(x.view(-1, *[1] * (3 - n)) for n, x in enumerate(shaped)), *aux)
    assert found.all() and torch.equal(result == 1, eager.expand(SHAPE).reshape(-1))


# ---------------------------------------------------------------- indices out of range
def test_nothing_is_read_beside_a_captured_tensor(run):
    """What lies around it is NaN; an index out of range gives 0, and is noted."""
    around = torch.full((7, 9), math.nan)
    table = around[2:5, 3:7]
    table.copy_(randn(3, 4))
    at = [torch.tensor([n]).repeat(2500) for n in (0, 0)] + [
        x.flatten() for x in torch.meshgrid(torch.arange(-25, 25), torch.arange(50), indexing="ij")
    ]
    result, found = run("score_mod", lambda s, b, h, q, k: s + table[q, k - 25], torch.ones(2500), at)
    i, j = at[2], at[3] - 25
    valid = (i >= -3) & (i < 3) & (j >= -4) & (j < 4)
    assert torch.equal(found, valid) and valid.any()
    assert torch.equal(result[~valid], torch.ones(int((~valid).sum())))
    assert torch.equal(result[valid], 1 + table[i[valid], j[valid]])


def test_wide_indices(run):
    table, far = randn(4), torch.tensor([2**32 + 1, -(2**32) + 1, 2, -1])
    at = [torch.zeros(4, dtype=torch.int64)] * 3 + [torch.arange(4)]
    result, found = run("score_mod", lambda s, b, h, q, k: table[far[k]], torch.ones(4), at)
    assert found.tolist() == [False, False, True, True]
    assert torch.equal(result, torch.stack([torch.tensor(0.0), torch.tensor(0.0), table[2], table[-1]]))


def test_an_empty_table_gives_nothing(run):
    empty = torch.zeros(0, 5)
    result, found = run("score_mod", lambda s, b, h, q, k: s + empty[q, k], torch.ones(1), [torch.zeros(1).long()] * 4)
    assert result.tolist() == [1.0] and found.tolist() == [False]


def test_a_divisor_of_0_stops_nothing(run):
    n = torch.tensor([3, -1, 0])
    low = torch.tensor(-(2**63))
    fn = lambda s, b, h, q, k: s + (low // n[k]) * 0.0 + (q % n[k]) + torch.div(q, n[k], rounding_mode="trunc")  # noqa: E731
    at = [torch.zeros(3, dtype=torch.int64)] * 2 + [torch.full((3,), 7), torch.arange(3)]
    result, _ = run("score_mod", fn, torch.ones(3), at)
    assert result.tolist() == [1.0 + 1 + 2, 1.0 + 0 - 7, 1.0]
