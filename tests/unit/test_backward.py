"""Gradients of everything that has one, against float64 autograd of the oracle."""

from __future__ import annotations

import cases
import oracle
import pytest
import torch

import xattn

each_target = pytest.mark.parametrize("target", cases.targets(), ids=str)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
each_kind = pytest.mark.parametrize("kind", ["attention", "varlen"])


def random(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed + 1000 * sum(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def made(kind, dtype=torch.float32, heads=(4, 2), d=16, lens_q=(5, 0, 3), lens_k=(7, 4, 0), spare=0):
    """(tensors, other arguments): dense (2, 5) queries over 7 keys, or packed sequences with NaN behind them."""
    widths = (heads[0], heads[1], heads[1])
    if kind == "attention":
        q, k, v = (
            random(2, n, h, d, dtype=dtype, seed=s) for s, (n, h) in enumerate(zip((5, 7, 7), widths, strict=True))
        )
        return {"q": q, "k": k, "v": v}, {}
    rows = (sum(lens_q), sum(lens_k), sum(lens_k))
    t = {
        n: random(r + spare, h, d, dtype=dtype, seed=s)
        for s, (n, r, h) in enumerate(zip("qkv", rows, widths, strict=True))
    }
    for n, r in zip("qkv", rows, strict=True):
        t[n][r:] = torch.nan
    for side, lens in (("q", lens_q), ("k", lens_k)):
        t[f"cu_seqlens_{side}"] = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    return t, {"max_seqlen_q": max(lens_q), "max_seqlen_k": max(lens_k)}


def leaves_of(tensors, wants):
    return {
        n: x.detach().clone(memory_format=torch.preserve_format).requires_grad_(n in wants) for n, x in tensors.items()
    }


def checked(target, kind, tensors, wants=("q", "k", "v"), other=None):
    """Runs and measures the call with its gradients; the gradients by name, None where the target refuses."""
    call = cases.Call(kind, dict(tensors), dict(other or {}), tuple(wants))
    cases.check(call, target)
    leaves = leaves_of(tensors, wants)
    args, kwargs = call.arguments(leaves)
    if not xattn.supported(*args, kind=kind, backend=target.backend, **kwargs):
        assert target.backend != "reference"
        return None
    result = cases.FUNCTIONS[kind](*args, backend=target.backend, **kwargs)
    out = result[0] if kwargs.get("return_lse") else result
    grads = torch.autograd.grad(out.square().sum(), [leaves[n] for n in wants], allow_unused=True)
    return dict(zip(wants, grads, strict=True))


@each_target
@each_kind
@each_dtype
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_q_k_v(target, kind, dtype, heads, causal, return_lse):
    tensors, other = made(kind, dtype, heads)
    grads = checked(target, kind, tensors, other={**other, "causal": causal, "return_lse": return_lse})
    assert grads is None or all(g.ne(0).any() for g in grads.values())


MASKS = [(a, b, c, d) for a in (1, 2) for b in (1, 4) for c in (1, 5) for d in (1, 7)] + [
    (5, 7),
    (7,),
    (1,),
    (4, 1, 1),
    (),
]


@each_target
@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attn_mask(target, shape, dtype):
    tensors, _ = made("attention", dtype)
    tensors["attn_mask"] = random(*shape, dtype=dtype)
    if shape == (2, 4, 5, 7):
        tensors["attn_mask"][:, :, 1] = -torch.inf
    grads = checked(target, "attention", tensors, ("q", "k", "v", "attn_mask"), {"causal": True})
    if grads is not None:
        assert grads["attn_mask"].shape == shape
        if shape == (2, 4, 5, 7):
            assert (grads["attn_mask"][:, :, 1] == 0).all() and (grads["q"][:, 1] == 0).all()


@each_target
@each_kind
@pytest.mark.parametrize("name", ["alibi h", "alibi bh", "sinks", "q_scale", "k_scale", "v_scale", "scales bh", "all"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_small_tensors(target, kind, name, return_lse):
    tensors, other = made(kind)
    batch = 2 if kind == "attention" else 3
    small = {
        "alibi h": {"alibi_slopes": random(4).abs()},
        "alibi bh": {"alibi_slopes": random(batch, 4).abs()},
        "sinks": {"sinks": random(4)},
        **{n: {n: torch.tensor(0.7)} for n in ("q_scale", "k_scale", "v_scale")},
        "scales bh": {n: random(batch, 2, seed=i).abs() + 0.1 for i, n in enumerate(("q_scale", "k_scale", "v_scale"))},
    }
    small["all"] = small["alibi bh"] | small["sinks"] | small["scales bh"]
    wants = ("q", "k", "v", *small[name])
    grads = checked(
        target, kind, {**tensors, **small[name]}, wants, {**other, "return_lse": return_lse, "causal": True}
    )
    assert grads is None or all(grads[n].ne(0).any() for n in small[name])


@each_target
@each_kind
@pytest.mark.parametrize("role", ["score_mod", "epilogue", "both"])
def test_captured_tensors(target, kind, role):
    tensors, other = made(kind)
    wants = ["q", "k", "v"]
    if role != "epilogue":
        tensors["score_mod"], other["score_mod"] = 0.1 * random(4), "captured"
        wants.append("score_mod")
    if role != "score_mod":
        tensors["epilogue"], other["epilogue"] = random(4, 16), "captured"
        wants.append("epilogue")
    grads = checked(target, kind, tensors, wants, other)
    assert grads is None or all(g.ne(0).any() for g in grads.values())


@each_target
@each_kind
@pytest.mark.parametrize("form", ["sum", "expanded", "transposed", "every 2nd"])
def test_strides_of_dout(target, kind, form):
    tensors, other = made(kind)
    leaves = leaves_of(tensors, "qkv")
    args, kwargs = cases.Call(kind, tensors, other).arguments(leaves)
    out = cases.FUNCTIONS[kind](*args, causal=True, backend=target.backend, **kwargs)
    dout = {
        "sum": torch.ones(()).expand(out.shape),
        "expanded": random(*out.shape[:-1], 1).expand(out.shape),
        "transposed": random(*reversed(out.shape)).permute(*reversed(range(out.dim()))),
        "every 2nd": random(*out.shape[:-1], 2 * out.shape[-1])[..., ::2],
    }[form]
    assert not dout.is_contiguous()
    grads = torch.autograd.grad(out, args[:3], dout)
    found = []
    for dtype in (torch.float64, torch.float32):
        x = {n: y.to(dtype) if y.is_floating_point() else y for n, y in tensors.items()}
        call = cases.Call(kind, x, other, ("q", "k", "v"))
        truth = cases.ORACLES[kind]
        x = leaves_of(x, "qkv")
        args, kwargs = call.arguments(x)
        found.append(torch.autograd.grad(truth(*args, causal=True, **kwargs)[0], args[:3], dout.to(dtype)))
    for name, got, true, plain in zip("qkv", grads, *found, strict=True):
        oracle.assert_close(name, got, true, plain, found[0])


@each_target
@each_kind
@pytest.mark.parametrize("case", ["plain", "causal", "window", "mask", "lengths"])
def test_gradcheck(target, kind, case):
    tensors, other = made(kind, torch.float64, (2, 1), 4)
    if case == "mask":
        tensors["attn_mask"] = random(5, 7, dtype=torch.float64) > -0.5
    if case == "lengths":
        tensors["seqused_k"] = torch.tensor([7, 3] if kind == "attention" else [6, 1, 0])
    how = {"causal": {"causal": True}, "window": {"window": (1, 2)}}.get(case, {})
    args, kwargs = cases.Call(kind, tensors, other).arguments(tensors)
    rest = args[3:]

    def fn(q, k, v):
        return cases.FUNCTIONS[kind](q, k, v, *rest, backend=target.backend, **how, **kwargs)

    leaves = [x.clone().requires_grad_() for x in args[:3]]
    assert torch.autograd.gradcheck(fn, leaves)
    if target.backend == "reference":
        assert torch.autograd.gradgradcheck(fn, leaves, fast_mode=True)


@each_target
@each_dtype
@pytest.mark.parametrize("how", ["mask", "causal", "lengths"])
def test_empty_rows_have_no_gradient(target, dtype, how):
    tensors, _ = made("attention", dtype)
    other = {"causal": True}
    if how == "causal":
        tensors["k"], tensors["v"] = tensors["k"][:, :3], tensors["v"][:, :3]
    if how == "mask":
        tensors["attn_mask"] = torch.ones(5, 7, dtype=torch.bool)
        tensors["attn_mask"][:2] = False
    if how == "lengths":
        tensors["seqused_k"] = torch.tensor([0, 7])
        tensors["k"][0], tensors["v"][0] = torch.nan, torch.nan
    grads = checked(target, "attention", tensors, other=other)
    if how == "lengths":
        assert all((g[0] == 0).all() for g in grads.values())
    else:
        assert (grads["q"][:, :2] == 0).all() and grads["q"][:, 3:].ne(0).any()


@each_target
@each_dtype
@pytest.mark.parametrize("gap", [torch.nan, torch.inf])
def test_nan_outside_never_reaches_a_gradient(target, dtype, gap):
    tensors, other = made("varlen", dtype, spare=3)
    tensors["seqused_k"] = torch.tensor([5, 2, 0], dtype=torch.int32)
    for n in ("k", "v"):
        tensors[n][5:7], tensors[n][9:11], tensors[n][11:] = gap, gap, gap
    grads = checked(target, "varlen", tensors, other={**other, "causal": True})
    assert all(g.isfinite().all() for g in grads.values())
    assert (grads["q"][8:] == 0).all() and (grads["k"][5:7] == 0).all() and (grads["v"][9:] == 0).all()
    tensors, _ = made("attention", dtype)
    tensors["seqused_k"] = torch.tensor([4, 1])
    for n in ("k", "v"):
        tensors[n][0, 4:], tensors[n][1, 1:] = gap, gap
    grads = checked(target, "attention", tensors)
    assert all(g.isfinite().all() for g in grads.values()) and (grads["k"][1, 1:] == 0).all()


@each_target
@each_kind
@pytest.mark.parametrize("switch", ["argument", "torch"])
def test_deterministic_backward(target, kind, switch):
    tensors, other = made(kind, torch.bfloat16, (6, 2))
    leaves = leaves_of(tensors, "qkv")
    args, kwargs = cases.Call(kind, tensors, other).arguments(leaves)
    seen = []
    torch.use_deterministic_algorithms(switch == "torch")
    try:
        for _ in range(10):
            how = {"deterministic": True} if switch == "argument" else {}
            out = cases.FUNCTIONS[kind](*args, causal=True, backend=target.backend, **how, **kwargs)
            seen.append(torch.autograd.grad(out.square().sum(), args[:3]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for grads in seen for a, b in zip(grads, seen[0], strict=True))


@each_target
@each_kind
@pytest.mark.parametrize("wants", ["q", "k", "v", "qk", "kv", "qv"])
def test_only_what_is_asked_for_is_computed(target, kind, wants, monkeypatch):
    """The backward op is told what is wanted, gives that and no more, and gives the bits that it gives with all."""
    tensors, other = made(kind)
    every = checked(target, kind, tensors, other=other)
    some = checked(target, kind, tensors, tuple(wants), other)
    for name in wants:
        torch.testing.assert_close(some[name], every[name])
    asked = []
    plain = xattn.ops.backward

    def counted(inputs, needs_grad, wanted, *rest):
        grads = plain(inputs, needs_grad, wanted, *rest)
        asked.append(([n for (n, _), w in zip(inputs.differentiable(), wanted, strict=True) if w], len(grads)))
        return grads

    monkeypatch.setattr(xattn.ops, "backward", counted)
    leaves = leaves_of(tensors, wants)
    args, kwargs = cases.Call(kind, tensors, other).arguments(leaves)
    cases.FUNCTIONS[kind](*args, backend=target.backend, **kwargs).sum().backward()
    assert asked == [(list(wants), len(wants))]
    assert all((leaves[n].grad is not None) == (n in wants) for n in "qkv")


@each_target
@each_kind
def test_lse_alone_and_out_alone(target, kind):
    tensors, other = made(kind)
    leaves = leaves_of(tensors, "qkv")
    args, kwargs = cases.Call(kind, tensors, other).arguments(leaves)
    if not xattn.supported(*args, kind=kind, return_lse=True, backend=target.backend, **kwargs):
        with pytest.raises(xattn.UnsupportedError, match="lse"):
            cases.FUNCTIONS[kind](*args, return_lse=True, backend=target.backend, **kwargs)
        return
    out, lse = cases.FUNCTIONS[kind](*args, return_lse=True, backend=target.backend, **kwargs)
    seen = torch.where(lse.isfinite(), lse, 0)
    both = torch.autograd.grad(out.sum() + seen.sum(), args[:3], retain_graph=True)
    of_out = torch.autograd.grad(out.sum(), args[:3], retain_graph=True)
    of_lse = torch.autograd.grad(seen.sum(), args[:3], retain_graph=True, allow_unused=True)
    for a, b, c in zip(both, of_out, of_lse, strict=True):
        torch.testing.assert_close(a, b + (0 if c is None else c))
    assert of_lse[0].ne(0).any() and of_lse[1].ne(0).any()
