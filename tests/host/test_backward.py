"""The backward kernels, through emulated backends, against float64 autograd of the oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import cases
import oracle
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import xattn
from xattn import backward_call, dispatch, forward_call, ops
from xattn.backends import cdna
from xattn.inputs import Inputs
from xattn.jit import CompileError

DTYPES = [torch.bfloat16, torch.float16]


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def qkv(b=1, sq=65, sk=97, h=2, hk=1, d=64, dv=None, dtype=torch.bfloat16):
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv or d))
    return dict(zip("qkv", (randn(*s, dtype=dtype, seed=n) for n, s in enumerate(shapes)), strict=True))


def packed(lens_q, lens_k, spare=0, h=2, hk=1, d=64, index=torch.int32):
    """Tensors of packed sequences with NaN in the rows behind them, and the other arguments."""
    rows = (sum(lens_q), sum(lens_k), sum(lens_k))
    heads = (h, hk, hk)
    t = {n: randn(r + spare, heads[s], d, seed=s) for s, (n, r) in enumerate(zip("qkv", rows, strict=True))}
    for n, r in zip("qkv", rows, strict=True):
        t[n][r:] = math.nan
    for side, lens in (("q", lens_q), ("k", lens_k)):
        t[f"cu_seqlens_{side}"] = torch.tensor([0, *lens]).cumsum(0).to(index)
    return t, {"max_seqlen_q": max(lens_q), "max_seqlen_k": max(lens_k)}


def leaves_of(tensors, wants="qkv"):
    return {n: t.detach().clone().requires_grad_(n in wants) for n, t in tensors.items()}


def checked(target, tensors, kind="attention", wants=("q", "k", "v"), **other):
    """Results and gradients are right, and native; the gradients of the sum of squares by name."""
    call = cases.Call(kind, dict(tensors), other, tuple(wants))
    leaves = leaves_of(tensors, wants)
    args, kwargs = call.arguments(leaves)
    plan = xattn.explain(*args, kind=kind, backend=target.backend, **kwargs)
    assert plan.native and "backward" in dict(plan.config), plan
    cases.check(call, target)
    result = cases.FUNCTIONS[kind](*args, backend=target.backend, **kwargs)
    out = result[0] if other.get("return_lse") else result
    return dict(zip(wants, torch.autograd.grad(out.square().sum(), [leaves[n] for n in wants]), strict=True))


# ---------------------------------------------------------------- values
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_dtypes_and_lse(target, dtype, causal, return_lse):
    checked(target, qkv(dtype=dtype), causal=causal, return_lse=return_lse)


@pytest.mark.parametrize("dims", [(8, 8), (40, 72), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_dims(target, dims):
    checked(target, qkv(d=dims[0], dv=dims[1], sq=70, sk=70), causal=True)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (7, 1), (5, 5)], ids=str)
def test_heads(target, heads):
    checked(target, qkv(b=2, sq=20, sk=140, h=heads[0], hk=heads[1]), window=(60, 30))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (63, 65), (128, 129), (300, 30), (5, 2), (129, 127)], ids=str)
def test_lengths(target, lengths, causal):
    checked(target, qkv(sq=lengths[0], sk=lengths[1]), causal=causal)


@pytest.mark.parametrize("window", [(0, 0), (30, None), (None, 5), (64, 64), (7, 200)], ids=str)
@pytest.mark.parametrize("lengths", [(90, 200), (200, 90)], ids=str)
def test_windows(target, window, lengths):
    checked(target, qkv(sq=lengths[0], sk=lengths[1]), window=window)


@pytest.mark.parametrize("lengths", [(0, 7), (7, 0), (0, 0)], ids=str)
def test_without_queries_or_keys(target, lengths):
    leaves = leaves_of(qkv(b=2, sq=lengths[0], sk=lengths[1]))
    out = xattn.attention(*leaves.values(), backend=target.backend)
    for leaf, grad in zip(leaves.values(), torch.autograd.grad(out.sum(), list(leaves.values())), strict=True):
        assert grad.shape == leaf.shape and (grad == 0).all()


@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.3])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_scales_of_any_sign(target, scale, softcap):
    checked(target, qkv(sq=66, sk=130), softmax_scale=scale, softcap=softcap, causal=True)


def test_softcap_alibi_sinks_and_bias_together(target):
    small = {
        "alibi_slopes": torch.tensor([[0.5, 0.1], [0.2, 0.3]]),
        "sinks": torch.tensor([0.3, -2.0]),
        "attn_mask": randn(2, 1, 66, 130, dtype=torch.float32),
    }
    tensors = qkv(b=2, sq=66, sk=130) | small
    checked(target, tensors, wants=("q", "k", "v", "sinks"), softcap=5.0, causal=True, return_lse=True)


@pytest.mark.parametrize("kind", ["attention", "varlen"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_sinks(target, kind, return_lse):
    tensors, other = (qkv(b=2), {}) if kind == "attention" else packed((30, 0, 70), (90, 4, 0), spare=3)
    tensors["sinks"] = torch.tensor([0.3, -2.0])
    grads = checked(target, tensors, kind, ("q", "k", "v", "sinks"), return_lse=return_lse, causal=True, **other)
    assert (grads["sinks"] != 0).all()


def test_a_sink_without_bound_leaves_no_gradient(target):
    tensors = qkv(b=2, h=2, hk=1) | {"sinks": torch.tensor([math.inf, 0.5])}
    leaves = leaves_of(tensors, ("q", "k", "v", "sinks"))
    q, k, v, sinks = leaves.values()
    out, lse = xattn.attention(q, k, v, sinks=sinks, return_lse=True, backend=target.backend)
    loss = out.square().sum() + torch.where(lse.isfinite(), lse, 0).sum()
    dq, dk, dv, of_sinks = torch.autograd.grad(loss, [q, k, v, sinks])
    assert (dq[:, :, 0] == 0).all() and of_sinks[0] == 0 and of_sinks[1] != 0
    assert dq[:, :, 1].ne(0).any() and all(x.isfinite().all() for x in (dk, dv))


@pytest.mark.parametrize("shape", [(1, 1, 66, 130), (2, 2, 66, 130), (2, 1, 1, 130), (1, 2, 66, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
def test_masks(target, shape, dtype):
    mask = randn(*shape, dtype=torch.float32)
    hidden = mask < -0.5
    hidden[..., 5 % shape[2], :] = True  # an empty row
    mask = ~hidden if dtype == torch.bool else mask.masked_fill(hidden, -math.inf).to(dtype)
    grads = checked(target, qkv(b=2, sq=66, sk=130) | {"attn_mask": mask})
    if shape[2] > 1:
        assert (grads["q"][:, 5] == 0).all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("causal", [False, True])
def test_varlen(target, index, causal):
    tensors, other = packed((70, 0, 5, 3), (90, 10, 0, 140), spare=4, h=6, hk=2, index=index)
    grads = checked(target, tensors, "varlen", causal=causal, return_lse=True, **other)
    assert (grads["q"][70:75] == 0).all() and (grads["k"][90:100] == 0).all() and (grads["v"][240:] == 0).all()
    assert (grads["q"][78:] == 0).all()


# ---------------------------------------------------------------- what must not be seen
def test_keys_behind_seqused_never_matter(target):
    tensors = qkv(b=3, sq=40, sk=300)
    used = torch.tensor([300, 37, 0])
    for b, n in enumerate(used.tolist()):
        tensors["k"][b, n:], tensors["v"][b, n:] = math.nan, math.nan
    grads = checked(target, tensors | {"seqused_k": used}, causal=True)
    assert all(g.isfinite().all() for g in grads.values())
    for b, n in enumerate(used.tolist()):
        assert (grads["k"][b, n:] == 0).all() and (grads["v"][b, n:] == 0).all()


@pytest.mark.parametrize("how", ["causal", "window", "mask", "lengths"])
@pytest.mark.parametrize("sinks", [False, True])
def test_nan_in_rows_that_see_no_key_never_matters(target, how, sinks):
    """In q, in the gradient of out, and in that of lse."""
    x = qkv(b=1, sq=40, sk=30)
    rows, options = slice(0, 10), {"causal": True}
    if how == "window":
        rows, options = slice(0, 7), {"window": (None, 3)}
    if how == "mask":
        options = {"attn_mask": (torch.arange(40) >= 10)[:, None].expand(40, 30)}
    if how == "lengths":
        rows, options = slice(0, 40), {"seqused_k": torch.tensor([0])}
    if sinks:
        options["sinks"] = torch.tensor([0.3, -20.0])
    x["q"][:, rows] = math.nan
    seeds = randn(*x["q"].shape, seed=5), torch.ones(1, 2, 40)
    found = []
    for outside in (0.0, math.nan):
        seeds[0][:, rows], seeds[1][..., rows] = outside, outside
        leaves = list(leaves_of(x).values())
        results = xattn.attention(*leaves, **options, return_lse=True, backend=target.backend)
        found.append(torch.autograd.grad(results, leaves, seeds))
    for clean, dirty in zip(*found, strict=True):
        assert clean.isfinite().all() and torch.equal(clean, dirty)
    assert (found[0][0][:, rows] == 0).all() and (how == "lengths" or found[0][0].ne(0).any())


def test_nan_in_a_row_shows(target):
    """A row that sees keys is not silently without gradient."""
    x = qkv(sq=20, sk=20)
    x["q"][0, 3, 0, 0] = math.nan
    leaves = list(leaves_of(x).values())
    dq, dk, dv = torch.autograd.grad(xattn.attention(*leaves, backend=target.backend).sum(), leaves)
    assert dq[0, 3, 0].isnan().any() and dk.isnan().any() and dv.isnan().any()


@pytest.mark.parametrize("form", ["sum", "expanded", "transposed", "every 2nd", "offset"])
@pytest.mark.parametrize("kind", ["attention", "varlen"])
def test_strides_of_dout(target, kind, form):
    tensors, other = (qkv(b=2), {}) if kind == "attention" else packed((30, 0, 70), (90, 4, 9))
    leaves = leaves_of(tensors)
    args, kwargs = cases.Call(kind, tensors, other).arguments(leaves)
    out = cases.FUNCTIONS[kind](*args, causal=True, backend=target.backend, **kwargs)
    dout = {
        "sum": torch.ones((), dtype=out.dtype).expand(out.shape),
        "expanded": randn(*out.shape[:-1], 1).expand(out.shape),
        "transposed": randn(*reversed(out.shape)).permute(*reversed(range(out.dim()))),
        "every 2nd": randn(*out.shape[:-1], 2 * out.shape[-1])[..., ::2],
        "offset": cases.laid_out(randn(*out.shape), "offset 1"),
    }[form]
    found = torch.autograd.grad(out, args[:3], dout, retain_graph=True)
    wanted = torch.autograd.grad(out, args[:3], dout.contiguous().clone())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("layout", ["heads first", "every 2nd row", "offset 1", "expanded heads", "last dim", "k only"])
def test_strides(target, layout):
    x = qkv(b=2, h=4, hk=2)
    names, form = ("k", "every 2nd row") if layout == "k only" else ("qkv", layout)
    laid = {n: cases.laid_out(t, form) if n in names else t for n, t in x.items()}
    checked(target, laid, causal=True)


# ---------------------------------------------------------------- what is computed, and again
def gradients(target, x, wants="qkv", **options):
    leaves = leaves_of(x, wants)
    out = xattn.attention(*leaves.values(), causal=True, backend=target.backend)
    return dict(zip(wants, torch.autograd.grad(out.square().sum(), [leaves[n] for n in wants]), strict=True))


@pytest.mark.parametrize("d", [64, 256])
def test_only_what_is_asked_for(target, d):
    x = qkv(sq=33, sk=70, d=d)
    every = gradients(target, x, causal=True)
    for wants in ("q", "k", "v", "qk", "kv", "qv"):
        for name, grad in gradients(target, x, wants, causal=True).items():
            assert torch.equal(grad, every[name])


def test_repeated_and_deterministic(target):
    x = qkv(b=2, sq=130, sk=150, h=6, hk=2)
    found = [gradients(target, x, causal=True, deterministic=d) for d in (True, True, None)]
    assert all(torch.equal(f[n], found[0][n]) for f in found for n in f)


def test_lse_alone_and_out_alone(target):
    leaves = list(leaves_of(qkv()).values())
    out, lse = xattn.attention(*leaves, return_lse=True, backend=target.backend)
    of_lse = torch.autograd.grad(lse.sum(), leaves, retain_graph=True)
    of_out = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    both = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert of_lse[0].ne(0).any() and of_lse[1].ne(0).any() and (of_lse[2] == 0).all()
    for a, b, c in zip(both, of_out, of_lse, strict=True):
        torch.testing.assert_close(a.float(), b.float() + c.float(), rtol=2e-2, atol=2e-2)


KEYS = [(32, 64, 4, 1, 1, 16, 1), (32, 64, 2, 1, 2, 32, 1), (16, 32, 2, 1, 2, 16, 2), (48, 64, 4, 1, 1, 48, 2)]
QUERIES = [(64, 32, 4, 1, 1, 16, 1), (64, 32, 2, 1, 2, 32, 1), (32, 48, 2, 1, 2, 48, 1), (64, 16, 4, 1, 1, 16, 1)]


@pytest.mark.parametrize("keys, queries", list(zip(KEYS, QUERIES, strict=True)), ids=str)
def test_tiles(target, keys, queries):
    """Every tile gives the gradients that the tables' tiles give, within their rounding."""
    body = {"sm80": backward_call.NVIDIA, "cdna": cdna.BACKWARD}[target.backend]
    other = replace(body, keys=((256, *keys),), queries=((256, *queries),))
    x = Inputs("attention", **qkv(b=2, sq=70, sk=150, h=4, hk=2), causal=True, window_left=60)
    out, lse = ops.forward(replace(x, return_lse=True, backend=target.backend))
    wanted = [name in "qkv" for name, _ in x.differentiable()]
    args = (x, (), out, lse, randn(*out.shape, seed=3), None, wanted)
    for got, want in zip(other.backward(*args), body.backward(*args), strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=1e-2)


