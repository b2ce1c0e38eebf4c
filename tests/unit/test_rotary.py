"""Rotary against multiplication by complex numbers, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import xattn
from xattn import Rotary


def tables(positions: int, width: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** (-torch.arange(width, dtype=torch.float64) / width)
    angles = torch.arange(positions)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def by_complex(x: np.ndarray, positions: np.ndarray, width: int, interleaved: bool) -> np.ndarray:
    """Channel pairs are complex numbers, turned by exp(i * position * frequency)."""
    result = x.astype(np.float64).copy()
    for n in range(width):
        real, imaginary = (2 * n, 2 * n + 1) if interleaved else (n, n + width)
        turn = np.exp(1j * positions * 10000.0 ** (-n / width))[..., None]
        z = (x[..., real] + 1j * x[..., imaginary]) * turn
        result[..., real], result[..., imaginary] = z.real, z.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width, head_dim", [(8, 16), (3, 16), (1, 2), (4, 9)])
@pytest.mark.parametrize("lead", [(2, 5), (7,), (0,)])
def test_against_complex_numbers(interleaved, width, head_dim, lead):
    torch.manual_seed(0)
    x = torch.randn(*lead, 3, head_dim)
    positions = torch.randint(-49, 50, lead)
    got = Rotary(*tables(50, width), interleaved).apply(x, positions)
    wanted = by_complex(x.numpy(), positions.numpy(), width, interleaved)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=0, atol=1e-5)
    assert torch.equal(got[..., 2 * width :], x[..., 2 * width :]), "channels behind rotary_dim changed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_dtypes(dtype, integer):
    """Computed in float32, rounded once to the dtype of x."""
    x = torch.randn(6, 2, 8).to(dtype)
    positions = torch.arange(6, dtype=integer)
    cos, sin = tables(6, 4)
    got = Rotary(cos, sin).apply(x, positions)
    assert got.dtype == dtype
    assert torch.equal(got, Rotary(cos, sin).apply(x.float(), positions).to(dtype))


def test_a_new_tensor_and_any_strides():
    x = torch.randn(4, 3, 16)[:, :, ::2]
    before = x.clone()
    cos, sin = (t.t().contiguous().t() for t in tables(4, 4))
    got = Rotary(cos, sin).apply(x, torch.arange(4))
    assert torch.equal(x, before)
    assert torch.equal(got, Rotary(*tables(4, 4)).apply(before, torch.arange(4)))
    got.fill_(0)
    assert torch.equal(x, before)


def test_what_it_is_for():
    """q.k after rotation depends on the distance of their positions only."""
    q, k = torch.randn(2, 1, 1, 32, dtype=torch.float64).unbind()
    rotary = Rotary(*tables(100, 16))

    def product(i, j):
        return (rotary.apply(q, torch.tensor([i])) * rotary.apply(k, torch.tensor([j]))).sum().item()

    assert product(10, 3) == pytest.approx(product(97, 90), abs=1e-4)
    assert product(10, 3) != pytest.approx(product(10, 4), abs=1e-4)


def test_position_behind_the_table():
    rotary, x = Rotary(*tables(4, 4)), torch.randn(2, 1, 8)
    rotary.apply(x, torch.tensor([0, 3]))
    with pytest.raises(xattn.DeviceValueError, match=r"rotary: got \d+ at .*; allowed: positions below 4"):
        rotary.apply(x, torch.tensor([0, 4]))


def test_rotary_dim_beyond_head_dim():
    with pytest.raises(ValueError, match="rotary: got rotary_dim 10; allowed: up to head_dim, 8"):
        Rotary(*tables(4, 5)).apply(torch.randn(2, 1, 8), torch.arange(2))


def test_empty_table():
    rotary = Rotary(*tables(0, 4))
    assert rotary.apply(torch.randn(0, 1, 8), torch.arange(0)).shape == (0, 1, 8)
    with pytest.raises(xattn.DeviceValueError, match="positions below 0"):
        rotary.apply(torch.randn(1, 1, 8), torch.arange(1))


COS, SIN = tables(4, 4)
REFUSED = [
    (([1.0], SIN), TypeError, "cos: got list; allowed: a torch.Tensor"),
    ((COS, None), TypeError, "sin: got NoneType; allowed: a torch.Tensor"),
    ((COS.to_sparse(), SIN), ValueError, "cos: got torch.sparse_coo; allowed: a dense"),
    ((COS, SIN.to_mkldnn()), ValueError, "sin: got torch._mkldnn; allowed: a dense"),
    ((COS.long(), SIN), TypeError, "cos: got torch.int64; allowed: a float dtype"),
    ((COS, SIN.bool()), TypeError, "sin: got torch.bool; allowed: a float dtype"),
    ((COS[0], SIN[0]), ValueError, r"cos: got shape \(4,\); allowed: \(positions, rotary_dim / 2\)"),
    ((COS, SIN[:3]), ValueError, r"sin: got shape \(3, 4\); .*for cos and sin"),
    ((COS[:, :0], SIN[:, :0]), ValueError, r"cos: got shape \(4, 0\)"),
    ((COS, SIN, 1), TypeError, "interleaved: got int; allowed: True or False"),
    ((COS, SIN, None), TypeError, "interleaved: got NoneType; allowed: True or False"),
]


@pytest.mark.parametrize("args, error, words", REFUSED)
def test_refuses(args, error, words):
    with pytest.raises(error, match=words):
        Rotary(*args)


def test_frozen():
    with pytest.raises(AttributeError):
        Rotary(COS, SIN).interleaved = True


@pytest.mark.parametrize("position", [4, -4, 2**62, -(2**63)])
def test_neither_end_is_passed(position):
    rotary, x = Rotary(*tables(4, 4)), torch.randn(2, 1, 8)
    with pytest.raises(xattn.DeviceValueError, match="rotary: got .* positions below 4, .* and above -4"):
        rotary.apply(x, torch.tensor([0, position]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["reference", "sdpa", None])
def test_queries_before_the_first_token(backend, packed):
    """Without causal they see all keys: only the difference of positions counts, so all may stand 8 later."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 8) for n in (4, 2, 2))
    early, late = torch.arange(-2, 2)[None], torch.arange(6, 10)[None]
    rotary = Rotary(*tables(16, 4))
    k_cache, v_cache = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8)
    k_cache[:, :2], v_cache[:, :2] = rotary.apply(k, early[:, 2:]), v
    options = {"cu_seqlens_q": torch.tensor([0, 4]), "max_seqlen_q": 4} if packed else {}
    found = xattn.attention_paged(
        q[0] if packed else q,
        k_cache,
        v_cache,
        torch.tensor([[0]]),
        torch.tensor([2]),
        rotary=rotary,
        backend=backend,
        **options,
    )
    wanted = xattn.attention(rotary.apply(q, late), rotary.apply(k, late[:, 2:]), v)
    torch.testing.assert_close(found.reshape(wanted.shape), wanted)


