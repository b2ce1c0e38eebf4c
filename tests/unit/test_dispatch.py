"""Plans: which backend answers what, why the others do not, and what is said about it. Devices are made up."""

from __future__ import annotations

import json
import logging
import warnings
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch

import xattn
from xattn import dispatch
from xattn.backends import REGISTRY, Backend, base
from xattn.capability import CODES, Capability, HeadDims, Refusal, check
from xattn.device import Device, from_arch
from xattn.problem import FEATURES, GRADS, KINDS, Problem, SizeBucket

ARCHS = ("cpu", "sm_80", "sm_86", "sm_90", "sm_100", "sm_130", "gfx90a", "gfx942", "gfx950", "gfx1201", "gfx1399")
SIZE = SizeBucket(2, 8, 128, 128)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(dispatch, "_plans", OrderedDict())
    monkeypatch.setattr(dispatch, "_told", set())
    monkeypatch.setattr(base, "_unavailable", {})


# ---------------------------------------------------------------- refusals, one for each code
EVERYTHING = Capability(
    vendors=frozenset({"nvidia"}),
    kinds=frozenset(KINDS),
    dtypes=frozenset({("bf16", "bf16"), ("bf16", "fp8_e4m3")}),
    features=frozenset(FEATURES),
    grads=frozenset(GRADS),
)
H200 = from_arch("sm_90")
REFUSALS = {
    "vendor": (EVERYTHING, Problem(), SIZE, from_arch("gfx942"), Refusal("vendor", "vendor", "amd", ("nvidia",))),
    "arch": (
        replace(EVERYTHING, archs=frozenset({"sm_80"})),
        Problem(),
        SIZE,
        H200,
        Refusal("arch", "arch", "sm_90", ("sm_80",)),
    ),
    "kind": (
        replace(EVERYTHING, kinds=frozenset({"paged", "attention"})),
        Problem(kind="varlen"),
        SIZE,
        H200,
        Refusal("kind", "kind", "varlen", ("attention", "paged")),
    ),
    "missing": (
        replace(EVERYTHING, needs=frozenset({"a_module_that_is_not_there"})),
        Problem(),
        SIZE,
        replace(H200, index=0),
        Refusal("missing", "module", "a_module_that_is_not_there", ("installed",)),
    ),
    "size": (
        replace(EVERYTHING, nonempty=True),
        Problem(),
        SizeBucket(2, 8, 0, 128),
        H200,
        Refusal("size", "batch, seqlen_q, seqlen_k", (2, 0, 128), ("from 1",)),
    ),
    "layout": (
        replace(EVERYTHING, as_it_lies=frozenset({"attention"})),
        Problem(direct=False),
        SIZE,
        H200,
        Refusal("layout", "strides of q, k or v", "given", ("vectors at multiples of 16 bytes",)),
    ),
    "dtype": (
        EVERYTHING,
        Problem(dtype="fp32", dtype_kv="fp32", dtype_out="fp32"),
        SIZE,
        H200,
        Refusal("dtype", "dtype", "fp32/fp32", ("bf16/bf16", "bf16/fp8_e4m3")),
    ),
    "dtype_out": (
        EVERYTHING,
        Problem(dtype_out="int8"),
        SIZE,
        H200,
        Refusal("dtype_out", "out_dtype", "int8", ("bf16",)),
    ),
    "head_dim": (
        replace(EVERYTHING, head_dim=HeadDims(smallest=16, largest=256, multiple_of=8)),
        Problem(head_dim=12, head_dim_v=12),
        SIZE,
        H200,
        Refusal("head_dim", "head_dim", 12, (HeadDims(16, 256, 8),)),
    ),
    "head_dim_v": (
        replace(EVERYTHING, same_head_dim=True),
        Problem(head_dim=192),
        SIZE,
        H200,
        Refusal("head_dim_v", "head_dim_v", 128, (192,)),
    ),
    "feature": (
        replace(EVERYTHING, features=frozenset({"window", "causal"})),
        Problem(causal=True, sinks=True),
        SIZE,
        H200,
        Refusal("feature", "sinks", "given", ("causal", "window")),
    ),
    "operation": (
        replace(EVERYTHING, lowers=True),
        Problem(mask_mod="mask_mod:1", unlowered=(("mask_mod", "erfinv (model.py:7)"),)),
        SIZE,
        H200,
        Refusal("operation", "mask_mod", "erfinv (model.py:7)", ("see help(xattn.attention)",)),
    ),
    "grad": (
        replace(EVERYTHING, grads=frozenset({"v", "q"})),
        Problem(grads=("q", "k")),
        SIZE,
        H200,
        Refusal("grad", "k", "gradient asked for", ("q", "v")),
    ),
    "deterministic": (
        replace(EVERYTHING, deterministic=False),
        Problem(grads=("q",), deterministic=True),
        SIZE,
        H200,
        Refusal("deterministic", "deterministic", True, (False,)),
    ),
    "plain": (
        replace(EVERYTHING, only_with=frozenset({"window", "score_mod"})),
        Problem(causal=True),
        SIZE,
        H200,
        Refusal("plain", "features", "causal", ("window", "score_mod")),
    ),
}


