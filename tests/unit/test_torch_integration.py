"""The ops under what torch does with ops: compile, export, TorchScript, autocast, torch.func, checkpoints, hooks."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import xattn
from xattn import UnsupportedError, ops

OPS = torch.ops.xattn


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_(grad)


def qkv(
    batch=2, seqlen_q=5, seqlen_k=7, heads=4, heads_kv=2, head_dim=8, *, dtype=torch.float32, grad=True, seed=0
) -> tuple[Tensor, Tensor, Tensor]:
    q = randn(batch, seqlen_q, heads, head_dim, seed=seed, dtype=dtype, grad=grad)
    k, v = (randn(batch, seqlen_k, heads_kv, head_dim, seed=seed + n, dtype=dtype, grad=grad) for n in (1, 2))
    return q, k, v


def packed(lengths_q, lengths_k, heads=4, heads_kv=2, head_dim=8, *, dtype=torch.float32, grad=True, seed=0) -> tuple:
    q = randn(sum(lengths_q), heads, head_dim, seed=seed, dtype=dtype, grad=grad)
    k, v = (randn(sum(lengths_k), heads_kv, head_dim, seed=seed + n, dtype=dtype, grad=grad) for n in (1, 2))
    ends = (torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k))
    return q, k, v, *ends, max(lengths_q), max(lengths_k)


def pages(lengths, seqlen_q=2, seqlen_new=0, heads=4, heads_kv=2, head_dim=8, page_size=4, seed=0) -> dict[str, Tensor]:
    batch, most = len(lengths), max(lengths) + seqlen_new
    columns = -(-most // page_size) + 1
    order = torch.randperm(batch * columns, generator=torch.Generator().manual_seed(seed))
    new = {}
    if seqlen_new:
        new = {n: randn(batch, seqlen_new, heads_kv, head_dim, seed=seed + i) for i, n in enumerate(("k_new", "v_new"))}
    return {
        "q": randn(batch, seqlen_q, heads, head_dim, seed=seed + 3),
        "k_cache": randn(batch * columns, page_size, heads_kv, head_dim, seed=seed + 4),
        "v_cache": randn(batch * columns, page_size, heads_kv, head_dim, seed=seed + 5),
        "page_table": order.reshape(batch, columns),
        "seqlens_k": torch.tensor(lengths),
        **new,
    }


def rng(seed: int = 3, offset: int = 4) -> Tensor:
    return torch.tensor([seed, offset])


def gradients(out: Tensor, inputs, seed: int = 9) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, randn(*out.shape, seed=seed, dtype=out.dtype))


def all_equal(got, wanted) -> None:
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted, strict=True):
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.fixture
def compiled():
    """compile(function, ...), with nothing left over from another test; and how many graphs there were."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.fx.experimental._config.patch(use_duck_shape=False):  # equal sizes are a coincidence here
        yield functools.partial(torch.compile, fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.reset()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# ---------------------------------------------------------------- opcheck
def test_all_ops_are_tested_here():
    names = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("xattn::")}
    names -= {"launch"}  # the compiled launcher's, where it is in use: tests/unit/test_launcher.py
    assert names == {
        "attention",
        "attention_varlen",
        "attention_paged",
        "attention_backward",
        "attention_varlen_backward",
        "append_paged",
        "extend_paged",
        "check_paged",
        "rotary",
    }


DENSE_OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_left": 2, "window_right": 0},
    "lse": {"return_lse": True},
    "softcap and scale": {"softcap": 5.0, "softmax_scale": 0.3},
    "dropout": {"dropout_p": 0.5, "dropout_rng": rng()},
    "sinks and slopes": {
        "sinks": randn(4, seed=5, grad=True),
        "alibi_slopes": randn(4, seed=6).abs().requires_grad_(),
        "return_lse": True,
    },
    "additive mask": {"attn_mask": randn(1, 4, 5, 7, seed=7, grad=True)},
    "boolean mask": {"attn_mask": randn(5, 7, seed=8) > 0},
    "used keys": {"seqused_k": torch.tensor([7, 3])},
    "scales": {"q_scale": torch.tensor(0.5), "v_scale": randn(2, 2, seed=9)},
    "reference": {"backend": "reference", "deterministic": True},
    "dtype of out": {"out_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("options", DENSE_OPTIONS.values(), ids=DENSE_OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_attention(options, dtype):
    if dtype == torch.bfloat16 and "attn_mask" in options and options["attn_mask"].is_floating_point():
        options = options | {"attn_mask": options["attn_mask"].detach().to(dtype).requires_grad_()}
    torch.library.opcheck(OPS.attention, qkv(dtype=dtype, grad=False), options)
    torch.library.opcheck(OPS.attention, qkv(dtype=dtype), options | {"return_lse": True})


@pytest.mark.parametrize("options", [{}, {"causal": True, "return_lse": True}, {"seqused_k": torch.tensor([2, 0, 3])}])
def test_opcheck_varlen(options):
    torch.library.opcheck(OPS.attention_varlen, packed([3, 1, 4], [3, 0, 5], grad=False), options)
    torch.library.opcheck(OPS.attention_varlen, packed([3, 1, 4], [3, 0, 5]), options | {"return_lse": True})


@pytest.mark.parametrize("backend", ["reference", "sdpa", None])
def test_opcheck_gradients_without_lse(backend):
    """What stands for an lse that was not asked for is the same each time, and no NaN."""
    torch.library.opcheck(OPS.attention, qkv(), {"backend": backend})
    torch.library.opcheck(OPS.attention_varlen, packed([3, 1], [3, 5]), {"backend": backend})
    for op, args in ((OPS.attention, qkv()), (OPS.attention_varlen, packed([3, 1], [3, 5]))):
        assert not op(*args, backend=backend)[1].isnan().any()
        assert op(*(t.detach() if isinstance(t, Tensor) else t for t in args), backend=backend)[1].shape == (0,)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "return_lse": True}, {"num_splits": 2, "max_seqlen_k": 12}])
def test_opcheck_paged(layout, options):
    p = pages([5, 9])
    if layout == "HND":
        p |= {n: p[n].transpose(1, 2).contiguous() for n in ("k_cache", "v_cache")}
    torch.library.opcheck(OPS.attention_paged, tuple(p.values()), options | {"kv_layout": layout})


@pytest.mark.parametrize("options", [{}, {"causal": True, "out": torch.empty(2, 2, 4, 8)}], ids=["plain", "out"])
def test_opcheck_check_paged(options):
    """Lengths come back in a tensor of their own, so that what is written can depend on the check."""
    p = pages([5, 9])
    torch.library.opcheck(OPS.check_paged, tuple(p.values()), options)
    assert torch.equal(OPS.check_paged(*p.values()), p["seqlens_k"])