# ---------------------------------------------------------------- within torch
def test_compile_fullgraph(target):
    def step(q, k, v):
        out, lse = xattn.attention(q, k, v, causal=True, return_lse=True, backend=target.backend)
        return out.square().sum() + lse.sum()

    x, found = qkv(sq=20, sk=30), []
    for f in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = list(leaves_of(x).values())
        f(*leaves).backward()
        found.append([t.grad for t in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_opcheck(target):
    x = qkv(sq=9, sk=11)
    out, lse = torch.ops.xattn.attention(*x.values(), causal=True, return_lse=True, backend=target.backend)
    args = (
        randn(*out.shape, seed=4),
        torch.ones_like(lse),
        out,
        lse,
        [True] * 3 + [False] * 6,
        [True] * 3 + [False] * 6,
    )
    kwargs = {"causal": True, "return_lse": True, "backend": target.backend}
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.xattn.attention_backward.default, (*args, *x.values()), kwargs, test_utils=utils)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpoint(target, policy):
    def f(q, k, v):
        return xattn.attention(q * 1, k, v, causal=True, backend=target.backend).square()

    def contexts():
        ours = torch.ops.xattn.attention.default
        return create_selective_checkpoint_contexts(
            lambda ctx, op, *a, **kw: policy if op == ours else CheckpointPolicy.PREFER_RECOMPUTE
        )

    x, found = qkv(sq=20, sk=30), []
    for run in (f, lambda *a: checkpoint(f, *a, use_reentrant=False, context_fn=contexts)):
        leaves = list(leaves_of(x).values())
        found.append(torch.autograd.grad(run(*leaves).sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_func_grad_and_vmap(target):
    x = qkv(b=3, sq=20, sk=30)

    def loss(q, k, v):
        return xattn.attention(q, k, v, causal=True, backend=target.backend).square().sum()

    wanted = list(gradients(target, x, causal=True).values())
    found = torch.func.grad(loss, (0, 1, 2))(*x.values())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    each = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*(t[:, None] for t in x.values()))
    assert all(torch.equal(a[:, 0], b) for a, b in zip(each, wanted, strict=True))


def test_a_second_derivative_is_an_error(target):
    leaves = list(leaves_of(qkv(sq=4, sk=4)).values())
    out = xattn.attention(*leaves, backend=target.backend)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    with pytest.raises(xattn.UnsupportedError, match="second derivative"):
        torch.autograd.grad(sum(g.sum() for g in first), leaves)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", ["attn_mask", "alibi_slopes"])
def test_other_gradients_are_refused(target, name):
    x = qkv(sq=5, sk=7)
    small = {"attn_mask": randn(5, 7), "alibi_slopes": torch.ones(2)}[name].requires_grad_()
    with pytest.raises(xattn.UnsupportedError, match=f"{name} = gradient asked for"):
        xattn.attention(*x.values(), **{name: small}, backend=target.backend)


def test_where_no_image_of_the_backward_is_to_be_had(target, monkeypatch):
    """What follows answers, as it reads nothing of the forward's own; asked for by name, nobody does."""
    real = forward_call.choose

    def choose(entry, fields, arch):
        if "backward" in entry:
            raise CompileError("no such luck")
        return real(entry, fields, arch)

    monkeypatch.setattr(forward_call, "choose", choose)
    monkeypatch.setattr("xattn.backends.base._unavailable", {})
    tensors = qkv(sq=20, sk=30)
    x = leaves_of(tensors)
    dout = randn(1, 20, 2, 64, seed=7)
    with pytest.warns(xattn.FallbackWarning, match="no image of its backward"):
        out = xattn.attention(*x.values(), causal=True, deterministic=True)
        found = torch.autograd.grad(out, list(x.values()), dout)
    of = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = leaves_of({n: t.to(dtype) for n, t in tensors.items()})
        truth = oracle.attention(*leaves.values(), causal=True)[0]
        of.append(torch.autograd.grad(truth, list(leaves.values()), dout.to(dtype)))
    for name, got, true, plain in zip("qkv", found, *of, strict=True):
        oracle.assert_close(name, got, true, plain)
    monkeypatch.setattr("xattn.backends.base._unavailable", {})
    dispatch._plans.clear()
    out = xattn.attention(*x.values(), causal=True, backend=target.backend)
    with pytest.raises(xattn.UnsupportedError, match="no such luck"):
        out.sum().backward()