def test_every_code_has_a_case():
    # "large": test_too_large.py; "slower": below, of two backends
    assert {*REFUSALS, "failed", "large", "slower"} == set(CODES)


@pytest.mark.parametrize("code", REFUSALS)
def test_refusal(code):
    capability, problem, size, device, wanted = REFUSALS[code]
    assert check(problem, size, device, capability) == (wanted,)
    assert CODES[code] in str(wanted) and str(wanted.got) in str(wanted)
    assert all(str(n) in str(wanted) for n in wanted.allowed)
    assert json.dumps(wanted.as_dict())


def test_all_refusals_are_listed():
    problem = Problem(dtype="fp64", dtype_kv="fp64", head_dim=300, sinks=True, softcap=True, grads=("k", "sinks"))
    able = replace(EVERYTHING, head_dim=HeadDims(largest=256), features=frozenset(), grads=frozenset({"q"}))
    found = check(problem, SIZE, H200, able)
    fields = ["dtype", "out_dtype", "head_dim", "softcap", "sinks", "k", "sinks"]
    assert [r.field for r in found] == fields


def test_a_device_that_is_only_talked_about_misses_nothing():
    assert check(Problem(), SIZE, H200, replace(EVERYTHING, needs=frozenset({"a_module_that_is_not_there"}))) == ()


def test_a_module_of_a_package_that_is_not_there_is_missing():
    able = replace(EVERYTHING, needs=frozenset({"a_package_that_is_not_there.module"}))
    assert [r.code for r in check(Problem(), SIZE, replace(H200, index=0), able)] == ["missing"]


def test_a_backend_that_failed_is_not_asked_again():
    problem = Problem(dtype="fp64", dtype_kv="fp64", dtype_out="fp64")
    first = dispatch.cached_plan(problem, SIZE, from_arch("cpu"))
    dispatch.give_up(first, "it crashed")
    second = dispatch.cached_plan(problem, SIZE, from_arch("cpu"))
    assert second.backend != first.backend
    assert dict(second.rejected)[first.backend] == (Refusal("failed", "device", "it crashed"),)
    assert dispatch.cached_plan(replace(problem, causal=True), SIZE, from_arch("cpu")).backend == first.backend


@pytest.mark.parametrize("backend", REGISTRY, ids=lambda b: b.name)
@pytest.mark.parametrize("arch", ARCHS)
def test_refusals_of_the_registry_are_well_formed(backend, arch):
    """Each boundary value of a problem is admitted, or refused with a known code and in words."""
    device = from_arch(arch)
    for values in (
        {},
        *({"kind": kind} for kind in KINDS),
        *({"dtype": d, "dtype_kv": d, "dtype_out": d} for d in ("fp64", "fp32", "fp16", "fp8_e4m3")),
        *({"head_dim": d, "head_dim_v": d} for d in (1, 7, 8, 40, 64, 256, 264, 576)),
        *({name: True} for name in FEATURES if name in Problem.__dataclass_fields__ and name != "return_lse"),
        *({"attn_mask": form} for form in ("bool", "additive")),
        *({"grads": (name,)} for name in GRADS),
    ):
        for refusal in backend.check(Problem(**values), SIZE, device):
            assert refusal.code in CODES and str(refusal)