def test_opcheck_paged_with_packed_queries():
    p = pages([5, 9])
    p["q"] = randn(5, 4, 8)
    options = {"cu_seqlens_q": torch.tensor([0, 3, 5]), "max_seqlen_q": 3, "causal": True, "return_lse": True}
    torch.library.opcheck(OPS.attention_paged, tuple(p.values()), options)


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False)])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("kind", ["attention", "varlen"])
@pytest.mark.parametrize(
    "utils", ["test_schema", ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")]
)
def test_opcheck_backward(kind, wanted, return_lse, utils):
    if kind == "attention":
        args, op, backward = qkv(grad=False), OPS.attention, OPS.attention_backward
    else:
        args = packed([3, 1, 4], [3, 2, 5], grad=False)
        op, backward = OPS.attention_varlen, OPS.attention_varlen_backward
    needs = [True, True, True, *[False] * 6]
    out, lse = op(*args, return_lse=return_lse, needs_grad=needs)
    given = (randn(*out.shape), randn(*lse.shape) if return_lse else None, out, lse, needs, [*wanted, *[False] * 6])
    torch.library.opcheck(backward, (*given, *args), {"causal": True, "return_lse": return_lse}, test_utils=utils)
    found = backward(*given, *args, causal=True, return_lse=return_lse)
    assert [g.shape for g in found] == [t.shape for t, w in zip(args[:3], wanted, strict=True) if w]


@pytest.mark.parametrize("options", [{}, {"kv_layout": "HND"}, {"k_scale": torch.tensor(2.0)}, {"rotary": True}])
def test_opcheck_append(options):
    p = pages([5, 9], seqlen_new=3)
    del p["q"]
    if options.get("kv_layout") == "HND":
        p |= {n: p[n].transpose(1, 2).contiguous() for n in ("k_cache", "v_cache")}
    if options.get("rotary"):
        angles = torch.arange(32)[:, None] * torch.tensor([1.0, 0.1])
        options = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": True}
    torch.library.opcheck(OPS.append_paged, tuple(p.values()), options)


def test_opcheck_append_packed():
    p = pages([5, 9], seqlen_new=3)
    del p["q"]
    p |= {n: p[n].flatten(0, 1) for n in ("k_new", "v_new")}
    torch.library.opcheck(OPS.append_paged, tuple(p.values()), {"cu_seqlens_new": torch.tensor([0, 1, 6])})


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_opcheck_extend(new, rotary):
    p = pages([5, 9], seqlen_new=3)
    angles = torch.arange(32)[:, None] * torch.tensor([1.0, 0.1])
    options = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True} if rotary else {}
    if not new:
        p = {name: t for name, t in p.items() if not name.endswith("_new")}
    torch.library.opcheck(OPS.extend_paged, tuple(p.values()), options)
    lengths, q = OPS.extend_paged(*p.values(), **options)
    assert lengths.tolist() == ([n + 3 for n in p["seqlens_k"].tolist()] if new else [])
    assert q.shape == (p["q"].shape if rotary else (0,))


# ---------------------------------------------------------------- torch.compile
LENGTHS = [(5, 7), (9, 12), (17, 33)]


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (3, 0)}, {"softcap": 5.0}, {"backend": "reference"}],
    ids=["plain", "causal", "window", "softcap", "reference"],
)
def test_compile_attention(compiled, options):
    def f(q, k, v):
        return xattn.attention(q, k, v, **options) * 2

    fast = compiled(f)
    for n, m in LENGTHS:
        x = qkv(seqlen_q=n, seqlen_k=m)
        out, wanted = fast(*x), f(*x)
        all_equal([out, *gradients(out, x)], [wanted, *gradients(wanted, x)])
    assert graphs() == 1


def test_compile_varlen(compiled):
    def f(*args):
        return xattn.attention_varlen(*args, causal=True).square()

    fast = compiled(f)
    for lengths in ([3, 2, 4], [5, 9, 7], [20, 3, 11]):
        x = packed(lengths, lengths)
        out, wanted = fast(*x), f(*x)
        all_equal([out, *gradients(out, x[:3])], [wanted, *gradients(wanted, x[:3])])
    assert graphs() == 1


def test_compile_paged(compiled):
    """The new keys are written to the cache that was given, by one graph for all lengths."""

    def f(q, k_cache, v_cache, page_table, seqlens_k, k_new, v_new):
        return xattn.attention_paged(
            q, k_cache, v_cache, page_table, seqlens_k, k_new=k_new, v_new=v_new, causal=True
        ).tanh()

    fast = compiled(f)
    for seed, (lengths, new) in enumerate([((5, 9), 2), ((3, 17), 3), ((30, 2), 5)]):
        one, two = (pages(lengths, seqlen_q=new, seqlen_new=new, seed=seed) for _ in range(2))
        before = one["k_cache"].clone()
        all_equal([fast(**one)], [f(**two)])
        assert torch.equal(one["k_cache"], two["k_cache"]) and torch.equal(one["v_cache"], two["v_cache"])
        assert not torch.equal(one["k_cache"], before)
    assert graphs() == 1


def test_compile_paged_with_rotary(compiled):
    angles = torch.arange(64)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    cos, sin = angles.cos(), angles.sin()

    def f(cos, sin, **p):
        return xattn.attention_paged(**p, rotary=xattn.Rotary(cos, sin), causal=True)

    fast = compiled(f)
    for seed, lengths in enumerate([(5, 9), (3, 17), (30, 2)]):
        one, two = (pages(lengths, seqlen_q=2, seqlen_new=2, seed=seed) for _ in range(2))
        all_equal([fast(cos, sin, **one)], [f(cos, sin, **two)])
        assert torch.equal(one["k_cache"], two["k_cache"])
    assert graphs() == 1


def test_compile_merge_states(compiled):
    fast = compiled(lambda a, b, x, y: xattn.merge_states([a, b], [x, y]))
    for n, _ in LENGTHS:
        x = [randn(2, n, 3, 8, seed=i, grad=True) for i in (1, 2)]
        x += [randn(2, 3, n, seed=i, grad=True) for i in (3, 4)]
        got, wanted = fast(*x), xattn.merge_states(x[:2], x[2:])
        all_equal(got, wanted)
        all_equal(*(gradients(r[0] + r[1].mT[..., None], x) for r in (got, wanted)))
    assert graphs() == 1


def test_compile_distances_without_end(compiled):
    """A symbolic distance may be as far as an int reaches."""
    x = qkv(grad=False)
    fast = compiled(lambda *t, far: xattn.attention(*t, window=(far, far)))
    for far in (2, 3, 4, sys.maxsize - 1, sys.maxsize):
        torch.testing.assert_close(fast(*x, far=far), xattn.attention(*x, window=(far, far)))
    torch.testing.assert_close(fast(*x, far=sys.maxsize), xattn.attention(*x))
    assert graphs() <= 2


@pytest.mark.slow
def test_compile_with_inductor(compiled):
    def f(q, k, v):
        return xattn.attention(q * 2, k, v.sin(), causal=True).cos()

    x = qkv()
    out, wanted = compiled(f, backend="inductor", dynamic=None)(*x), f(*x)
    all_equal([out, *gradients(out, x)], [wanted, *gradients(wanted, x)])


