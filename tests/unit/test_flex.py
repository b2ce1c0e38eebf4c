"""The FlexAttention backend in its eager form, its refusals, and what happens when it turns out not to work."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import xattn
from xattn import dispatch, fusion, ops
from xattn.backends import REGISTRY, base, flex
from xattn.backends.base import Unavailable
from xattn.device import Device, from_arch
from xattn.inputs import Inputs
from xattn.problem import Problem, SizeBucket

BATCH, HEADS = 2, 4
CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(
    seqlen_q=37, seqlen_k=37, heads_kv=HEADS, dim=16, dim_v=16, score_mod=None, mask_mod=None, **options
) -> Inputs:
    q = randn(BATCH, seqlen_q, HEADS, dim, seed=1)
    k, v = (randn(BATCH, seqlen_k, heads_kv, d, seed=n) for n, d in ((2, dim), (3, dim_v)))
    window = options.pop("window", (None, None))
    options |= {"window_left": window[0], "window_right": window[1], "return_lse": True}
    for role, fn in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if fn is not None:
            options[role], options[f"{role}_aux"] = fusion.trace(role, fn, CPU)
    return ops.record("attention", (q, k, v), options)


def captured():
    table = randn(HEADS, 60, seed=6)
    return lambda score, b, h, q_idx, kv_idx: score * table[h, q_idx] + table[h, kv_idx]


def documents():
    ids = torch.arange(60) // 7 % 3
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) | (kv_idx == h)


def never(b, h, q_idx, kv_idx):
    return q_idx < 5


SLOPES = 2.0 ** -torch.arange(1, HEADS + 1)
CASES = {
    "window": {"window": (5, 0)},
    "window to the left": {"window": (5, None)},
    "window to the right": {"window": (None, 3)},
    "window of nothing but the diagonal": {"window": (0, 0)},
    "window, fewer queries": {"window": (5, 3), "seqlen_q": 11},
    "window, more queries": {"window": (5, 3), "seqlen_q": 53},
    "causal, fewer queries": {"causal": True, "window": (20, None), "seqlen_q": 11},
    "causal, more queries": {"causal": True, "window": (20, None), "seqlen_q": 53},
    "causal and a window to the right": {"causal": True, "window": (None, 4)},
    "softcap": {"softcap": 1.5},
    "softcap, causal": {"softcap": 1.5, "causal": True},
    "ALiBi": {"alibi_slopes": SLOPES},
    "ALiBi by batch, fewer queries": {"alibi_slopes": torch.stack([SLOPES, 3 * SLOPES]), "seqlen_q": 11},
    "seqused_k": {"seqused_k": torch.tensor([0, 29]), "softcap": 2.0},
    "seqused_k, causal": {"seqused_k": torch.tensor([13, 37]), "causal": True, "window": (9, None)},
    "seqused_k, int32, ALiBi": {"seqused_k": torch.tensor([13, 37], dtype=torch.int32), "alibi_slopes": SLOPES},
    "score_mod": {"score_mod": captured()},
    "score_mod, causal": {"score_mod": captured(), "causal": True},
    "mask_mod": {"mask_mod": documents()},
    "mask_mod, window, score_mod": {"mask_mod": documents(), "window": (19, 2), "score_mod": captured()},
    "empty rows": {"mask_mod": never},
    "GQA": {"heads_kv": 2, "window": (5, None)},
    "MQA": {"heads_kv": 1, "softcap": 2.0, "causal": True},
    "head_dim_v": {"dim": 32, "dim_v": 16, "window": (5, None)},
    "scale": {"softmax_scale": 0.7, "softcap": 2.0},
    "everything": {
        "causal": True, "window": (23, 5), "softcap": 3.0, "alibi_slopes": SLOPES, "score_mod": captured(),
        "mask_mod": documents(), "seqused_k": torch.tensor([31, 37]), "heads_kv": 2, "softmax_scale": 0.4,
        "seqlen_q": 20,
    },
}  # fmt: skip


def by_reference(x: Inputs) -> tuple[Tensor, Tensor]:
    return dispatch.get("reference").run(x, ())


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def _nothing_kept():
    """Compiled forms hold the functions of the test that made them."""
    yield
    flex._functions.cache_clear()


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    x = inputs(**CASES[name])
    out, lse = flex._attend(x, x.q, x.k, x.v, compiled=False)
    wanted, wanted_lse = by_reference(x)
    assert out.is_contiguous() and out.shape == x.out_shape and lse.shape == x.lse_shape
    close(out, wanted)
    close(lse, wanted_lse)


def test_backward_gives_what_is_wanted(monkeypatch):
    """The forward again, and its gradients, of lse as well. FlexAttention has none on CPUs: attention is written
    out."""
    x = inputs(seqlen_q=7, seqlen_k=9)

    def attend(x, q, k, v):
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * x.scale
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)

    monkeypatch.setattr(flex, "_attend", attend)
    out, lse = by_reference(x)
    dout, dlse = randn(*out.shape, seed=7), randn(*lse.shape, seed=8)
    for names in (("q", "k", "v"), ("k",), ("q", "v")):
        wanted = [n in names for n, _ in x.differentiable()]
        for grad in (None, dlse):
            with torch.no_grad():
                got = flex._backward(x, (), out, lse, dout, grad, wanted)
            reference = dispatch.get("reference").backward(x, (), out, lse, dout, grad, wanted)
            assert len(got) == len(names)
            for one, other in zip(got, reference, strict=True):
                close(one, other)
    assert not any(t.requires_grad for t in (x.q, x.k, x.v))


def test_run_records_no_gradient(monkeypatch):
    monkeypatch.setattr(flex, "_attend", lambda x, q, k, v: (q * 2, k * 2))
    x = inputs(window=(5, None))
    x.k.requires_grad_()
    assert not any(t.requires_grad for t in flex._run(x, ()))


def test_numbers_and_tensors_make_no_new_function():
    """Window, softcap, scale and captured tensors are arguments: one function for all their values."""
    for n in range(3):
        table = randn(HEADS, 60, seed=n)
        x = inputs(
            window=(5 + n, None),
            softcap=2.0 + n,
            softmax_scale=0.3 + n,
            score_mod=lambda s, b, h, i, j, t=table: s * t[h, j],
        )
        x = replace(x, score_mod=replace(x.score_mod, element=_same_element(x)))
        close(flex._attend(x, x.q, x.k, x.v, compiled=False)[0], by_reference(x)[0])
    assert flex._functions.cache_info().currsize == 1


_elements: dict[str, object] = {}


def _same_element(x: Inputs):
    """The first traced form of that key: what ``fusion.lookup`` gives where a call is repeated."""
    return _elements.setdefault(x.score_mod.key, x.score_mod.element)


# ---------------------------------------------------------------- what it refuses
PLAIN = Problem(window=True)
SIZE = SizeBucket.of(2, 8, 512, 512)
ABSENT = from_arch("sm_90")
PRESENT = replace(ABSENT, index=0)
REFUSED = {
    "vendor": ({}, "vendor"),
    "plain": ({"window": False, "causal": True, "gqa_ratio": 4}, "plain"),
    "kind": ({"kind": "varlen"}, "kind"),
    "paged": ({"kind": "paged", "page_size": 16, "kv_layout": "NHD"}, "kind"),
    "fp64": ({"dtype": "fp64", "dtype_kv": "fp64", "dtype_out": "fp64"}, "dtype"),
    "fp8": ({"dtype_kv": "fp8_e4m3"}, "dtype"),
    "dtype_out": ({"dtype_out": "fp32"}, "dtype_out"),
    "head_dim 8": ({"head_dim": 8}, "head_dim"),
    "head_dim 288": ({"head_dim": 288}, "head_dim"),
    "head_dim 20": ({"head_dim": 20}, "head_dim"),
    "head_dim_v 8": ({"head_dim_v": 8}, "head_dim_v"),
    "dropout": ({"dropout": True}, "feature"),
    "sinks": ({"sinks": True}, "feature"),
    "epilogue": ({"epilogue": "epilogue"}, "feature"),
    "attn_mask": ({"attn_mask": "additive"}, "feature"),
    "scales": ({"scales": True}, "feature"),
    "gradient of slopes": ({"alibi_slopes": True, "grads": ("q", "alibi_slopes")}, "grad"),
    "gradient of what a score_mod holds": ({"score_mod": "score_mod", "grads": ("score_mod_aux",)}, "grad"),
    "deterministic": ({"grads": ("q",), "deterministic": True}, "deterministic"),
}


def refusals(problem: Problem, size: SizeBucket = SIZE, device: Device = ABSENT):
    return flex.BACKEND.check(problem, size, device)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    changes, code = REFUSED[name]
    device = from_arch("cpu") if name == "vendor" else ABSENT
    found = refusals(replace(PLAIN, **changes), device=device)
    assert [r.code for r in found] == [code], found
    assert all(str(r) for r in found)


@pytest.mark.parametrize("feature", ["window", "softcap", "alibi_slopes", "score_mod", "mask_mod"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_120", "gfx942", "gfx1100"])
def test_answers(feature, arch):
    problem = replace(Problem(), **{feature: "x" if feature.endswith("mod") else True})
    assert refusals(problem, device=from_arch(arch)) == ()
    more = replace(
        problem, causal=True, seqused_k=True, gqa_ratio=4, grads=("q", "k", "v"), return_lse=True, head_dim_v=64
    )
    assert refusals(more, device=from_arch(arch)) == ()


@pytest.mark.parametrize("lengths", [(0, 8, 512, 512), (2, 8, 0, 512), (2, 8, 512, 0)])
def test_refuses_empty_tensors(lengths):
    assert [r.code for r in refusals(PLAIN, SizeBucket.of(*lengths))] == ["size"]
    assert refusals(PLAIN, SizeBucket.of(1, 1, 1, 1)) == ()


def test_needs_triton_where_it_would_run(monkeypatch):
    """On a device of this machine; of another one nothing is known."""
    from xattn import capability

    monkeypatch.setattr(capability, "find_spec", lambda name, package=None: None)
    if hasattr(capability, "_installed"):
        capability._installed.cache_clear()
    try:
        found = refusals(PLAIN, device=PRESENT)
        assert [(r.code, r.field, r.got) for r in found] == [("missing", "module", "triton")]
        assert refusals(PLAIN, device=ABSENT) == ()
    finally:
        if hasattr(capability, "_installed"):
            capability._installed.cache_clear()


def test_says_that_it_compiles():
    plan = dispatch.plan(PLAIN, SIZE, from_arch("gfx1300"))
    assert plan.backend == "flex" and not plan.native
    assert "compiled by torch.compile at the first call" in str(plan)


# ---------------------------------------------------------------- a backend that turns out not to work
@pytest.fixture
def planner(monkeypatch):
    """The planner's state, put back afterwards."""
    for name in ("_plans", "_told"):
        monkeypatch.setattr(dispatch, name, type(getattr(dispatch, name))())
    monkeypatch.setattr(base, "_unavailable", {})
    return monkeypatch