# ---------------------------------------------------------------- plans
def backend(name: str, native: bool = False, **capability) -> Backend:
    return Backend(name, native, lambda: (replace(EVERYTHING, **capability),), config=lambda p, s, d: (("tile", 64),))


TOY = (
    backend(
        "first", native=True, kinds=frozenset({"attention"}), archs=frozenset({"sm_90"}), features=frozenset({"causal"})
    ),
    backend("second", vendors=frozenset({"nvidia", "amd"}), features=frozenset({"causal", "sinks"})),
    backend(
        "last", vendors=frozenset({"nvidia", "amd", "cpu"}), dtypes=frozenset({("bf16", "bf16"), ("fp32", "fp32")})
    ),
)


@pytest.mark.parametrize(
    "arch, problem, chosen, rejected",
    [
        ("sm_90", {}, "first", {}),
        ("sm_90", {"causal": True}, "first", {}),
        ("sm_90", {"sinks": True}, "second", {"first": ["feature"]}),
        ("sm_90", {"kind": "varlen", "softcap": True}, "last", {"first": ["kind"], "second": ["feature"]}),
        ("sm_130", {}, "second", {"first": ["arch"]}),
        ("gfx942", {}, "second", {"first": ["vendor"]}),
        ("gfx942", {"softcap": True, "sinks": True}, "last", {"first": ["vendor"], "second": ["feature"]}),
        ("cpu", {}, "last", {"first": ["vendor"], "second": ["vendor"]}),
        ("cpu", {"dtype_kv": "fp8_e4m3"}, None, {"first": ["vendor"], "second": ["vendor"], "last": ["dtype"]}),
    ],
)  # fmt: skip
def test_plan(arch, problem, chosen, rejected):
    found = dispatch.plan(Problem(**problem), SIZE, from_arch(arch), TOY)
    assert found.backend == chosen
    assert {name: [r.code for r in refusals] for name, refusals in found.rejected} == rejected
    assert found.native == (chosen == "first")
    assert found.config == ((("tile", 64),) if chosen else ())
    assert all(str(r) in str(found) for _, refusals in found.rejected for r in refusals)
    assert json.dumps(found.as_dict())
    assert found == dispatch.plan(Problem(**problem), SIZE, from_arch(arch), TOY)
    assert hash(found) == hash(dispatch.plan(Problem(**problem), SIZE, from_arch(arch), TOY))


def test_an_explicit_backend_never_falls_back():
    assert dispatch.plan(Problem(), SIZE, H200, TOY, "last").backend == "last"
    found = dispatch.plan(Problem(sinks=True), SIZE, H200, TOY, "first")
    assert found.backend is None and [name for name, _ in found.rejected] == ["first"]
    with pytest.raises(ValueError, match=r"backend: got 'nosuch'; allowed: first, second, last"):
        dispatch.plan(Problem(), SIZE, H200, TOY, "nosuch")


def test_a_backend_yields_to_one_that_is_faster():
    """Where that one answers, and nobody was named."""
    yielding = replace(backend("first", native=True), yields=lambda problem: "second" if problem.causal else "")
    registry = (yielding, *TOY[1:])
    found = dispatch.plan(Problem(causal=True), SIZE, H200, registry)
    assert found.backend == "second"
    assert found.rejected == (("first", (Refusal("slower", "backend", "first", ("second",)),)),)
    assert "first: backend = first: another backend is faster here (allowed: second)" in str(found)
    assert dispatch.plan(Problem(), SIZE, H200, registry).backend == "first"
    assert dispatch.plan(Problem(causal=True, softcap=True), SIZE, H200, registry).backend == "first"
    assert dispatch.plan(Problem(causal=True), SIZE, H200, registry, "first").backend == "first"