def test_compile_lse_and_its_gradient(compiled):
    def f(q, k, v):
        out, lse = xattn.attention(q, k, v, causal=True, return_lse=True)
        return out.sum() + lse.sin().sum(), lse

    fast = compiled(f)
    for n in (7, 12, 20):
        x = qkv(seqlen_q=n, seqlen_k=n)
        (out, lse), (wanted, wanted_lse) = fast(*x), f(*x)
        all_equal([out, lse, *gradients(out, x)], [wanted, wanted_lse, *gradients(wanted, x)])
        only = gradients(fast(*x)[1], x[:2])
        all_equal(only, gradients(f(*x)[1], x[:2]))
        assert all(bool(g.any()) for g in only)
    assert graphs() == 1


def test_compile_dropout_draws_anew(compiled):
    fast = compiled(lambda q, k, v: xattn.attention(q, k, v, dropout_p=0.5))
    x = qkv(seqlen_q=16, seqlen_k=16)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        one, two = fast(*x), fast(*x)
        assert not torch.equal(one, two)
        torch.manual_seed(5)
        again = fast(*x)
        assert torch.equal(again, one)
    # The backward has the mask of its forward: dv is the kept weights' sum, so equal masks give equal gradients.
    wanted = gradients(one, x)
    all_equal(gradients(again, x), wanted)
    assert not torch.equal(gradients(fast(*x), x)[2], wanted[2])
    assert graphs() == 1


def test_compile_dropout_with_a_given_pair(compiled):
    def f(q, k, v, pair):
        return xattn.attention(q, k, v, dropout_p=0.5, dropout_rng=pair)

    fast, x = compiled(f), qkv(seqlen_q=16, seqlen_k=16)
    for seed in (1, 2):
        out, wanted = fast(*x, rng(seed)), f(*x, rng(seed))
        all_equal([out, *gradients(out, x)], [wanted, *gradients(wanted, x)])
    assert graphs() == 1


def test_compile_score_mod_with_captures(compiled):
    """A tensor and a float of an enclosing function: new values take effect, and the tensor has its gradient."""

    def make(bias, factor):
        def mod(score, b, h, i, j):
            return score * factor + bias[h] * (i - j)

        return mod

    def f(q, k, v, mod):
        return xattn.attention(q, k, v, score_mod=mod)

    fast = compiled(f)
    for seed, factor in enumerate((0.5, 0.25, 3.0)):
        bias = randn(4, seed=seed, grad=True)
        x = qkv(seqlen_q=5 + seed, seqlen_k=7 + 2 * seed)
        mod = make(bias, factor)
        out, wanted = fast(*x, mod), f(*x, mod)
        all_equal([out, *gradients(out, (*x, bias))], [wanted, *gradients(wanted, (*x, bias))])


def test_compile_mask_mod(compiled):
    allowed = torch.tensor([True, False, True, True, False, True, True])

    def mod(b, h, i, j):
        return allowed[j] | (i == j)

    def f(q, k, v):
        return xattn.attention(q, k, v, mask_mod=mod)

    x = qkv()
    out, wanted = compiled(f)(*x), f(*x)
    all_equal([out, *gradients(out, x)], [wanted, *gradients(wanted, x)])
    assert not torch.allclose(wanted, xattn.attention(*x))


@pytest.mark.parametrize(
    "made",
    [
        lambda x: {"score_mod": lambda s, b, h, i, j: s + h},
        lambda x: {"mask_mod": lambda b, h, i, j: i >= j},
        lambda x: {"epilogue": xattn.epilogues.residual(x)},
        lambda x: {"epilogue": xattn.epilogues.residual(x * 2)},
    ],
    ids=["score_mod", "mask_mod", "epilogue", "epilogue of a result"],
)
def test_compile_functions_made_inside(compiled, made):
    """As the README says: what captures nothing, and ready-made epilogues."""

    def f(q, k, v, x):
        return xattn.attention(q, k, v, **made(x))

    x = (*qkv(grad=False), randn(2, 5, 4, 8))
    all_equal([compiled(f)(*x)], [f(*x)])
    assert graphs() == 1


def test_compile_raises_what_eager_raises(compiled):
    q, k, v = qkv()
    with pytest.raises(Exception, match="heads"):
        compiled(lambda q, k, v: xattn.attention(q[:, :, :3], k, v))(q, k, v)


WAYS = {"eager": {}, "compiled": {"fullgraph": False}, "one graph": {"fullgraph": True}}


def in_way(way: str, f, **options):
    torch._dynamo.reset()
    return f if way == "eager" else torch.compile(f, backend="aot_eager", **WAYS[way])


LEARNED = torch.ones(4, requires_grad=True)


def _learned(score, b, h, q_idx, kv_idx):
    return score * LEARNED[h]


BAD_OUT = {
    "shape that broadcasts": lambda: torch.full((2, 2, 5, 4, 8), 7.0),
    "dtype": lambda: torch.full((2, 5, 4, 8), 7, dtype=torch.int32),
    "narrower dtype": lambda: torch.full((2, 5, 4, 8), 7, dtype=torch.float16),
    "device": lambda: torch.empty(2, 5, 4, 8, device="meta"),
    "a gradient": lambda: torch.full((2, 5, 4, 8), 7.0, requires_grad=True),
    "overlap": lambda: torch.full((2, 5, 1, 8), 7.0).expand(2, 5, 4, 8),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BAD_OUT)
def test_out_is_checked_alike(way, name):
    q, k, v = qkv(grad=False)
    out = BAD_OUT[name]()
    with pytest.raises(Exception, match="out: got .*allowed"):
        in_way(way, lambda q, k, v, out: xattn.attention(q, k, v, out=out))(q, k, v, out)
    assert out.device.type == "meta" or bool((out == 7).all())


@pytest.mark.parametrize("way", WAYS)
def test_out_is_refused_where_a_gradient_is_asked_for(way):
    with pytest.raises(Exception, match="out: got a gradient is asked for"):
        in_way(way, lambda q, k, v, out: xattn.attention(q, k, v, out=out))(*qkv(), torch.empty(2, 5, 4, 8))
    q, k, v = qkv(grad=False)
    with pytest.raises(Exception, match="out: got a gradient is asked for"):
        in_way(way, lambda q, k, v, out: xattn.attention(q, k, v, out=out, score_mod=_learned))(q, k, v, q * 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [False, True])