def fake(run, name: str = "fake"):
    """A backend that says it can do what the reference can."""
    return replace(dispatch.get("reference"), name=name, run=run)


def test_a_backend_that_gives_up_is_replaced(planner, caplog):
    calls = []

    def run(x, config):
        calls.append(x)
        raise Unavailable("no compiler for this device")

    backend = fake(run)
    planner.setattr(dispatch, "REGISTRY", (backend, *REGISTRY))
    assert dispatch.REGISTRY[0].name == "fake"
    q = randn(1, 3, 2, 16)
    wanted = xattn.attention(q, q, q, backend="sdpa")
    with caplog.at_level(logging.WARNING, logger="xattn"):
        assert torch.equal(xattn.attention(q, q, q), wanted)
    [record] = caplog.records
    assert record.getMessage().startswith("backend fake is not asked any more for attention, fp32, head_dim 16 on ")
    assert record.getMessage().endswith(": no compiler for this device")
    caplog.clear()
    assert torch.equal(xattn.attention(q, q, q), wanted)
    assert len(calls) == 1 and not caplog.records, "it was asked again"
    here, problem = xattn.device.of(q.device), xattn.explain(q, q, q).problem
    [refusal] = backend.check(problem, SizeBucket(), here)
    assert (refusal.code, refusal.got) == ("failed", "no compiler for this device")
    assert backend.check(problem, SizeBucket(), from_arch("sm_90")) == (), "another device was given up as well"
    assert backend.check(replace(problem, causal=True), SizeBucket(), here) == (), (
        "another problem was given up as well"
    )


