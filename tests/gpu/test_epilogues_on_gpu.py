"""Epilogues in native kernels on a GPU: values, dtypes, graphs, bad indices, compiled calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.native import CUDA, replays_with

import xattn


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).bfloat16()


def made(name: str, shape: tuple[int, ...]) -> xattn.Epilogue:
    residual = xattn.epilogues.residual(randn(*shape, seed=3))
    gate = xattn.epilogues.gate(randn(*shape, seed=4))
    bias = randn(shape[-2], shape[-1], seed=5).float()
    scale = torch.tensor(0.02, device=CUDA)
    return {
        "residual": lambda: residual,
        "gate, residual, fp8": lambda: gate.then(residual).then(xattn.epilogues.quantize(scale)),
        "int8": lambda: xattn.epilogues.quantize(scale, torch.int8),
        "bias, gelu": lambda: xattn.Epilogue(
            lambda o, b, h, q, d, x: torch.nn.functional.gelu(o + x[h, d], approximate="tanh"), (bias,)
        ),
        "float": lambda: xattn.Epilogue(lambda o, b, h, q, d: o * 0.5 + q + 100 * h + 0.01 * d, (), torch.float32),
    }[name]()


NAMES = ("residual", "gate, residual, fp8", "int8", "bias, gelu", "float")


def compared(call: Any, epilogue: xattn.Epilogue, backend: str, args: Any, **given: Any) -> None:
    out, lse = call(*args, return_lse=True, epilogue=epilogue, backend=backend, **given)
    true, true_lse = call(*args, return_lse=True, epilogue=epilogue, backend="reference", **given)
    assert out.dtype == true.dtype
    rtol, atol = (0.13, 1.01) if out.dtype.itemsize == 1 else (2e-2, 2e-2)
    torch.testing.assert_close(out.float(), true.float(), rtol=rtol, atol=atol)
    torch.testing.assert_close(lse, true_lse, rtol=1e-3, atol=1e-3)
    xattn.check_errors()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 88), (192, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seqlen", [700, 2048])
def test_dense(backend, name, dims, seqlen):
    """With causal, the first rows see no key: the epilogue sees 0."""
    d, dv = dims
    q, k, v = randn(2, seqlen, 8, d), randn(2, seqlen - 60, 2, d, seed=1), randn(2, seqlen - 60, 2, dv, seed=2)
    for causal in (False, True):
        compared(xattn.attention, made(name, (2, seqlen, 8, dv)), backend, (q, k, v), causal=causal)


@pytest.mark.parametrize("name", NAMES)
def test_varlen(backend, name):
    ends = torch.tensor([[0, 3, 500, 500, 900], [0, 40, 700, 740, 740]], dtype=torch.int32, device=CUDA)
    q, k, v = randn(950, 8, 128), randn(741, 2, 128, seed=1), randn(741, 2, 128, seed=2)
    args = (q, k, v, ends[0], ends[1], 497, 660)
    compared(xattn.attention_varlen, made(name, tuple(q.shape)), backend, args, causal=True)


@pytest.mark.parametrize("seqlen_q", [1, 300])
@pytest.mark.parametrize("name", NAMES)
def test_paged(backend, name, seqlen_q):
    """Decoding with splits, and the forward kernels."""
    q, cache, v_cache = randn(3, seqlen_q, 8, 128), randn(600, 16, 2, 128, seed=1), randn(600, 16, 2, 128, seed=2)
    table = torch.randperm(600, device=CUDA).view(3, 200).int()
    lengths = torch.tensor([3000, seqlen_q, 800], dtype=torch.int32, device=CUDA)
    args = (q, cache, v_cache, table, lengths)
    compared(xattn.attention_paged, made(name, tuple(q.shape)), backend, args, causal=True)


def test_beside_score_mod_and_mask_mod(backend):
    q, bias = randn(2, 600, 8, 128), randn(8, 600).float()
    given: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j: s + bias[h, j],
        "mask_mod": lambda b, h, i, j: (i - j) % 3 != 1,
    }
    compared(xattn.attention, made("gate, residual, fp8", tuple(q.shape)), backend, (q, q, q), **given)


@pytest.mark.parametrize("change", ["strides", "offset", "transposed"])
def test_aux_tensors_lie_anyhow(backend, change):
    shape = (2, 300, 8, 128)
    x = {
        "strides": lambda: randn(2, 300, 8, 256, seed=3)[..., ::2],
        "offset": lambda: randn(2 * 300 * 8 * 128 + 1, seed=3)[1:].view(shape),
        "transposed": lambda: randn(2, 8, 128, 300, seed=3).permute(0, 3, 1, 2),
    }[change]()
    q = randn(*shape)
    compared(xattn.attention, xattn.epilogues.residual(x), backend, (q, q, q))


def test_fp8_operands(backend):
    """Hopper's alone; others refuse them."""
    q = randn(2, 600, 8, 128).to(torch.float8_e4m3fn)
    given: dict[str, Any] = {"causal": True, "epilogue": made("residual", tuple(q.shape))}
    if backend != "sm90":
        with pytest.raises(xattn.UnsupportedError, match="dtype"):
            xattn.attention(q, q, q, backend=backend, **given)
        return
    out = xattn.attention(q, q, q, backend=backend, **given)
    true = xattn.attention(q, q, q, backend="reference", **given)
    assert (out.float() - true.float()).norm() < 0.04 * true.float().norm()


def test_a_graph_sees_new_values(backend):
    q, x = randn(2, 256, 8, 64), randn(2, 256, 8, 64, seed=1)
    call = lambda: xattn.attention(q, q, q, backend=backend, epilogue=xattn.epilogues.residual(x))  # noqa: E731
    replays_with(call, lambda: x.mul_(2))


def test_a_compiled_call(backend):
    q, x = randn(2, 256, 8, 64), randn(2, 256, 8, 64, seed=1)

    def call(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return xattn.attention(q, q, q, backend=backend, epilogue=xattn.epilogues.residual(x))

    assert torch.equal(torch.compile(call, fullgraph=True)(q, x), call(q, x))


def test_an_index_out_of_range_is_raised_when_asked(backend):
    q, held = randn(1, 64, 8, 64), torch.ones(63, device=CUDA)
    xattn.attention(q, q, q, backend=backend, epilogue=xattn.Epilogue(lambda o, b, h, i, d: o + held[d]))
    with pytest.raises(xattn.DeviceValueError, match="captured tensor"):
        xattn.check_errors()
