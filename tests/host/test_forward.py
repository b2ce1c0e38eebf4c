"""The shared forward body as wave32 with mma.m16n8k16 and as wave64 with MFMA 16x16x16, against the float64 oracle."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from host.forward_kernel import LAYERS

from xattn.status import MESSAGES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def qkv(b=1, sq=65, sk=97, h=2, hk=1, d=64, dv=None, dtype=torch.bfloat16):
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv or d))
    return tuple(randn(*s, dtype=dtype, seed=n) for n, s in enumerate(shapes))


def compare(run, x, options):
    out, lse = run(*x, **options)
    of = lambda dtype: oracle.attention(  # noqa: E731
        *(t.to(dtype) for t in x),
        **{n: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in options.items()},
    )
    (truth, true_lse), (plain, plain_lse) = of(torch.float64), of(x[0].dtype)
    oracle.assert_close("out", out, truth, plain)
    oracle.assert_close("lse", lse, true_lse, plain_lse)


@pytest.fixture(params=LAYERS)
def layer(request):
    return request.param


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (40, 72), (128, 32), (8, 8), (96, 64)], ids=str)
def test_dims(kernel, layer, element, dims):
    padded = [-(-n // 32) * 32 for n in dims]
    run = kernel(layer, element=element, head_dim=padded[0], head_dim_v=padded[1])
    compare(run, qkv(d=dims[0], dv=dims[1], dtype=DTYPES[element]), {"causal": True})


@pytest.mark.parametrize("tile", [(64, 64, 4), (128, 64, 4), (64, 32, 2), (32, 48, 1)], ids=str)
@pytest.mark.parametrize("keep_q", [False, True])
def test_tiles(kernel, layer, tile, keep_q):
    names = ("tile_m", "tile_n", "num_warps")
    run = kernel(layer, keep_q=keep_q, **dict(zip(names, tile, strict=True)))
    compare(run, qkv(sq=130, sk=150), {"causal": True, "window": (40, None)})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 300), (63, 65), (64, 64), (128, 129), (100, 30), (5, 0), (65, 127)], ids=str
)
def test_lengths(kernel, layer, lengths, causal):
    compare(kernel(layer), qkv(sq=lengths[0], sk=lengths[1]), {"causal": causal})


@pytest.mark.parametrize("window", [(0, 0), (30, None), (None, 5), (64, 64), (7, 200)], ids=str)
def test_windows(kernel, layer, window):
    compare(kernel(layer), qkv(sq=90, sk=200), {"window": window})


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (7, 1), (5, 5)], ids=str)
def test_heads(kernel, layer, heads):
    compare(kernel(layer), qkv(b=2, sq=20, sk=40, h=heads[0], hk=heads[1]), {})


def test_softcap_alibi_sinks_and_bias_together(kernel, layer):
    run = kernel(layer, softcap=True, alibi=True, attn_mask="added32")
    options = {
        "softcap": 5.0,
        "alibi_slopes": torch.tensor([[0.5, 0.1], [0.2, 0.3]]),
        "sinks": torch.tensor([0.3, -2.0]),
    }
    compare(run, qkv(b=2, sq=66, sk=130), {**options, "attn_mask": randn(2, 1, 66, 130), "causal": True})


@pytest.mark.parametrize("added", [False, True])
def test_a_sink_without_bound_takes_all(kernel, layer, added):
    run = kernel(layer, attn_mask="added32" if added else "none")
    options = {"attn_mask": torch.zeros(1, 1, 5, 7)} if added else {}
    x = qkv(sq=5, sk=7, h=4, hk=2)
    out, lse = run(*x, sinks=torch.tensor([math.inf, 0.5, -math.inf, math.inf]), **options)
    plain, plain_lse = run(*x, sinks=torch.tensor([0.5, 0.5, -math.inf, 0.5]), **options)
    assert (out[:, :, [0, 3]] == 0).all() and (lse[:, [0, 3]] == math.inf).all()
    assert torch.equal(out[:, :, [1, 2]], plain[:, :, [1, 2]]) and torch.equal(lse[:, [1, 2]], plain_lse[:, [1, 2]])
    empty, lse = run(*(t[:, :n] for t, n in zip(x, (5, 0, 0), strict=True)), sinks=torch.tensor([-math.inf] * 4))
    assert (empty == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.3])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_scales_of_any_sign(kernel, layer, scale, softcap):
    run = kernel(layer, any_scale=not softcap, softcap=softcap > 0)
    compare(run, qkv(sq=66, sk=130), {"softmax_scale": scale, "softcap": softcap, "causal": True})


@pytest.mark.parametrize("shape", [(1, 1, 66, 130), (2, 2, 66, 130), (2, 1, 1, 130), (1, 2, 66, 1)], ids=str)
def test_boolean_mask(kernel, layer, shape):
    mask = randn(*shape) > 0.3
    mask[..., 5 % shape[2], :] = False  # an empty row
    compare(kernel(layer, attn_mask="boolean"), qkv(b=2, sq=66, sk=130), {"attn_mask": mask})


def test_bias_in_16_bits(kernel, layer):
    mask = randn(1, 2, 66, 130, dtype=torch.bfloat16)
    compare(kernel(layer, attn_mask="added16"), qkv(sq=66, sk=130), {"attn_mask": mask})


def test_keys_behind_seqused_never_matter(kernel, layer):
    q, k, v = qkv(b=3, sq=40, sk=100)
    used = torch.tensor([100, 37, 0])
    for b, n in enumerate(used.tolist()):
        k[b, n:], v[b, n:] = math.nan, math.nan
    compare(kernel(layer), (q, k, v), {"seqused_k": used, "causal": True})


def test_strides(kernel, layer):
    q = qkv(b=2, h=4)[0].transpose(1, 2).contiguous().transpose(1, 2)
    both = randn(2, 97, 2, 2, 64, dtype=torch.bfloat16)
    compare(kernel(layer), (q, both[:, :, 0], both[:, :, 1]), {})


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_varlen(kernel, layer, index):
    cu_q, cu_k = torch.tensor([0, 70, 70, 75], dtype=index), torch.tensor([0, 90, 100, 100], dtype=index)
    q, k, v = (randn(n, 2, 64, dtype=torch.bfloat16, seed=n) for n in (75, 100, 100))
    out, lse = kernel(layer)(q, k, v, causal=True, cu_seqlens=(cu_q, cu_k))
    of = lambda d: oracle.varlen(q.to(d), k.to(d), v.to(d), cu_q, cu_k, 70, 90, causal=True)  # noqa: E731
    (truth, true_lse), (plain, plain_lse) = of(torch.float64), of(torch.bfloat16)
    oracle.assert_close("out", out, truth, plain)
    oracle.assert_close("lse", lse, true_lse, plain_lse)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_behind_the_last_offset_are_empty_rows(kernel, layer, index):
    """However many, and whatever stands there."""
    cu = torch.tensor([0, 5, 9], dtype=index)
    q, k, v = (randn(n, 2, 64, dtype=torch.bfloat16, seed=n) for n in (200, 9, 9))
    q[9:] = math.nan
    status = torch.zeros(len(MESSAGES), dtype=torch.int32)
    out, lse = kernel(layer)(q, k, v, cu_seqlens=(cu, cu), status=status)
    assert (out[9:] == 0).all() and (lse[:, 9:] == -math.inf).all()
    assert torch.isfinite(out[:9]).all() and torch.isfinite(lse[:, :9]).all()
    assert not status.any()


GOOD = {"q": (0, 70, 75), "k": (0, 30, 64), "longest": (70, 34), "used": (3, 34)}
BAD = [
    ("cu_seqlens", {"q": (1, 70, 75)}),
    ("cu_seqlens", {"q": (0, 76, 75)}),
    ("cu_seqlens", {"q": (0, 70, 76)}),
    ("cu_seqlens", {"q": (-4, 70, 75)}),
    ("cu_seqlens", {"k": (0, 30, 2**31 - 1)}),
    ("cu_seqlens", {"k": (0, 30, -(2**31))}),
    ("max_seqlen", {"longest": (69, 34)}),
    ("max_seqlen", {"longest": (70, 33)}),
    ("seqlens_k", {"used": (31, 34)}),
    ("seqlens_k", {"used": (-1, 34)}),
]


@pytest.mark.parametrize("code, change", [("", {}), *BAD], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_bad_values_on_the_device_are_reported_and_read_nothing_outside(kernel, layer, code, change, index):
    values = GOOD | change
    cu = tuple(torch.tensor(values[n], dtype=index) for n in "qk")
    status = torch.zeros(len(MESSAGES), dtype=torch.int32)
    # Memory around the tensors is NaN: what is read outside shows.
    q, k, v = (torch.full((n + 200, 2, 64), math.nan, dtype=torch.bfloat16)[100 : 100 + n] for n in (75, 64, 64))
    for n, t in enumerate((q, k, v)):
        t.copy_(randn(*t.shape, seed=n))
    used = torch.tensor(values["used"], dtype=index)
    out, lse = kernel(layer)(
        q, k, v, causal=True, cu_seqlens=cu, longest=values["longest"], seqused_k=used, status=status
    )
    found = [n for n, word in zip(MESSAGES, status.tolist(), strict=True) if word]
    assert code in found if code else not found and torch.isfinite(out).all()


def test_the_order_of_lanes_does_not_matter(kernel, layer):
    x = qkv(sq=70, sk=150)
    results = [kernel(layer)(*x, causal=True, seed=seed) for seed in range(5)]
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


def test_large_scores_move_the_reference(kernel, layer):
    q, k, v = qkv(sq=64, sk=256)
    k = k * torch.linspace(0.05, 8, 256)[None, :, None, None].flip(1).to(k.dtype)  # the largest come last in the walk
    compare(kernel(layer), (q, k, v), {})