def test_out_of_the_right_kind_is_written(way, autocast):
    q, k, v = qkv(grad=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        wanted = xattn.attention(q, k, v)
        out = torch.full_like(wanted, 7)
        in_way(way, lambda q, k, v, out: xattn.attention(q, k, v, out=out))(q, k, v, out)
    torch.testing.assert_close(out, wanted)


def _inference(*shape: int) -> Tensor:
    with torch.inference_mode():
        return torch.zeros(shape)


TWO_HEADS = torch.ones(2)


def _of_two_heads(score, b, h, q_idx, kv_idx):
    return score * TWO_HEADS[h]


SHORT = xattn.Rotary(torch.ones(4, 4), torch.ones(4, 4))
REFUSED_BEFORE_WRITING = {
    "a backend that cannot": ({"backend": "sdpa", "sinks": torch.zeros(4)}, "sinks"),
    "out that overlaps": ({"out": torch.empty(2, 2, 1, 8).expand(2, 2, 4, 8)}, "out: got strides"),
    "out of another shape": ({"out": torch.empty(3, 2, 2, 4, 8)}, "out: got shape"),
    "out made in inference mode": ({"out": _inference(2, 2, 4, 8)}, "out: got an inference tensor"),
    "values made in inference mode": ({"v_cache": _inference(6, 4, 2, 8)}, "v_cache: got an inference tensor"),
    "a setting": ({"XATTN_VALIDATE": "1"}, "XATTN_VALIDATE is '1'"),
    "rotary, too short for k_new": ({"rotary": SHORT}, "rotary: got 4 at"),
    "rotary, too short for q": ({"rotary": SHORT, "page_table": torch.arange(6).view(2, 3)}, "rotary: got 4 at"),
    "a gradient of q": ({"q": randn(2, 2, 4, 8, grad=True)}, "q: got a tensor that requires a gradient"),
    "a gradient of k_new": ({"k_new": randn(2, 1, 2, 8, grad=True)}, "k_new: got a tensor that requires a gradient"),
    "offsets of q": (
        {"q": randn(4, 4, 8), "cu_seqlens_q": torch.tensor([0, 3, 2]), "max_seqlen_q": 4},
        "cu_seqlens_q",
    ),
    "a bound too small for the new tokens": ({"max_seqlen_k": 5}, "max_seqlen_k: got 5"),
    "offsets of new tokens": (
        {"k_new": randn(2, 2, 8), "v_new": randn(2, 2, 8), "cu_seqlens_new": torch.tensor([0, 3, 2])},
        "cu_seqlens_new",
    ),
    "a scale that cannot divide": ({"k_scale": torch.zeros(())}, "k_scale: got 0"),
    "a tensor too small for its function": ({"score_mod": _of_two_heads}, "out of bounds|out of range"),
    "a page of older tokens": ({"page_table": torch.tensor([[9, 1, 2], [3, 4, 5]])}, "page_table"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED_BEFORE_WRITING)
def test_nothing_is_written_before_a_refusal(way, name, monkeypatch):
    changes, words = REFUSED_BEFORE_WRITING[name]
    given = {
        "q": randn(2, 2, 4, 8),
        "k_cache": torch.zeros(6, 4, 2, 8),
        "v_cache": torch.zeros(6, 4, 2, 8),
        "page_table": torch.arange(6).view(2, 3),
        "seqlens_k": torch.tensor([5, 3]),
        "k_new": randn(2, 1, 2, 8),
        "v_new": randn(2, 1, 2, 8),
    } | {n: x for n, x in changes.items() if not n.isupper()}
    if name.endswith("for q"):  # its only sequence of two new tokens begins within the tables
        given |= {"seqlens_k": torch.tensor([4, 4])}
    for variable in changes.keys() - given.keys():
        monkeypatch.setenv(variable, changes[variable])
    with pytest.raises(Exception, match=words):
        in_way(way, lambda given: xattn.attention_paged(**given))(given)
    assert not given["k_cache"].any() and not given["v_cache"].any()


# ---------------------------------------------------------------- export
class Attend(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return xattn.attention(q, k, v, **self.options)


def test_export():
    n, m = torch.export.Dim("n", min=2, max=64), torch.export.Dim("m", min=2, max=64)
    x, other = qkv(grad=False), qkv(seqlen_q=11, seqlen_k=13, seed=7, grad=False)
    program = torch.export.export(Attend(causal=True), x, dynamic_shapes=({1: n}, {1: m}, {1: m}))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert OPS.attention.default in targets
    for args in (x, other):
        all_equal([program.module()(*args)], [xattn.attention(*args, causal=True)])


def test_export_saves_and_loads(tmp_path):
    x = qkv(grad=False)
    path = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Attend(causal=True, return_lse=True), x), path)
    all_equal(torch.export.load(path).module()(*x), xattn.attention(*x, causal=True, return_lse=True))


@pytest.mark.parametrize(
    "options",
    [
        {"score_mod": lambda s, b, h, i, j: s + h},
        {"mask_mod": lambda b, h, i, j: i >= j},
        {"epilogue": xattn.Epilogue(lambda o, b, h, i, d: o * 2)},
    ],
    ids=["score_mod", "mask_mod", "epilogue"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("how", ["export", "strict export", "trace"])
def test_export_refuses_user_functions(options, how):
    with pytest.raises(UnsupportedError, match="^(score_mod|mask_mod|epilogue): .* do not travel in exported modules"):
        if how == "trace":
            torch.jit.trace(Attend(**options), qkv(grad=False))
        else:
            torch.export.export(Attend(**options), qkv(grad=False), strict=how.startswith("strict"))


# ---------------------------------------------------------------- TorchScript
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("what", ["k_new", "rotary", "both", "out"])
def test_a_trace_writes_and_turns(what):
    """Whatever is written to; and what later calls get wrong is an error before that."""
    rotary = xattn.Rotary(torch.randn(16, 8), torch.randn(16, 8)) if what in ("rotary", "both") else None
    new = torch.randn(2, 1, 2, 16)
    table = torch.tensor([[0], [1]])

    def call(q, k, v, lengths, out):
        if what == "out":
            return xattn.attention(q, k, v, out=out)
        added = {} if what == "rotary" else {"k_new": new, "v_new": new}
        return xattn.attention_paged(q, k, v, table, lengths, rotary=rotary, **added)

    def inputs(lengths, seed):
        generator = torch.Generator().manual_seed(seed)
        shapes = ((2, 1, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16), (2, 1, 4, 16))
        q, k, v, out = (torch.randn(shape, generator=generator) for shape in shapes)
        return q, k, v, torch.tensor(lengths), out

    traced = torch.jit.trace(call, inputs([3, 5], 1), check_trace=False)
    found, wanted = inputs([1, 7], 2), inputs([1, 7], 2)
    assert torch.equal(traced(*found), call(*wanted))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    if what in ("k_new", "both"):
        found, before = inputs([1, 8], 3), inputs([1, 8], 3)
        with pytest.raises(RuntimeError):
            traced(*found)
        assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))


class Scripted(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = torch.ops.xattn.attention(q, k, v, causal=True, return_lse=True)
        flat, _ = torch.ops.xattn.attention_varlen(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ends, ends, 9, 9, window_left=3
        )
        return out, lse, flat


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_script_in_a_fresh_process(tmp_path):
    scripted = torch.jit.script(Scripted())
    x = (*qkv(seqlen_q=7, grad=False), torch.tensor([0, 5, 14]))
    wanted = Scripted()(*x)
    all_equal(scripted(*x), wanted)
    all_equal(wanted[:2], xattn.attention(*x[:3], causal=True, return_lse=True))
    scripted.save(tmp_path / "module.pt")
    torch.save(x, tmp_path / "inputs.pt")
    script = f"""
import torch
import xattn
module = torch.jit.load({str(tmp_path / "module.pt")!r})
torch.save(module(*torch.load({str(tmp_path / "inputs.pt")!r})), {str(tmp_path / "outputs.pt")!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    all_equal(torch.load(tmp_path / "outputs.pt"), wanted)


README = Path(__file__).parents[2] / "README.md"


# Runs each file in a fork of a process that has imported torch alone, which takes longer than what most of them do.
EACH_AFTER_TORCH = """
import os, runpy, sys
import torch
for file in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        assert "xattn" not in sys.modules
        runpy.run_path(file, run_name="__main__")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{file} failed")
"""


def test_the_readme_runs(tmp_path):
    """Each block of Python, after what it imports itself."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert sum("torch.jit.script" in block for block in blocks) == 1
    files = [tmp_path / f"block_{n}.py" for n in range(len(blocks))]
    for file, block in zip(files, blocks, strict=True):
        file.write_text(block)
    env = {**os.environ, "PYTHONPATH": str(Path(xattn.__file__).parent.parent)}
    command = [sys.executable, "-c", EACH_AFTER_TORCH, *files]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["attention", "attention_varlen", "attention_paged", "append_paged", "extend_paged", "rotary"]
)
def test_ops_are_documented(name):
    text = getattr(OPS, name).__doc__
    assert "help(xattn.ops)" in text and f"xattn::{name}(" in text and name in ops.__doc__


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_script_has_gradients():
    scripted, x = torch.jit.script(Scripted()), qkv(seqlen_q=7)
    ends = torch.tensor([0, 5, 14])
    got, wanted = scripted(*x, ends)[2], Scripted()(*x, ends)[2]
    all_equal(gradients(got, x), gradients(wanted, x))


def test_script_with_a_function_of_another_process():
    q, k, v = qkv(grad=False)
    with pytest.raises(UnsupportedError, match="do not travel"):
        OPS.attention(q, k, v, score_mod="score_mod:0123456789abcdef")


# ---------------------------------------------------------------- autocast
def test_autocast():
    """q and k float32, v bfloat16: computed in bfloat16, gradients in the dtypes of the inputs."""
    q, k, v = qkv()
    v = v.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = xattn.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    wanted = xattn.attention(q.bfloat16(), k.bfloat16(), v)
    assert torch.equal(out, wanted)
    grads = gradients(out, (q, k, v))
    assert [g.dtype for g in grads] == [torch.float32, torch.float32, torch.bfloat16]
    assert all(torch.equal(x, y) for x, y in zip(grads, gradients(wanted, (q, k, v)), strict=True))


def test_without_autocast_mixed_dtypes_are_an_error():
    q, k, v = qkv(grad=False)
    with pytest.raises((TypeError, ValueError), match="v"):
        xattn.attention(q, k, v.bfloat16())


def test_autocast_of_the_mask():
    q, k, v = qkv(grad=False)
    mask = randn(5, 7, seed=8, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = xattn.attention(q, k, v, attn_mask=mask)
    assert out.dtype == torch.bfloat16
    assert gradients(out, mask)[0].dtype == torch.float32


def test_autocast_varlen_and_paged():
    x, p = packed([3, 4], [3, 4]), pages([5, 9])
    p |= {n: p[n].bfloat16() for n in ("k_cache", "v_cache")}
    with torch.autocast("cpu", torch.bfloat16):
        out, of_pages = xattn.attention_varlen(*x), xattn.attention_paged(**p)
    assert out.dtype == of_pages.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in gradients(out, x[:3]))


KINDS = ("attention", "varlen", "paged")


def of_kind(kind: str, **options) -> tuple:
    """(function, arguments) of a small call."""
    if kind == "paged":
        return xattn.attention_paged, tuple(pages([5, 9]).values())
    return (xattn.attention, qkv(**options)) if kind == "attention" else (xattn.attention_varlen, packed([3], [3]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_seen_by_explain_and_by_out(kind, given):
    fn, args = of_kind(kind)
    args = (args[0].detach().to(given), *args[1:])  # q of another dtype than k and v
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        plan = xattn.explain(*args, kind=kind)
        out = fn(*args)
        dtype = torch.float32 if kind == "paged" else torch.bfloat16  # a cache is not cast
        names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        assert out.dtype == dtype and plan.problem.dtype == plan.problem.dtype_kv == names[dtype]
        assert xattn.supported(*args, kind=kind)
        assert torch.equal(fn(*args, out=torch.empty_like(out)), out)
        with pytest.raises(ValueError, match=f"^out: .*; allowed: .*{dtype}"):
            fn(*args, out=torch.empty_like(out, dtype=torch.float16))


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_new_tokens_the_dtype_of_the_cache(cache, dtype):
    """Computed as without autocast in that dtype; beside an fp8 cache in autocast's."""
    p = pages([5, 9], seqlen_new=2)
    p |= {n: p[n].to(cache) for n in ("k_cache", "v_cache")}
    at = torch.bfloat16 if cache.itemsize == 1 else cache
    fresh = {n: p[n].clone() for n in ("k_cache", "v_cache")}
    wanted = xattn.attention_paged(**p | fresh | {n: p[n].to(at) for n in ("q", "k_new", "v_new")})
    with torch.autocast("cpu", torch.bfloat16):
        given = p | {n: p[n].to(dtype) for n in ("q", "k_new", "v_new")}
        assert xattn.supported(**given, kind="paged")
        out = xattn.attention_paged(**given)
        op = torch.ops.xattn.attention_paged(
            *(given[n] for n in ("q", "k_cache", "v_cache", "page_table", "seqlens_k"))
        )
    assert out.dtype == op[0].dtype == at
    if dtype == torch.float32:
        assert torch.equal(out, wanted)
        assert all(torch.equal(p[n].float(), t.float()) for n, t in fresh.items())


@pytest.mark.parametrize("cast", [False, True])
def test_autocast_leaves_float64(cast):
    x = qkv(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        out = xattn.attention(*x)
    assert out.dtype == torch.float64
    assert torch.equal(out, xattn.attention(*x))


def test_autocast_under_compile(compiled):
    x = qkv()
    fast = compiled(lambda *t: xattn.attention(*t))
    with torch.autocast("cpu", torch.bfloat16):
        out, wanted = fast(*x), xattn.attention(*x)
    assert out.dtype == torch.bfloat16 and torch.equal(out, wanted)
    assert [g.dtype for g in gradients(out, x)] == [torch.float32] * 3


# ---------------------------------------------------------------- torch.func
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "sdpa", None])
def test_forward_mode_is_refused(kind, backend):
    fn, (q, *rest) = of_kind(kind, grad=False)
    q, rest = q.detach(), [t.detach() if isinstance(t, Tensor) else t for t in rest]

    def total(x):
        return fn(x, *rest, backend=backend).sum()

    def dual(x):
        with torch.autograd.forward_ad.dual_level():
            return total(torch.autograd.forward_ad.make_dual(x, x))

    ways = [torch.func.jacfwd(total), lambda x: torch.func.jvp(total, (x,), (x,)), dual]
    for way in ways if kind == "paged" else [*ways, torch.func.hessian(total)]:
        with pytest.raises(UnsupportedError, match="forward-mode .*; allowed: reverse mode"):
            way(q)
    if backend == "reference" and kind == "attention":  # what the message names
        second = torch.func.jacrev(torch.func.jacrev(lambda x: total(q * x.sin().sum())))(torch.ones(2))
        assert second.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_over_nothing(kind, return_lse, dim):
    fn, (q, *rest) = of_kind(kind)
    none = torch.stack([q.detach()] * 2, dim).narrow(dim, 0, 0)
    got = torch.vmap(lambda x: fn(x, *rest, return_lse=return_lse), in_dims=dim)(none)
    wanted = fn(q.detach(), *rest, return_lse=return_lse)
    pairs = zip(got, wanted, strict=True) if return_lse else [(got, wanted)]
    assert all(g.shape == (0, *w.shape) and g.dtype == w.dtype for g, w in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_transforms_write_nothing(kind):
    fn, (q, *rest) = of_kind(kind)
    out = torch.zeros(q.shape)
    for way in (torch.vmap, torch.func.grad):
        with pytest.raises(UnsupportedError, match="^out: got a tensor under a torch.func transform"):
            way(lambda x: fn(x, *rest, out=out).sum())(torch.stack([q.detach()]) if way is torch.vmap else q.detach())
    assert not out.any()


def test_transforms_of_paged_calls():
    p = pages([5, 9], seqlen_new=1)
    caches = [p[n].clone() for n in ("k_cache", "v_cache")]
    q = p.pop("q")
    with pytest.raises(UnsupportedError, match="^k_new: got a tensor under a torch.func transform"):
        torch.vmap(lambda x: xattn.attention_paged(x, **p))(torch.stack([q]))
    assert torch.equal(p["k_cache"], caches[0]) and torch.equal(p["v_cache"], caches[1])
    p = {n: t for n, t in p.items() if not n.endswith("_new")}

    def total(x):
        return xattn.attention_paged(x, **p).sum()

    for way, x in (
        (torch.func.grad(total), q),
        (torch.vmap(torch.func.grad(total)), q[None]),
        (torch.func.grad(lambda x: torch.vmap(total)(x).sum()), q[None]),
        (torch.func.jacrev(total), q),
    ):
        with pytest.raises((ValueError, UnsupportedError), match="^q: .*attention_paged has no gradient"):
            way(x)


reference = functools.partial(xattn.attention, causal=True, backend="reference")
BACKENDS = ["reference", "sdpa", None]


def stacked(x: Tensor, n: int = 3) -> Tensor:
    return torch.stack([x.detach() * (1 + 0.3 * i) for i in range(n)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mapped", ["q", "k", "v", "kv", "qkv"])
@pytest.mark.parametrize("grad", [False, True])
def test_vmap(backend, mapped, grad):
    x = [stacked(t) if n in mapped else t for n, t in zip("qkv", qkv(grad=grad), strict=True)]
    dims = tuple(0 if n in mapped else None for n in "qkv")

    def f(*t):
        return xattn.attention(*t, causal=True, backend=backend)

    got = torch.vmap(f, in_dims=dims)(*x)
    wanted = [f(*(t if d is None else t[n] for t, d in zip(x, dims, strict=True))) for n in range(3)]
    torch.testing.assert_close(got, torch.stack(wanted))


def test_vmap_over_other_dimensions():
    q, k, v = qkv(grad=False)
    got = torch.vmap(lambda q: reference(q, k, v), in_dims=4, out_dims=1)(torch.movedim(stacked(q), 0, 4))
    torch.testing.assert_close(got, torch.stack([reference(t, k, v) for t in stacked(q)], 1))


@pytest.mark.parametrize("boolean", [False, True])
def test_vmap_over_the_mask(boolean):
    q, k, v = qkv(grad=False)
    masks = randn(3, 5, 7, seed=5)
    masks = masks > 0 if boolean else masks
    got = torch.vmap(lambda m: xattn.attention(q, k, v, attn_mask=m))(masks)
    torch.testing.assert_close(got, torch.stack([xattn.attention(q, k, v, attn_mask=m) for m in masks]))


def test_vmap_of_lse_and_of_packed_and_paged():
    q, k, v = qkv(grad=False)
    out, lse = torch.vmap(lambda q: xattn.attention(q, k, v, return_lse=True))(stacked(q))
    for n, one in enumerate(stacked(q)):
        all_equal([out[n], lse[n]], xattn.attention(one, k, v, return_lse=True))
    x = packed([3, 4], [3, 4], grad=False)
    got = torch.vmap(lambda q: xattn.attention_varlen(q, *x[1:]))(stacked(x[0]))
    torch.testing.assert_close(got, torch.stack([xattn.attention_varlen(q, *x[1:]) for q in stacked(x[0])]))
    p = pages([5, 9])
    got = torch.vmap(lambda q: xattn.attention_paged(**(p | {"q": q})))(stacked(p["q"]))
    torch.testing.assert_close(got, torch.stack([xattn.attention_paged(**(p | {"q": q})) for q in stacked(p["q"])]))


def test_nested_vmap():
    q, k, v = qkv(grad=False)
    qs, ks = stacked(q), stacked(k, 2)
    got = torch.vmap(lambda q: torch.vmap(lambda k: reference(q, k, v))(ks))(qs)
    torch.testing.assert_close(got, torch.stack([torch.stack([reference(q, k, v) for k in ks]) for q in qs]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_func_grad(backend):
    x = qkv()

    def loss(*t):
        return xattn.attention(*t, causal=True, backend=backend).square().sum()

    all_equal(torch.func.grad(loss, argnums=(0, 1, 2))(*x), torch.autograd.grad(loss(*x), x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_of_grad(backend):
    q, k, v = qkv(grad=False)

    def loss(q, k, v):
        return xattn.attention(q, k, v, causal=True, backend=backend).square().sum()

    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, None))(stacked(q), k, v)
    for n, one in enumerate(stacked(q)):
        leaves = [t.clone().requires_grad_() for t in (one, k, v)]
        for g, wanted in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(g[n], wanted)


def test_grad_of_vmap():
    q, k, v = qkv(grad=False)

    def loss(k):
        return torch.vmap(lambda q: reference(q, k, v))(stacked(q)).square().sum()

    leaf = k.clone().requires_grad_()
    total = sum(reference(one, leaf, v).square().sum() for one in stacked(q))
    torch.testing.assert_close(torch.func.grad(loss)(k), torch.autograd.grad(total, leaf)[0])


def test_vjp():
    x = qkv()
    out, vjp = torch.func.vjp(reference, *(t.detach() for t in x))
    all_equal([out], [reference(*x)])
    all_equal(vjp(randn(*out.shape, seed=9)), gradients(reference(*x), x))


def test_jacrev():
    q, k, v = qkv(1, 2, 3, 1, 1, 4, dtype=torch.float64)
    got = torch.func.jacrev(reference)(q.detach(), k, v)
    wanted = torch.autograd.functional.jacobian(lambda q: oracle.attention(q, k, v, causal=True)[0], q)
    torch.testing.assert_close(got, wanted)


def test_func_grad_of_grad():
    x = [t.detach() for t in qkv(1, 3, 4, 2, 1, 4, dtype=torch.float64)]

    def second(attend):
        def loss(q):
            return attend(q, *x[1:]).square().sum()

        return torch.func.grad(lambda q: torch.func.grad(loss)(q).sin().sum())(x[0])

    torch.testing.assert_close(second(reference), second(lambda *t: oracle.attention(*t, causal=True)[0]))


def test_functional_call_with_a_score_mod():
    q, k, v = qkv(grad=False)
    bias = randn(4, seed=6)

    def loss(bias):
        return xattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h] * j).square().sum()

    leaf = bias.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(bias), torch.autograd.grad(loss(leaf), leaf)[0])


# ---------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("backend", ["reference", None])
def test_checkpoint_repeats_the_dropout(backend):
    x = qkv(seqlen_q=16, seqlen_k=16)

    def f(q, k, v):
        return xattn.attention(q.sin(), k, v, dropout_p=0.5, backend=backend)

    with torch.random.fork_rng():
        torch.manual_seed(3)
        wanted = f(*x)
        torch.manual_seed(3)
        out = checkpoint(f, *x, use_reentrant=False)
        torch.manual_seed(4)
        assert torch.equal(out, wanted)
        all_equal(gradients(out, x), gradients(wanted, x))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpoint(policy, monkeypatch):
    """With the policy to save it, the op runs once; without, twice."""
    runs = []
    original = ops._run
    monkeypatch.setattr(ops, "_run", lambda *args: runs.append(1) or original(*args))

    def decide(ctx, op, *args, **kwargs):
        return policy if op is OPS.attention.default else CheckpointPolicy.PREFER_RECOMPUTE

    x = qkv()

    def f(q, k, v):
        return xattn.attention(q.sin(), k.sin(), v.sin(), causal=True).cos()

    out = checkpoint(
        f, *x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, decide)
    )
    grads = gradients(out, x)
    assert len(runs) == (1 if policy == CheckpointPolicy.MUST_SAVE else 2)
    all_equal(grads, gradients(f(*x), x))


# ---------------------------------------------------------------- autograd's modes and rules
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_modes(mode):
    x = qkv()
    wanted = xattn.attention(*x, causal=True)
    with mode():
        out, lse = xattn.attention(*x, causal=True, return_lse=True)
    assert not out.requires_grad and not lse.requires_grad and out.grad_fn is None
    assert out.is_inference() == (mode is torch.inference_mode)
    torch.testing.assert_close(out, wanted.detach())


def test_inference_tensors_as_inputs():
    with torch.inference_mode():
        x = qkv(grad=False)
        p = pages([5, 9], seqlen_new=2)
        xattn.attention_paged(**p)
    out = xattn.attention(*x)
    assert not out.requires_grad
    leaf = qkv()[0]
    with pytest.raises(RuntimeError, match="[Ii]nference tensor"):
        xattn.attention(leaf, *x[1:])


def test_hooks():
    q, k, v = qkv()
    out = xattn.attention(q, k, v)
    seen = {}
    out.register_hook(lambda g: seen.setdefault("out", g) * 2)
    q.register_hook(lambda g: seen.setdefault("q", g) * 0)
    k.register_post_accumulate_grad_hook(lambda t: seen.update(k=t.grad.clone()))
    wanted = torch.autograd.grad(xattn.attention(q, k, v).sum() * 2, (q, k, v))
    seen.clear()
    out.sum().backward()
    assert torch.equal(seen["out"], torch.ones_like(out))
    assert torch.equal(q.grad, torch.zeros_like(q))
    torch.testing.assert_close(seen["k"], wanted[1])
    torch.testing.assert_close(v.grad, wanted[2])


def test_saved_tensor_hooks():
    x = qkv()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t.clone(), lambda t: t):
        out = xattn.attention(*x)
    assert {t.data_ptr() for t in x} <= {t.data_ptr() for t in kept}  # as they are, no copies
    all_equal(gradients(out, x), gradients(xattn.attention(*x), x))


def calls_with_gradients() -> dict[str, tuple]:
    return {"attention": (xattn.attention, qkv()), "varlen": (xattn.attention_varlen, packed([3, 1], [3, 5]))}


@pytest.mark.parametrize("kind", calls_with_gradients())
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"score_mod": lambda s, b, h, i, j: s * 2}], ids=len)
def test_backward_within_saved_tensor_hooks(kind, backend, options):
    fn, x = calls_with_gradients()[kind]
    if "score_mod" in options and backend == "sdpa":
        return
    wanted = gradients(fn(*x, backend=backend, **options), x[:3])
    used = []
    with torch.autograd.graph.save_on_cpu():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: used.append(t) or t, lambda t: t):
            all_equal(gradients(fn(*x, backend=backend, **options), x[:3]), wanted)
            before = len(used)
            (x[0] * x[0]).sum()
            assert len(used) > before  # they are there again
        all_equal(gradients(fn(*x, backend=backend, **options), x[:3]), wanted)
    if backend == "reference":
        with torch.autograd.graph.save_on_cpu():
            first = torch.autograd.grad(fn(*x, backend=backend).sin().sum(), x[:3], create_graph=True)
            torch.autograd.grad(sum(g.sum() for g in first), x[:3])