@pytest.mark.parametrize("arch, native", [("sm_80", "sm80"), ("sm_90", "sm90"), ("gfx942", "cdna")])
def test_who_answers_gradients(arch, native):
    """torch's fused backward what it has, but what Hopper's own has; native kernels the rest."""

    def chosen(**fields) -> str | None:
        problem = Problem(grads=("q", "k", "v"), **fields)
        return dispatch.plan(problem, SIZE, from_arch(arch)).backend

    for plain in ({}, {"causal": True}, {"gqa_ratio": 4}, {"attn_mask": "bool"}):
        own = arch == "sm_90" and "attn_mask" not in plain
        assert chosen(**plain) == (native if own else "sdpa")
        assert chosen(**plain, head_dim=256, head_dim_v=256) == "sdpa"
        assert dispatch.plan(Problem(**plain), SIZE, from_arch(arch)).backend == native
        assert dispatch.plan(Problem(grads=("q",), **plain), SIZE, from_arch(arch), backend=native).backend == native
    for other in ("softcap", "alibi_slopes", "sinks", "window", "return_lse", "deterministic", "seqused_k", "dropout"):
        assert chosen(**{other: True}) == native, other
    assert chosen(kind="varlen") == native
    assert chosen(score_mod="score_mod:1") != native
    assert chosen(dropout=True, dropout_start=True) == "reference"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dropout_on_hopper_has_the_shared_backward(head_dim):
    """Its own kernels for the rest do not draw; where it names them they would ignore the mask."""

    def backward(**fields) -> str:
        problem = Problem(grads=("q", "k", "v"), head_dim=head_dim, head_dim_v=head_dim, kind="varlen", **fields)
        found = dispatch.plan(problem, SIZE, from_arch("sm_90"))
        assert found.backend == "sm90"
        return str(dict(found.config)["backward"])

    assert backward().startswith("arch/sm90") == (head_dim <= 128)
    assert not backward(dropout=True).startswith("arch/sm90")


FP32 = {"dtype": "fp32", "dtype_kv": "fp32", "dtype_out": "fp32"}
FP64 = {"dtype": "fp64", "dtype_kv": "fp64", "dtype_out": "fp64"}
FP8 = {"dtype": "fp8_e4m3", "dtype_kv": "fp8_e4m3"}


@pytest.mark.parametrize(
    "problem, chosen",
    [
        ({}, "sdpa"),
        (FP32, "sdpa"),
        (FP64, "sdpa"),
        ({"head_dim": 7, "head_dim_v": 9}, "sdpa"),
        ({"kind": "varlen", "causal": True, "window": True, "gqa_ratio": 71}, "sdpa"),
        ({"kind": "paged", "page_size": 16, "kv_layout": "NHD"}, "sdpa"),
        ({"attn_mask": "bool"}, "sdpa"),
        ({"attn_mask": "additive"}, "sdpa"),
        ({"attn_mask": "additive", "grads": ("attn_mask",)}, "reference"),
        ({"kind": "paged", "attn_mask": "tree"}, "reference"),
        ({"return_lse": True}, "reference"),
        ({"dropout": True}, "reference"),
        ({"sinks": True}, "reference"),
        ({"softcap": True}, "reference"),
        ({"score_mod": "score_mod:1"}, "reference"),
        ({"epilogue": "epilogue:1", "dtype_out": "int8"}, "reference"),
        ({"grads": ("q", "k", "v"), "deterministic": True}, "sdpa"),
        ({"grads": ("sinks",), "sinks": True}, "reference"),
        (FP8, "reference"),
        ({"dtype_kv": "fp8_e5m2"}, "reference"),
    ],
    ids=str,
)  # fmt: skip
def test_plans_on_the_cpu(problem, chosen):
    found = dispatch.plan(Problem(**problem), SIZE, from_arch("cpu"))
    assert (found.backend, found.native) == (chosen, False)
    assert [name for name, _ in found.rejected] == [b.name for b in REGISTRY][: len(found.rejected)]