def test_asked_for_by_name_it_does_not_fall_back(planner):
    def run(x, config):
        raise Unavailable("no compiler")

    planner.setattr(dispatch, "REGISTRY", (fake(run), *REGISTRY))
    q = randn(1, 3, 2, 16)
    with pytest.raises(xattn.UnsupportedError, match="(?s)backend 'fake' does not answer.*no compiler") as caught:
        xattn.attention(q, q, q, backend="fake")
    assert list(caught.value.rejected) == ["fake"]


def test_other_errors_are_not_taken_for_it(planner):
    def run(x, config):
        raise RuntimeError("a bug")

    planner.setattr(dispatch, "REGISTRY", (fake(run), *REGISTRY))
    q = randn(1, 3, 2, 16)
    with pytest.raises(RuntimeError, match="a bug"):
        xattn.attention(q, q, q, backend="fake")
    assert not base._unavailable


def test_only_errors_of_the_compiler_are_unavailability(monkeypatch):
    """An error of torch.compile drops the backend; any other is the caller's."""
    x = inputs(window=(5, None))

    def failing(error):
        def functions(*args):
            def fail(*args):
                raise error

            return fail, fail

        return functions

    from torch._dynamo.exc import InternalTorchDynamoError

    monkeypatch.setattr(flex, "_functions", failing(InternalTorchDynamoError("cannot\nbe compiled")))
    with pytest.raises(Unavailable, match="^torch.compile of FlexAttention failed: cannot$"):
        flex._attend(x, x.q, x.k, x.v)
    with pytest.raises(InternalTorchDynamoError):
        flex._attend(x, x.q, x.k, x.v, compiled=False)
    monkeypatch.setattr(flex, "_functions", failing(torch.OutOfMemoryError("no memory")))
    with pytest.raises(torch.OutOfMemoryError):
        flex._attend(x, x.q, x.k, x.v)
