"""Epilogues inside the kernels of both layers, against the reference that calls them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import xattn
from xattn import status

HEADS, RATIO = 4, 2
OUTPUTS = [
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8, torch.uint8
]  # fmt: skip


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


BIAS = randn(HEADS, 96, seed=7).float()
TABLE = randn(512, seed=8).half()
BY_SEQUENCE = randn(3, HEADS, seed=9).double()
NUMBERS = torch.arange(96) % 5


def places(o, b, h, q_idx, d):
    """Every coordinate enters."""
    return torch.where((d % 3 == 0) | (q_idx % 4 == 1), o * BY_SEQUENCE[b, h].float(), o + NUMBERS[d] * 0.25)


# By the shape of the output.
EPILOGUES: dict[str, Callable[[torch.Size], xattn.Epilogue]] = {
    "scale and bias": lambda s: xattn.Epilogue(lambda o, b, h, q, d, x: o * 0.5 + x[h, d], (BIAS,)),
    "residual": lambda s: xattn.epilogues.residual(randn(*s, seed=3)),
    "gate, residual": lambda s: xattn.epilogues.gate(randn(*s, seed=3)).then(
        xattn.epilogues.residual(randn(*s, seed=4).float())
    ),
    "gate, fp8": lambda s: xattn.epilogues.gate(randn(*s, seed=3)).then(xattn.epilogues.quantize(torch.tensor(0.02))),
    "int8": lambda s: xattn.epilogues.quantize(torch.tensor(0.02), torch.int8),
    "places": lambda s: xattn.Epilogue(places, out_dtype=torch.float32),
    "scattered": lambda s: xattn.Epilogue(lambda o, b, h, q, d: torch.relu(o) + TABLE[q + d // 3] - TABLE[2 * d]),
    "not of o": lambda s: xattn.Epilogue(lambda o, b, h, q, d: b * 1000 + h * 100 + d, out_dtype=torch.float32),
    "a number": lambda s: xattn.Epilogue(lambda o, b, h, q, d: 2.5),
}  # fmt: skip


@pytest.fixture(autouse=True)
def word(monkeypatch):
    found = torch.zeros(len(status.MESSAGES), dtype=torch.int32)
    monkeypatch.setattr(status, "word", lambda device: found)
    return found


def compared(call: Callable[..., Any], epilogue: xattn.Epilogue, target: Any, args: Any, **given: Any) -> Any:
    """A native call against the reference in float32; what is divided by a scale of 0.02 differs by 50 times as
    much."""
    out, lse = call(*args, return_lse=True, backend=target.backend, epilogue=epilogue, **given)
    wide = [t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args]
    exact = xattn.Epilogue(epilogue.fn, epilogue.aux, epilogue.out_dtype or args[0].dtype)
    exact.rows = epilogue.rows
    true, true_lse = call(*wide, return_lse=True, backend="reference", epilogue=exact, **given)
    assert out.dtype == true.dtype and out.shape == true.shape
    rtol, atol = (0.13, 1.01) if out.dtype.itemsize == 1 else (2e-2, 2e-2)
    torch.testing.assert_close(out.float(), true.float(), rtol=rtol, atol=atol)
    torch.testing.assert_close(lse, true_lse, rtol=1e-3, atol=1e-3)
    return out


@pytest.mark.parametrize("dims", [(32, 32), (64, 88)])
@pytest.mark.parametrize("name", EPILOGUES)
def test_dense(target, word, name, dims):
    q, k, v = randn(2, 70, HEADS, dims[0]), randn(2, 60, 2, dims[0], seed=1), randn(2, 60, 2, dims[1], seed=2)
    epilogue = EPILOGUES[name](torch.Size((2, 70, HEADS, dims[1])))
    compared(xattn.attention, epilogue, target, (q, k, v), causal=True)  # ten rows see no key: the epilogue sees 0
    assert not word.any()


@pytest.mark.parametrize("name", EPILOGUES)
def test_varlen(target, word, name):
    """Indices count within the sequence; rows behind the last one are 0."""
    ends = torch.tensor([[0, 3, 70, 70], [0, 40, 130, 141]], dtype=torch.int32)
    q, k, v = randn(75, HEADS, 32), randn(141, 2, 32, seed=1), randn(141, 2, 32, seed=2)
    args = (q, k, v, ends[0], ends[1], 67, 90)
    out = compared(xattn.attention_varlen, EPILOGUES[name](q.shape), target, args, window=(30, 3))
    assert not out[70:].float().any() and not word.any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seqlen_q", [2, 40])
@pytest.mark.parametrize("name", EPILOGUES)
def test_paged(target, word, name, seqlen_q, packed):
    """Few queries: the decode kernel, which splits keys; many: the forward body. q_idx is a token's position in its
    sequence."""
    q, cache, v_cache = randn(3, seqlen_q, HEADS, 32), randn(40, 8, 2, 32, seed=1), randn(40, 8, 2, 32, seed=2)
    given: dict[str, Any] = {"causal": True}
    if packed:
        q = q.flatten(0, 1)
        offsets = torch.tensor([0, 1, seqlen_q, seqlen_q + 1], dtype=torch.int32)
        given |= {"cu_seqlens_q": offsets, "max_seqlen_q": seqlen_q}
    table = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:39].view(3, 13).int()
    lengths = torch.tensor([seqlen_q + 50, seqlen_q, 104 - seqlen_q], dtype=torch.int32)
    plan = xattn.explain(q, cache, v_cache, table, lengths, kind="paged", backend=target.backend, **given)
    assert (dict(plan.config).get("kernel") == "decode") == (seqlen_q == 2)
    args, epilogue = (q, cache, v_cache, table, lengths), EPILOGUES[name](q.shape)
    out = compared(xattn.attention_paged, epilogue, target, args, num_splits=3 if seqlen_q == 2 else None, **given)
    assert not packed or not out[seqlen_q + 1 :].float().any()
    assert not word.any()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", OUTPUTS)
def test_every_output_dtype_is_rounded_as_torch_does(target, dtype, paged):
    """Numbers that attention does not touch, those between two elements, too large ones and NaN included."""
    numbers = torch.cat(
        [torch.linspace(-600, 600, 497), torch.tensor([float("nan"), 1e5, -1e5, 0.0, 7.5e-3, 2**-9, -3e-3])]
    )
    if not dtype.is_floating_point:
        numbers = numbers.nan_to_num(0.0)
    epilogue = xattn.Epilogue(lambda o, b, h, q, d: numbers[(d + 32 * (h + 4 * q)) % len(numbers)], (), dtype)
    if paged:
        cache = randn(4, 8, 2, 32)
        table, lengths = torch.arange(4, dtype=torch.int32).view(1, 4), torch.tensor([4], dtype=torch.int32)
        out = xattn.attention_paged(
            randn(1, 4, 4, 32), cache, cache, table, lengths, backend=target.backend, epilogue=epilogue
        )
    else:
        q = randn(1, 40, 4, 32)
        out = xattn.attention(q, q, q, backend=target.backend, epilogue=epilogue)
    index = torch.arange(out.numel()) % len(numbers)
    want = numbers[index].to(dtype)
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    seen = ~want.float().isnan()
    got = out.flatten()
    assert torch.equal(got.view(size)[seen], want.view(size)[seen]) and bool(got.float()[~seen].isnan().all())


@pytest.mark.parametrize("change", ["strides", "offset", "transposed", "broadcast"])
def test_aux_tensors_lie_anyhow(target, word, change):
    q, shape = randn(2, 40, HEADS, 32), (2, 40, HEADS, 32)
    x = {
        "strides": lambda: randn(2, 40, HEADS, 64, seed=3)[..., ::2],
        "offset": lambda: randn(2 * 40 * HEADS * 32 + 1, seed=3)[1:].view(shape),
        "transposed": lambda: randn(2, HEADS, 32, 40, seed=3).permute(0, 3, 1, 2),
        "broadcast": lambda: randn(2, 1, HEADS, 32, seed=3).expand(shape),
    }[change]()
    compared(xattn.attention, xattn.epilogues.residual(x), target, (q, q[:, :, :2], q[:, :, 2:]))
    assert not word.any()


def test_beside_score_mod_and_mask_mod(target, word):
    q = randn(2, 40, HEADS, 32)
    given: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j: s + BIAS[h, j],
        "mask_mod": lambda b, h, i, j: (i - j) % 3 != 1,
        "sinks": torch.tensor([0.1, -1.0, 2.0, 0.0]),
        "softcap": 3.0,
    }
    compared(xattn.attention, EPILOGUES["gate, residual"](q.shape), target, (q, q[:, :, :2], q[:, :, 2:]), **given)
    assert not word.any()


@pytest.mark.parametrize("seqlen_q", [2, 40])
def test_an_index_out_of_range_is_reported(target, word, seqlen_q):
    q, held = randn(1, seqlen_q, HEADS, 32), torch.ones(31)
    cache, table = randn(8, 8, 2, 32), torch.arange(8, dtype=torch.int32).view(1, 8)
    args = (q, cache, cache, table, torch.tensor([60], dtype=torch.int32))
    given: dict[str, Any] = {"backend": target.backend, "causal": True}
    xattn.attention_paged(*args, epilogue=xattn.Epilogue(lambda o, b, h, i, d: o + held[d.clamp(max=30)]), **given)
    assert not word.any()
    out = xattn.attention_paged(*args, epilogue=xattn.Epilogue(lambda o, b, h, i, d: o * 0 + held[d]), **given)
    assert word.tolist() == [int(code == "captured") for code in status.CODES]
    assert torch.equal(out, torch.where(torch.arange(32) < 31, 1.0, 0.0).to(out).expand_as(out))


def test_new_numbers_and_tensors_are_not_compiled(target, launchers):
    q = randn(1, 20, HEADS, 32)
    images = launchers[target.backend].specs

    def call(factor: float, bias: torch.Tensor) -> torch.Tensor:
        epilogue = xattn.Epilogue(lambda o, b, h, i, d: o * factor + bias[d])
        return xattn.attention(q, q, q, backend=target.backend, epilogue=epilogue)

    first = call(0.5, torch.zeros(32))
    before = set(images)
    assert not torch.equal(first, call(2.0, torch.ones(32))) and set(images) == before


def test_what_cannot_be_had_is_named(target):
    q = randn(1, 20, HEADS, 32)

    def special(o, b, h, q_idx, d):
        return torch.erfinv(o * 0.0)  # the line

    given: dict[str, Any] = {"epilogue": xattn.Epilogue(special)}
    line = special.__code__.co_firstlineno + 1
    with pytest.raises(xattn.UnsupportedError, match=rf"epilogue = erfinv \(.*test_epilogues_in_kernels.py:{line}\)"):
        xattn.attention(q, q, q, backend=target.backend, **given)
    plan = xattn.explain(q, q, q, **given)
    assert not plan.native and f"test_epilogues_in_kernels.py:{line})" in str(plan)
    with pytest.warns(xattn.FallbackWarning, match="erfinv"):
        out = xattn.attention(q, q, q, **given)
    assert torch.equal(out, torch.zeros_like(out))


def test_explain_shows_the_source(target):
    q = randn(1, 20, HEADS, 32)
    device = xattn.device.of(torch.device("cpu"))
    plan = xattn.explain(q, q, q, epilogue=xattn.epilogues.gate(q), device=device)
    assert plan.native and [role for role, _ in plan.sources] == ["epilogue"]
    assert "user::Run" in str(plan) and "fast_sigmoid" in str(plan)


def test_gradients_are_refused(target):
    q = randn(1, 20, HEADS, 32).requires_grad_()
    with pytest.raises(xattn.UnsupportedError, match="grad"):
        xattn.attention(q, q, q, epilogue=xattn.epilogues.residual(q.detach()), backend=target.backend)