@pytest.mark.parametrize("kind", calls_with_gradients())
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_results_can_be_changed_in_place(kind, backend, return_lse):
    fn, x = calls_with_gradients()[kind]
    if return_lse and backend == "sdpa":
        return
    results = fn(*x, backend=backend, return_lse=return_lse)
    results = results if return_lse else (results,)
    for r in results:
        want = r.detach() * 2
        assert not r._is_view() and torch.equal(r.mul_(2), want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as torch's own: out is saved
        results[0].sum().backward()
    grads = torch.autograd.grad(fn(*x, backend=backend).sum(), x[:3], create_graph=backend == "reference")
    for g in grads:
        g.add_(1.0)
    mask = randn(5, 7, grad=True)
    torch.autograd.grad(xattn.attention(*qkv(), attn_mask=mask).sum(), mask, create_graph=True)[0].add_(1.0)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("through", ["tensor", "view", "base"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_written_before_backward(backend, through, which):
    leaves = qkv()
    x = dict(zip("qkv", (t * 1 for t in leaves), strict=True))
    base = x[which]
    if through == "base":
        x[which] = base[:]
    out = xattn.attention(**x, backend=backend)
    with torch.no_grad():
        (base[0] if through == "view" else base).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_written_after_backward_is_fine():
    q, k, v = qkv()
    k2 = k * 1
    out = xattn.attention(q, k2, v)
    grads = gradients(out, (q, k, v))
    with torch.no_grad():
        k2.zero_()
    all_equal(grads, gradients(xattn.attention(q, k, v), (q, k, v)))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("asking", ["q", "k", "v", "qk", "kv", "qkv"])
def test_gradients_only_for_what_asks(backend, asking, monkeypatch):
    wanted = []
    original = ops.backward
    monkeypatch.setattr(
        ops, "backward", lambda inputs, needs, want, *rest: wanted.append(want) or original(inputs, needs, want, *rest)
    )
    x = {n: t.detach().requires_grad_(n in asking) for n, t in zip("qkv", qkv(), strict=True)}
    out = xattn.attention(**x, backend=backend)
    out.square().sum().backward()
    assert [n for n, t in x.items() if t.grad is not None] == list(asking)
    assert [w[:3] for w in wanted] == [[n in asking for n in "qkv"]]
    assert not any(wanted[0][3:])
    whole = qkv()
    for n, g in zip("qkv", torch.autograd.grad(xattn.attention(*whole).square().sum(), whole), strict=True):
        if n in asking:
            torch.testing.assert_close(x[n].grad, g)


def test_backward_for_some_of_what_asked():
    """autograd.grad for one input computes no other."""
    x = qkv()
    whole = gradients(xattn.attention(*x), x)
    for n in range(3):
        torch.testing.assert_close(gradients(xattn.attention(*x), [x[n]])[0], whole[n])


def test_gradient_of_lse_alone_and_of_out_alone():
    q, k, v = qkv()
    out, lse = xattn.attention(q, k, v, return_lse=True)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    truth, truth_lse = oracle.attention(*leaves)
    for got, wanted in ((out, truth), (lse, truth_lse)):
        found = torch.autograd.grad(got.sin().sum(), (q, k, v), retain_graph=True, allow_unused=True)
        real = torch.autograd.grad(wanted.sin().sum(), leaves, retain_graph=True, allow_unused=True)
        for g, r in zip(found, real, strict=True):
            g, r = (torch.zeros(q.shape[0]) if t is None or not t.any() else t.float() for t in (g, r))
            torch.testing.assert_close(g, r, rtol=1e-4, atol=1e-5)


def test_lse_that_was_not_asked_for_has_no_gradient():
    out, lse = OPS.attention(*qkv())
    assert out.requires_grad and not lse.requires_grad


def test_retain_graph():
    x = qkv()
    out = xattn.attention(*x).sum()
    one = torch.autograd.grad(out, x, retain_graph=True)
    all_equal(torch.autograd.grad(out, x), one)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x)


def test_paged_has_no_gradient():
    p = pages([5, 9])
    p["q"].requires_grad_()
    with pytest.raises((RuntimeError, ValueError), match="gradient"):
        xattn.attention_paged(**p)
    with torch.no_grad():
        assert not xattn.attention_paged(**p).requires_grad


# ---------------------------------------------------------------- strides
def layouts() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    q, k, v = qkv(2, 6, 6, 4, 4, 8, grad=False)
    heads_first = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    joined = torch.stack((q, k, v), 2).unbind(2)
    return {
        "contiguous": (q, k, v),
        "heads first": heads_first,
        "one tensor": joined,
        "expanded batch": tuple(t[:1].expand(2, -1, -1, -1) for t in (q, k, v)),
        "expanded heads": (q, k[:, :, :1].expand(-1, -1, 4, -1), v[:, :, :1].expand(-1, -1, 4, -1)),
        "last stride 2": tuple(torch.stack((t, t), -1)[..., 0] for t in (q, k, v)),
        "reversed dimensions": tuple(t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for t in (q, k, v)),
    }


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_fake_strides_are_the_real_ones(layout, backend):
    x = layouts()[layout]
    needs = [True, True, True, *[False] * 6]
    mode = torch._subclasses.FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in x]
    return_lse = backend == "reference"
    options = {"return_lse": return_lse, "needs_grad": needs, "backend": backend}
    real = OPS.attention(*x, **options)
    with mode:
        fake = OPS.attention(*fakes, **options)
    assert [(t.shape, t.stride(), t.dtype) for t in real] == [(t.shape, t.stride(), t.dtype) for t in fake]
    dout = randn(*real[0].shape).transpose(1, 2).contiguous().transpose(1, 2)
    grads = OPS.attention_backward(dout, None, *real, needs, needs, *x, return_lse=return_lse, backend=backend)
    with mode:
        given = (mode.from_tensor(dout), None, *fake, needs, needs, *fakes)
        of_fakes = OPS.attention_backward(*given, return_lse=return_lse, backend=backend)
    assert [(t.shape, t.stride(), t.dtype) for t in grads] == [(t.shape, t.stride(), t.dtype) for t in of_fakes]


@pytest.mark.parametrize("layout", ["heads first", "expanded heads", "last stride 2"])
def test_compile_with_strides(compiled, layout):
    x = [t.requires_grad_() for t in layouts()[layout]]

    def f(q, k, v):
        return xattn.attention(q, k, v, causal=True) + 1

    out, wanted = compiled(f)(*x), f(*x)
    all_equal([out, *gradients(out, x)], [wanted, *gradients(wanted, x)])


# ---------------------------------------------------------------- determinism
@pytest.mark.parametrize("how", ["argument", "torch"])
@pytest.mark.parametrize("backend", ["reference", "sdpa", None])
def test_deterministic(how, backend):
    def call():
        x = qkv(2, 33, 65, 4, 2, 16, dtype=torch.bfloat16)
        flag = True if how == "argument" else None
        out = xattn.attention(*x, causal=True, deterministic=flag, backend=backend)
        return [out, *gradients(out, x)]

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(how == "torch" or before)
    try:
        runs = [call() for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(before)
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("flag", [None, True, False])
def test_deterministic_reaches_the_plan(flag, enabled):
    wanted = enabled if flag is None else flag
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled)
    try:
        assert xattn.explain(*qkv(), deterministic=flag).problem.deterministic == wanted
    finally:
        torch.use_deterministic_algorithms(before)


# ---------------------------------------------------------------- second and third derivatives
SECOND = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 3.0},
    "mask": {"attn_mask": randn(3, 4, seed=5, dtype=torch.float64)},
    "dropout": {"dropout_p": 0.5, "dropout_rng": rng()},
}