def test_causal_queries_before_the_first_token_need_no_rows():
    x, cache, rotary = torch.randn(1, 9, 2, 8), torch.randn(1, 4, 2, 8), Rotary(*tables(4, 4))
    paged = (x, cache, cache, torch.tensor([[0]]), torch.tensor([2]))
    assert not xattn.attention_paged(*paged, rotary=rotary, causal=True)[:, :7].any()
    with pytest.raises(xattn.DeviceValueError, match="rotary: got -7 at"):
        xattn.attention_paged(*paged, rotary=rotary)


@pytest.mark.parametrize(
    "bad, message",
    [
        (
            {"positions": torch.tensor([[0.5, 1.0]])},
            "positions: got torch.float32; allowed: torch.int32 or torch.int64",
        ),
        ({"positions": torch.tensor([[True, False]])}, "positions: got torch.bool"),
        ({"positions": torch.tensor([[0, 1]], dtype=torch.int16)}, "positions: got torch.int16"),
        ({"positions": torch.tensor([0, 1])}, "positions: got shape"),
        ({"positions": torch.tensor([[0, 1]], device="meta")}, "positions: got device meta"),
        ({"x": torch.ones(1, 2, 2, 8, dtype=torch.int64)}, "x: got torch.int64"),
        ({"x": torch.ones(8)}, "x: got shape"),
        ({"x": torch.ones(1, 2, 2, 6)}, "rotary: got rotary_dim 8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("way", ["method", "op", "compiled"])
def test_bad_arguments_of_the_op(bad, message, way):
    x, positions = bad.get("x", torch.randn(1, 2, 2, 8)), bad.get("positions", torch.tensor([[0, 1]]))
    rotary = Rotary(*tables(4, 4))
    call = rotary.apply
    if way != "method":
        call = lambda x, at: torch.ops.xattn.rotary(x, at, rotary.cos, rotary.sin)  # noqa: E731
    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=message):
        call(x, positions)