@pytest.mark.parametrize("arch", [a for a in ARCHS if a != "cpu"])
@pytest.mark.parametrize(
    "problem, chosen",
    [
        (FP64, "sdpa"),
        ({**FP64, "grads": ("q", "k", "v")}, "sdpa"),
        ({**FP64, "grads": ("q", "k", "v"), "deterministic": True}, "reference"),
        ({**FP64, "return_lse": True}, "reference"),
        ({**FP32, "window": True}, "flex"),
        ({**FP32, "score_mod": "score_mod:1"}, "flex"),
        ({**FP32, "score_mod": "score_mod:1", "kind": "varlen"}, "reference"),
        ({"grads": ("alibi_slopes",), "alibi_slopes": True}, "reference"),
        ({"grads": ("q", "k", "v"), "dropout": True, "dropout_start": True}, "reference"),
        ({"dropout": True, "dropout_start": True}, "reference"),
    ],
    ids=str,
)
def test_fallbacks_on_gpus(arch, problem, chosen):
    """What native kernels do not answer; unknown architectures are answered like any other."""
    found = dispatch.plan(Problem(**problem), SIZE, from_arch(arch))
    assert (found.backend, found.native) == (chosen, False)
    assert all(refusals for _, refusals in found.rejected)


@pytest.mark.parametrize("arch", ARCHS)
def test_something_answers_every_plain_question(arch):
    for kind in KINDS:
        found = dispatch.plan(Problem(kind=kind, causal=True), SIZE, from_arch(arch))
        assert found.backend is not None and found.native <= (arch != "cpu")
        vendors = {"cpu": "cpu", "s": "nvidia", "g": "amd"}
        assert found.device.vendor == vendors.get(arch, vendors.get(arch[0]))


def test_other_vendors_have_fallbacks():
    found = dispatch.plan(Problem(), SIZE, Device("other", "mps"))
    assert found.backend == "sdpa"


# ---------------------------------------------------------------- the cache, warnings, the log
def test_plans_are_kept_and_bounded(monkeypatch):
    monkeypatch.setattr(dispatch, "_MOST_PLANS", 3)
    cpu = from_arch("cpu")
    kept = dispatch.cached_plan(Problem(head_dim=1), SIZE, cpu)
    for d in (2, 3):
        dispatch.cached_plan(Problem(head_dim=d), SIZE, cpu)
    assert dispatch.cached_plan(Problem(head_dim=1), SIZE, cpu) is kept  # used last, so the next pushes out 2
    dispatch.cached_plan(Problem(head_dim=4), SIZE, cpu)
    assert [key[0].head_dim for key in dispatch._plans] == [3, 1, 4]


@pytest.mark.parametrize("lengths, same", [((65, 128), True), ((64, 128), False), ((65, 129), False)])
def test_lengths_reach_the_plan_as_powers_of_two(lengths, same):
    assert (SizeBucket.of(3, 8, *lengths) == SizeBucket.of(4, 8, 128, 100)) == same
    assert SizeBucket.of(0, 1, 2, 3) == SizeBucket(0, 1, 2, 4)