@pytest.mark.parametrize("options", SECOND.values(), ids=SECOND)
def test_second_derivative(options):
    x = qkv(1, 3, 4, 2, 1, 4, dtype=torch.float64)

    def f(*t):
        return xattn.attention(*t, backend="reference", **options)

    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x)


def test_second_derivative_through_lse():
    """lse is float32, too coarse for numerical derivatives: against those of the definition."""
    x = qkv(1, 3, 4, 2, 1, 4, dtype=torch.float64)

    def second(out, lse):
        one = torch.autograd.grad(out.sin().sum() + lse.double().square().sum(), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in one), x)

    got, wanted = second(*reference(*x, return_lse=True)), second(*oracle.attention(*x, causal=True))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_second_derivative_of_sdpa_is_refused():
    x = qkv()
    (grad,) = torch.autograd.grad(xattn.attention(*x, backend="sdpa").square().sum(), x[0], create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative.*'sdpa'.*backend='reference'"):
        torch.autograd.grad(grad.square().sum(), x[0])


def test_third_derivative_is_refused():
    x = qkv(1, 3, 4, 2, 1, 4, dtype=torch.float64)
    (one,) = torch.autograd.grad(reference(*x).pow(3).sum(), x[0], create_graph=True)
    (two,) = torch.autograd.grad(one.pow(2).sum(), x[0], create_graph=True)
    with pytest.raises(UnsupportedError, match="third derivative"):
        torch.autograd.grad(two.pow(2).sum(), x[0])


def test_third_derivative_is_refused_under_torch_func():
    q, k, v = (t.detach() for t in qkv(1, 3, 4, 2, 1, 4, dtype=torch.float64))
    f = lambda q: reference(q, k, v).pow(3).sum()  # noqa: E731
    for _ in range(2):
        f = (lambda g: lambda q: torch.func.grad(g)(q).pow(2).sum())(f)
    with pytest.raises(UnsupportedError, match="third derivative"):
        torch.func.grad(f)(q)
