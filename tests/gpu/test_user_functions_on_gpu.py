"""score_mod and mask_mod in native kernels on a GPU: values, numbers that change, graphs, bad indices, compile time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from gpu.native import CUDA, replays_with

import xattn
from xattn import jit
from xattn.images import Store


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).bfloat16()


def functions() -> dict[str, dict[str, Any]]:
    bias, slopes = randn(8, 4096).float(), randn(8).float()
    documents = torch.arange(2048, device=CUDA) // 300
    return {
        "relative": {"score_mod": lambda s, b, h, q, k: s + bias[h, q - k + 2048]},
        "alibi": {"score_mod": lambda s, b, h, q, k: s - slopes[h].abs() * (q - k).abs()},
        "softcap": {"score_mod": lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0)},
        "documents": {"mask_mod": lambda b, h, q, k: documents[q] == documents[k]},
        "both": {
            "score_mod": lambda s, b, h, q, k: s * 0.5 + bias[h, k],
            "mask_mod": lambda b, h, q, k: (k < 100) | ((q + h) % 3 != 0),
        },
    }


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["relative", "alibi", "softcap", "documents", "both"])
def test_as_the_reference(backend, name, head_dim):
    q, k, v = randn(2, 700, 8, head_dim), randn(2, 900, 2, head_dim, seed=1), randn(2, 900, 2, head_dim, seed=2)
    given = functions()[name] | {"causal": True, "return_lse": True}
    out, lse = xattn.attention(q, k, v, backend=backend, **given)
    true, true_lse = xattn.attention(q.float(), k.float(), v.float(), backend="reference", **given)
    torch.testing.assert_close(out.float(), true, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, true_lse, rtol=1e-4, atol=1e-4)
    xattn.check_errors()


def test_a_graph_sees_new_values_of_captured_tensors(backend):
    q, table = randn(1, 256, 8, 64), torch.zeros(256, device=CUDA)
    call = lambda: xattn.attention(q, q, q, backend=backend, score_mod=lambda s, b, h, i, j: s + table[j])  # noqa: E731
    replays_with(call, lambda: table.copy_(torch.arange(256, device=CUDA) * 0.1))


def test_an_index_out_of_range_is_raised_when_asked(backend):
    q, table = randn(1, 64, 8, 64), torch.zeros(63, device=CUDA)
    xattn.attention(q, q, q, backend=backend, score_mod=lambda s, b, h, i, j: s + table[j])
    with pytest.raises(xattn.DeviceValueError, match="captured tensor"):
        xattn.check_errors()


def test_a_new_function_is_compiled_and_new_numbers_are_not(backend, tmp_path, monkeypatch):
    """Cold below 3 s."""
    monkeypatch.setattr(jit, "_chosen", {})
    monkeypatch.setattr(jit, "Store", lambda *a, **k: Store((), tmp_path))
    q = randn(1, 512, 8, 128)

    def call(slope: float) -> torch.Tensor:
        return xattn.attention(
            q, q, q, causal=True, backend=backend, score_mod=lambda s, b, h, i, j: s - slope * (i - j)
        )

    xattn.attention(q, q, q, causal=True, backend=backend)  # loads the compiler
    built: list[float] = []
    real = jit.build

    def build(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return real(*args)
        finally:
            built.append(time.perf_counter() - start)

    monkeypatch.setattr(jit, "build", build)
    first = call(0.1)
    assert len(built) == 1 and built[0] < 3
    assert not torch.equal(call(0.2), first) and len(built) == 1