@pytest.mark.parametrize("arch", ["gfx942", "sm_90", "sm_130"])
def test_a_fallback_on_a_gpu_is_told_once(arch, caplog):
    problem, device = Problem(**FP64), from_arch(arch)
    with caplog.at_level(logging.INFO, "xattn"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for n in range(3):
            found = dispatch.cached_plan(problem, SizeBucket(2**n, 1, 1, 1), device)
    assert [w.category for w in said] == [xattn.FallbackWarning]
    assert all(str(r) in str(said[0].message) for _, refusals in found.rejected for r in refusals)
    assert [r.levelname for r in caplog.records] == ["INFO"] and "fallback" in caplog.text


def test_each_problem_is_told(caplog):
    with pytest.warns(xattn.FallbackWarning) as said:
        for name in ({}, {"causal": True}, {"gqa_ratio": 2}):
            dispatch.cached_plan(Problem(**FP64, **name), SIZE, from_arch("gfx942"))
    assert len(said) == 3


@pytest.mark.parametrize("arch, backend", [("cpu", None), ("sm_90", "sdpa"), ("gfx942", "reference")])
def test_nothing_is_said_on_the_cpu_or_about_what_was_asked_for(arch, backend, caplog):
    with caplog.at_level(logging.DEBUG, "xattn"), warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.cached_plan(Problem(**FP64), SIZE, from_arch(arch), backend)
    assert [r.levelname for r in caplog.records] == ["DEBUG"]


def test_no_backend_is_an_error_that_lists_all_refusals():
    problem = Problem(kind="paged", page_size=16, dtype="fp32", dtype_kv="fp32", dtype_out="fp32", grads=("nothing",))
    for _ in range(2):  # the second time from the cache
        with pytest.raises(xattn.UnsupportedError) as caught:
            dispatch.cached_plan(problem, SIZE, from_arch("cpu"))
        assert set(caught.value.rejected) == {b.name for b in REGISTRY}
        assert all(str(r) in str(caught.value) for refusals in caught.value.rejected.values() for r in refusals)


# ---------------------------------------------------------------- the public questions
def test_explain_takes_meta_tensors_and_devices_that_are_not_here():
    q, k = (torch.empty(2, n, h, 64, dtype=torch.float64, device="meta") for n, h in ((5, 8), (70, 2)))
    for device in ("sm_90a", "gfx942:sramecc+:xnack-", from_arch("sm_130"), torch.device("cpu"), "cpu"):
        found = xattn.explain(q, k, k, causal=True, device=device)
        assert found.backend == "sdpa" and found.problem.gqa_ratio == 4 and found.problem.causal
        assert found.size == SizeBucket(2, 8, 8, 128)
        assert xattn.supported(q, k, k, device=device)
    assert not xattn.supported(q, k, k, device="sm_90", backend="cdna")


@pytest.mark.parametrize("device", ["h100", "sm_", "gfx", "", 7, 1.5])
def test_explain_of_a_device_that_is_none(device):
    q = torch.empty(1, 1, 1, 8, device="meta")
    with pytest.raises((ValueError, TypeError)):
        xattn.explain(q, q, q, device=device)


def test_explain_raises_what_the_call_raises():
    q = torch.empty(1, 1, 1, 8, device="meta")
    with pytest.raises(ValueError, match="window: got"):
        xattn.supported(q, q, q, window=(-1, 0))
    with pytest.raises(ValueError, match="kind: got 'dense'; allowed: attention, varlen, paged"):
        xattn.explain(q, q, q, kind="dense")


@pytest.mark.parametrize("arch", ARCHS)
def test_capabilities(arch):
    found = xattn.capabilities(arch)
    names = [name for name, _ in found.backends] + [name for name, _ in found.refused]
    assert sorted(names) == sorted(b.name for b in REGISTRY)
    assert "reference" in dict(found.backends) and str(found)
    assert all(refusal.code in ("vendor", "arch") for _, refusal in found.refused)


@pytest.mark.parametrize("arch", [a for a in ARCHS if a.startswith("sm_") or a in ("gfx90a", "gfx942", "gfx950")])
@pytest.mark.parametrize("kind", ["attention", "varlen"])
def test_gradients_on_gpus(arch, kind):
    """Natively, and the plan says by which kernels: on Hopper those of sm80."""
    problem = Problem(kind=kind, causal=True, sinks=True, grads=("q", "k", "v", "sinks"), deterministic=True)
    found = dispatch.plan(problem, SIZE, from_arch(arch))
    assert found.native
    words = str(dict(found.config)["backward"])
    assert words.startswith("arch/cdna" if arch.startswith("gfx") else "arch/sm80")
    assert ("compiled for sm_90a" in words) == (found.backend == "sm90")
    assert "backward" not in dict(dispatch.plan(replace(problem, grads=()), SIZE, from_arch(arch)).config)
