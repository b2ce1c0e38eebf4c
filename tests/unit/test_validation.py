"""One bad argument of a call: named, with what was got and what is allowed, before anything is written; the questions
(``explain``, ``supported``) raise alike. What only goes wrong together, and values on the device: test_errors.py."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from arguments import (
    FUNCTIONS,
    INF,
    KINDS,
    NAN,
    POSITIONAL,
    assert_message,
    call,
    each_kind,
    everything,
    explain,
    made,
    out_like,
    randn,
    rotary,
    supported,
    unchanged,
)

import xattn


@dataclass(frozen=True)
class Case:
    """``value`` in the place of argument ``name``; a Change makes it from the good one. The message names ``blamed``,
    by default that argument."""

    kind: str
    name: str
    value: Any
    error: type[Exception] | tuple[type[Exception], ...]
    blamed: str = ""
    needs_all: bool = False  # it is bad beside the optional tensors only

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, Change):
            text = value.words
        elif isinstance(value, torch.Tensor):
            text = f"{str(value.dtype)[6:]}{list(value.shape)}"
        else:
            text = f"{value!r}" if len(repr(value)) < 25 else type(value).__name__
        return f"{self.kind}-{self.name}-{text}"

    def arguments(self, all_given: bool = False) -> dict[str, Any]:
        """Good ones but for that argument; with ``all_given`` each optional tensor is there as well."""
        given = everything(self.kind) if all_given else made(self.kind)
        good = everything(self.kind).get(self.name)
        given[self.name] = self.value.make(good) if isinstance(self.value, Change) else self.value
        return given


class Change:
    def __init__(self, words: str, make: Any):
        self.words, self.make = words, make


META = Change("meta", lambda t: t.to("meta"))
SPARSE = Change("sparse", lambda t: t.to_sparse())
NO_TENSOR = (None, 3, [1.0], "q")


def to(dtype: torch.dtype) -> Change:
    return Change(str(dtype)[6:], lambda t: t.to(dtype))


def sliced(words: str, *index: Any) -> Change:
    return Change(words, lambda t: t[index])


def _overlapping(t: torch.Tensor, dim: int) -> torch.Tensor:
    return t.narrow(dim, 0, 1).expand(t.shape)


def cases() -> list[Case]:
    found: list[Case] = []
    kinds: tuple[str, ...] = ()

    def bad(name: str, error: type[Exception], *values: Any, blamed: str = "") -> None:
        found.extend(Case(kind, name, value, error, blamed) for kind in kinds for value in values)

    def optional_tensor(name: str, dtypes: tuple[torch.dtype, ...], good: torch.Tensor, *shapes: tuple) -> None:
        bad(name, TypeError, 3, [1.0], "none", True, *(torch.zeros_like(good, dtype=d) for d in dtypes))
        bad(name, ValueError, *(torch.zeros(s, dtype=good.dtype) for s in shapes))
        bad(name, ValueError, good.to("meta"), Change("sparse", lambda _: good.to_sparse()))

    # ---- all functions
    kinds = tuple(KINDS)
    first = sliced("too_few_dims", 0, 0)
    more = Change("too_many_dims", lambda t: t[None, None])
    bad("q", TypeError, *NO_TENSOR, to(torch.int32), to(torch.bool), to(torch.complex64))
    bad("q", ValueError, first, more, SPARSE)
    bad("q", ValueError, sliced("3_heads", ..., slice(3), slice(None)))
    bad("q", ValueError, Change("33_heads", lambda t: t.repeat_interleave(9, -2)[..., :33, :]))
    bad("q", ValueError, sliced("no_heads", ..., slice(0), slice(None)))
    for name in ("causal", "return_lse"):
        bad(name, TypeError, None, 0, 1, 0.0, "yes", torch.tensor(True))
    bad("deterministic", TypeError, 1, "yes", torch.tensor(True))
    bad("window", TypeError, 3, True, "ab", (1,), (1, 2, 3), (1.0, 0), (NAN, 0), (0, True), (True, 1))
    bad("window", TypeError, ("1", None), (None, "1"), {1, 2}, {1: 2, 3: 4})
    bad("window", ValueError, (-1, 0), (0, -1), (-1, -1), (7, -8), [None, -5], (2**70, 0))
    bad("softmax_scale", TypeError, True, "1", 1j, [1.0], torch.ones(()))
    bad("softmax_scale", ValueError, NAN, INF, -INF, 10**400, 1e39, -1e300, 1e-46, 1e38)
    bad("softcap", TypeError, None, True, "1", torch.ones(()))
    bad("softcap", ValueError, -1, -1e-9, NAN, INF, 10**400, 1e39, 1e300, 1e-46, 1e38)
    bad("dropout_p", TypeError, None, True, "0.5", torch.ones(()))
    bad("dropout_p", ValueError, -0.1, 1.0001, 1.5, 2, NAN, INF, -INF)
    bad("score_mod", TypeError, 3, "s + 1", torch.ones(()))
    bad("mask_mod", TypeError, 3, "causal", torch.ones(()))
    bad("epilogue", TypeError, 3, lambda o, b, h, q_idx, d: o, torch.ones(()), torch.nn.Identity())
    floats = (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn)
    optional_tensor("alibi_slopes", floats, torch.ones(4), (), (3,), (2,), (1, 4), (2, 2), (4, 2), (1, 2, 4))
    optional_tensor("sinks", floats, torch.ones(4), (), (3,), (2, 4), (1,))
    optional_tensor("dropout_rng", (torch.int32, torch.float32), torch.zeros(2).long(), (), (1,), (3,), (2, 2))
    for name in ("q_scale", "k_scale", "v_scale"):
        bad(name, TypeError, True, False, "1", [1.0], 1j, torch.ones((), dtype=torch.float64), torch.ones(2, 2).half())
        bad(name, TypeError, torch.ones((), dtype=torch.int32))
        bad(
            name,
            ValueError,
            NAN,
            INF,
            -INF,
            1e39,
            -1e39,
            10**400,
            1e39,
            *(torch.ones(s) for s in ((1,), (2,), (4,), (2, 4), (1, 2), (2, 2, 1))),
        )
        bad(name, ValueError, torch.ones((), device="meta"))
    bad("backend", TypeError, 3, b"sdpa", True, ["sdpa"])
    bad("backend", ValueError, "", "nosuch", "SDPA", "reference ")
    bad("out", TypeError, 3, [1.0], "out")
    for words, make in {
        "dtype": lambda shape: torch.zeros(shape, dtype=torch.float64),
        "meta": lambda shape: torch.zeros(shape, device="meta"),
        "too_wide": lambda shape: torch.zeros(*shape[:-1], shape[-1] + 1),
        "one_dim_more": lambda shape: torch.zeros(1, *shape),
        "broadcastable": lambda shape: torch.zeros(shape[1:]),
        "empty": lambda shape: torch.zeros(0),
    }.items():
        for kind in kinds:
            shape = out_like(made(kind)).shape
            found.append(Case(kind, "out", Change(words, lambda _, make=make, shape=shape: make(shape)), ValueError))
    for kind in kinds:
        for dtype in (torch.int32, torch.bool, torch.complex64):
            epilogue = Change(
                str(dtype)[6:], lambda _, d=dtype: xattn.Epilogue(lambda o, b, h, q_idx, d: o, out_dtype=d)
            )
            found.append(Case(kind, "epilogue", epilogue, TypeError, "out_dtype"))

    # ---- attention and varlen
    kinds = ("attention", "varlen")
    for name in "kv":
        bad(name, TypeError, *NO_TENSOR, to(torch.int64), to(torch.bool))
        bad(name, TypeError, to(torch.float16), to(torch.float8_e4m3fn), blamed="v")  # of k and v the second is blamed
        bad(name, ValueError, first, more, META, SPARSE)
    bad("q", TypeError, to(torch.float16), to(torch.float64), to(torch.float8_e5m2), blamed="k, v")
    bad("q", ValueError, META, sliced("head_dim_7", ..., slice(7)), sliced("head_dim_0", ..., slice(0)), blamed="k")
    bad("k", ValueError, sliced("head_dim_7", ..., slice(7)))
    bad(
        "k",
        ValueError,
        sliced("1_head", ..., slice(1), slice(None)),
        sliced("1_key_less", ..., slice(1, None), slice(None), slice(None)),
        blamed="v",
    )
    bad(
        "v",
        ValueError,
        sliced("1_head", ..., slice(1), slice(None)),
        sliced("1_key_less", ..., slice(1, None), slice(None), slice(None)),
    )
    bad("v", ValueError, sliced("head_dim_0", ..., slice(0)), blamed="head_dim")
    bools = (torch.int32, torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn)
    optional_tensor(
        "attn_mask", bools, torch.ones(5, 6), (6, 5), (3,), (2, 5, 6), (2, 3, 5, 6), (3, 4, 5, 6), (1, 1, 1, 5, 6), (0,)
    )
    optional_tensor("seqused_k", (torch.float32, torch.int16, torch.bool), torch.tensor([3, 4]), (), (1,), (3,), (2, 1))
    kinds = ("attention",)
    bad("q", ValueError, sliced("batch_1", slice(1)), blamed="k")
    bad("k", ValueError, sliced("batch_1", slice(1)))
    bad("v", ValueError, sliced("batch_1", slice(1)))

    # ---- varlen
    kinds = ("varlen",)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        bad(name, TypeError, *NO_TENSOR, to(torch.float32), to(torch.int16), to(torch.bool))
        bad(name, ValueError, META, more, sliced("0-d", 0), sliced("empty", slice(0)))
        bad(name, ValueError, sliced("short", slice(2)), blamed="cu_seqlens_k")
    for name in ("max_seqlen_q", "max_seqlen_k"):
        bad(name, TypeError, None, True, 6.0, "6", NAN, torch.tensor(6))
        bad(name, ValueError, -1, -(2**40), 2**70)

    # ---- paged
    kinds = ("paged", "packed")
    for name in ("k_cache", "v_cache"):
        bad(name, TypeError, *NO_TENSOR)
        bad(name, ValueError, sliced("too_few_dims", 0), more)
        bad(name, ValueError, META, blamed="v_cache|k_cache")
    bad("q", ValueError, META, blamed="k_cache|k_new|page_table|rotary")
    bad("q", TypeError, to(torch.float16), to(torch.float64), blamed="k_cache, v_cache")
    bad("q", ValueError, sliced("head_dim_7", ..., slice(7)), blamed="k_cache")
    bad("k_cache", TypeError, to(torch.int64), to(torch.bool), blamed="k_cache|k_new")
    bad("v_cache", TypeError, to(torch.float16), to(torch.int64), to(torch.float8_e4m3fn), blamed="v_cache|v_new")
    bad(
        "k_cache",
        ValueError,
        sliced("head_dim_7", ..., slice(7)),
        sliced("1_head", ..., slice(1), slice(None)),
        blamed="k_cache|k_new|v_cache",
    )
    bad(
        "v_cache",
        ValueError,
        sliced("1_head", ..., slice(1), slice(None)),
        sliced("3_pages", slice(3)),
        sliced("page_size_3", slice(None), slice(3)),
    )
    for name in ("page_table", "seqlens_k"):
        bad(name, TypeError, *NO_TENSOR, to(torch.float32), to(torch.int16), to(torch.bool))
        bad(name, ValueError, META, more, sliced("too_few_dims", 0))
    bad("page_table", ValueError, sliced("batch_1", slice(1)), blamed="page_table|seqlens_k")
    bad("seqlens_k", ValueError, sliced("batch_1", slice(1)))
    bad("kv_layout", ValueError, "nhd", "NDH", "", "NHDX")
    bad("kv_layout", (TypeError, ValueError), None, 3, b"NHD", torch.ones(()))
    for name in ("num_splits", "max_seqlen_q", "max_seqlen_k"):
        bad(name, TypeError, True, 2.0, "2", NAN, torch.tensor(2))
        bad(name, ValueError, -1, 2**70)
    bad("num_splits", ValueError, 0)
    for name in ("k_scale", "v_scale"):  # new tokens are divided by them
        bad(name, ValueError, 0, 0.0, -1.5)
    for name in ("k_cache", "v_cache"):
        bad(name, ValueError, *(Change(f"stride_0_of_{n}", lambda t, n=n: _overlapping(t, n)) for n in range(4)))
    for name in ("k_new", "v_new"):
        bad(name, TypeError, 3, [1.0], "new", to(torch.int32), to(torch.float16), to(torch.float8_e4m3fn))
        bad(
            name,
            ValueError,
            META,
            None,
            more,
            sliced("head_dim_7", ..., slice(7)),
            sliced("1_head", ..., slice(1), slice(None)),
        )
    bad(
        "v_new",
        ValueError,
        sliced("1_token_less", ..., slice(1, None), slice(None), slice(None)),
        sliced("too_few_dims", 0),
    )
    bad("k_new", ValueError, sliced("1_token_less", ..., slice(1, None), slice(None), slice(None)), blamed="v_new")
    bad("k_new", ValueError, sliced("too_few_dims", 0))
    bad("rotary", TypeError, 3, "rope", (randn(16, 4), randn(16, 4)), randn(16, 4))
    bad("rotary", ValueError, Change("too_wide", lambda _: rotary(width=5)))
    on_meta = Change("meta", lambda r: xattn.Rotary(r.cos.to("meta"), r.sin.to("meta")))
    bad("rotary", ValueError, on_meta)
    optional_tensor(
        "attn_mask",
        (torch.float32, torch.int32),
        torch.ones(4, 2, dtype=torch.bool),
        (),
        (2,),
        (2, 2),
        (4, 4),
        (1, 2),
        (1, 4, 2),
    )
    kinds = ("paged",)
    bad("q", ValueError, sliced("batch_1", slice(1)), blamed="page_table|k_new")
    bad("k_new", ValueError, sliced("batch_1", slice(1)), blamed="k_new")
    bad("v_new", ValueError, sliced("batch_1", slice(1)), blamed="v_new")
    bad("cu_seqlens_new", ValueError, torch.tensor([0, 2, 4]), blamed="k_new")
    bad("cu_seqlens_q", ValueError, torch.tensor([0, 2, 4]), blamed="q")
    bad("max_seqlen_q", ValueError, 0, 1)
    kinds = ("packed",)
    bad("cu_seqlens_q", TypeError, 3, [0, 3, 4], to(torch.float32), to(torch.int16))
    bad("cu_seqlens_q", ValueError, META, more, sliced("0-d", 0), sliced("empty", slice(0)))
    bad("cu_seqlens_q", ValueError, sliced("short", slice(2)), blamed="page_table|cu_seqlens_q")
    bad("cu_seqlens_q", ValueError, None, blamed="q")
    bad("cu_seqlens_new", TypeError, 3, [0, 3, 4], to(torch.float32), to(torch.int16))
    bad(
        "cu_seqlens_new", ValueError, META, more, sliced("0-d", 0), sliced("empty", slice(0)), sliced("short", slice(2))
    )
    bad("cu_seqlens_new", ValueError, None, blamed="k_new")
    return found


def spoilt() -> list[Case]:
    """Every tensor of every kind of call, by its form alone: one more of each dimension, of other ranks, of dtypes."""
    # Where a dimension is shared, another tensor may be told of; where nothing shares it, it may be any.
    partners = {
        "q": "q|k|v|out|k_cache|k_new|cu_seqlens_q|cu_seqlens_new|page_table|alibi_slopes|attn_mask|rotary",
        "k": "k|v|q|q_scale",
        "v": "v|out",
        "k_cache": "k_cache|v_cache|k_new|q|q_scale",
        "v_cache": "v_cache|v_new|out",
        "cu_seqlens_q": "cu_seqlens_q|cu_seqlens_k|page_table",
        "cu_seqlens_new": "cu_seqlens_new|k_new",
        "page_table": "page_table|seqlens_k|k_new",
        "k_new": "k_new|v_new",
    }
    free = {("k_cache", 0), ("page_table", 1)}
    indices = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_new", "seqused_k", "page_table", "seqlens_k", "dropout_rng")
    found = []
    for kind in KINDS:
        for name, value in everything(kind).items():
            if not isinstance(value, torch.Tensor):
                continue
            wrong = [torch.float32, torch.int16, torch.bool] if name in indices else [torch.int32, torch.complex64]
            wrong += [torch.float64] if name.endswith("_scale") else []
            changes = [to(dtype) for dtype in wrong] + [Change("5_dims_more", lambda t: t[(None,) * 5])]
            if name not in ("q", "k_cache"):  # of which the others would be told
                changes += [META, SPARSE][: 2 if value.dim() > 1 else 1]
            if value.dim() and (name != "attn_mask" or kind in ("paged", "packed")):
                number = Change("0" if name.endswith("_scale") else "number", lambda t: t.flatten()[0])
                changes.append(sliced("0", 0) if name.endswith("_scale") else number)
            for d in range(value.dim()):
                packed = d == 0 and (name in ("q", "k", "v") and kind == "varlen" or name == "q" and kind == "packed")
                if (name, d) not in free and not packed:
                    more = Change(f"one_more_in_{d}", lambda t, d=d: torch.cat([t, t.narrow(d, 0, 1)], d))
                    changes.append(more)
            blamed = partners.get(name, name)
            found += [Case(kind, name, change, (TypeError, ValueError), blamed, needs_all=True) for change in changes]
    return found


CASES = [*cases(), *spoilt()]


@each_kind
def test_the_good_arguments_are_good(kind):
    """So that each case below differs from them in what it says, and nothing else."""
    given = made(kind)
    out = out_like(given)
    assert call(kind, given, out=out) is out and out.isfinite().all() and not out.eq(7).any()
    assert explain(kind, given).backend
    assert not call(kind, made(kind, append=False)).isnan().any()


@each_kind
def test_everything_at_once_is_good(kind):
    given = everything(kind)
    assert call(kind, given) is given["out"] and given["out"].isfinite().all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_bad_argument_is_named_and_nothing_is_written(case):
    for all_given in {case.needs_all, True}:
        given = case.arguments(all_given)
        with unchanged(given), pytest.raises(case.error) as caught:
            call(case.kind, given)
        assert_message(caught.value, case.blamed or case.name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_explain_and_supported_raise_as_the_call_does(case):
    for question in (explain, supported):
        with pytest.raises(case.error) as caught:
            question(case.kind, case.arguments(case.needs_all))
        assert_message(caught.value, case.blamed or case.name)


@each_kind
def test_unknown_and_missing_arguments(kind):
    with pytest.raises(TypeError, match="nosuch"):
        call(kind, made(kind), nosuch=1)
    with pytest.raises(TypeError, match="'q'"):
        FUNCTIONS[kind]()


@each_kind
def test_numbers_of_numpy_are_numbers(kind):
    given = made(kind)
    plain = {"window": (1, None), "softmax_scale": 0.5, "softcap": 30.0, "q_scale": 2.0, "backend": "reference"}
    ones = {n: np.float32(x) if isinstance(x, float) else x for n, x in plain.items()} | {"window": (np.int64(1), None)}
    if "max_seqlen_q" in given:
        ones["max_seqlen_q"] = np.int32(given["max_seqlen_q"])
    assert torch.equal(call(kind, made(kind) | ones), call(kind, made(kind) | plain))
    for name in ("window", "softmax_scale", "softcap", "dropout_p"):
        value = np.bool_(True)
        with pytest.raises(TypeError, match=f"^{name}: got bool"):
            call(kind, given | {name: (value, 0) if name == "window" else value})


NESTED = {k: (*POSITIONAL[k][:3], "attn_mask", "sinks", "q_scale", "k_scale", "v_scale") for k in KINDS}
NESTED |= {k: (*NESTED[k], "k_new") for k in ("paged", "packed")}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("kind, name", [(k, n) for k in KINDS for n in NESTED[k]])
def test_nested_tensors(kind, name, layout):
    nested = torch.nested.nested_tensor([randn(3, 4, 8), randn(2, 4, 8)], layout=layout)
    for question in (call, explain):
        with pytest.raises(ValueError, match=f"^{name}: got a nested tensor; allowed: a dense"):
            question(kind, made(kind) | {name: nested})


@pytest.mark.parametrize("value", [torch.zeros(2), torch.tensor([]), np.zeros(3)], ids=["two", "none", "numpy"])
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k", "num_splits"])
@pytest.mark.parametrize("kind", ["paged", "packed"])
def test_counts_that_are_many(kind, name, value):
    for append in (False, True):
        with pytest.raises(TypeError, match=f"^{name}: got (Tensor|ndarray); allowed"):
            call(kind, made(kind, append) | {name: value})


@pytest.mark.parametrize("value, error", [([], ValueError), (None, ValueError), ("ring", ValueError)])
def test_kinds_of_questions(value, error):
    with pytest.raises(error, match="^kind: got .*; allowed: attention, varlen, paged"):
        xattn.explain(*made("attention").values(), kind=value)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), "meta", "sm_90", "gfx942"])
def test_devices_of_questions(device):
    assert xattn.explain(*made("attention").values(), device=device).backend
    found = xattn.capabilities(device)
    assert json.loads(json.dumps(found.as_dict()))["device"]["arch"] == found.device.arch


@pytest.mark.parametrize("device, error", [("foo", ValueError), ("", ValueError), ([], TypeError), (1.5, TypeError)])
def test_devices_that_are_none(device, error):
    for question in (lambda: xattn.explain(*made("attention").values(), device=device), xattn.capabilities):
        with pytest.raises(error, match="^device: got .*; allowed: a torch device of this machine, an architecture by"):
            question() if question is not xattn.capabilities else question(device)


def test_capabilities_for_json():
    found = xattn.capabilities("cpu").as_dict()
    assert list(found) == ["device", "backends", "refused"]
    (able,) = found["backends"]["sdpa"]
    assert able["kinds"] == ["attention", "varlen", "paged"] and ["bf16", "bf16"] in able["dtypes"]
    assert able["head_dim"] == {"smallest": 1, "largest": 0, "multiple_of": 1}
    assert found["refused"]["sm80"]["code"] == "vendor"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_refused_dtype_says_nothing_of_the_output(dtype):
    given = {n: t.to(dtype) for n, t in made("attention").items()}
    with pytest.raises(xattn.UnsupportedError) as caught:
        call("attention", given, backend="sdpa")
    assert [r.field for r in caught.value.rejected["sdpa"]] == ["dtype"]


@each_kind
@pytest.mark.parametrize("window", [(-1, 0), (0, -1), (-1, -1), (None, -1)])
def test_a_negative_window_names_none(kind, window):
    with pytest.raises(ValueError, match=r"^window: got .*-1.*; allowed: .*None"):
        call(kind, made(kind), window=window)


@each_kind
def test_every_argument_has_a_case(kind):
    tested = {case.name for case in CASES if case.kind == kind}
    wanted = set(inspect.signature(FUNCTIONS[kind]).parameters)
    assert wanted - tested == set()


@each_kind
def test_an_explicit_backend_that_refuses_lists_why_and_writes_nothing(kind):
    given = made(kind) | {"out": out_like(made(kind))}
    with unchanged(given), pytest.raises(xattn.UnsupportedError) as caught:
        call(kind, given, backend="cdna")
    assert list(caught.value.rejected) == ["cdna"] and str(caught.value.rejected["cdna"][0]) in str(caught.value)
    with unchanged(given), pytest.raises(xattn.UnsupportedError) as caught:
        call(kind, given, backend="sdpa", sinks=torch.zeros(4), softcap=1.0)
    assert [r.field for r in caught.value.rejected["sdpa"]] == ["softcap", "sinks"]


# ---------------------------------------------------------------- at the edge of what is allowed
@each_kind
@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("option", ["softmax_scale", "softcap"])
@pytest.mark.parametrize("value", [10**30, 1e30, 1e20, 1e-20, 1.2e-38, 10**18, 1, 0])
def test_large_and_small_factors(kind, backend, option, value):
    """What a call may be given makes no NaN; whole numbers are numbers."""
    assert not call(kind, made(kind), backend=backend, causal=True, **{option: value}).isnan().any()
    if option == "softmax_scale":
        assert not call(kind, made(kind), backend=backend, causal=True, **{option: -value}).isnan().any()
    if option == "softcap" and value >= 1e18:
        torch.testing.assert_close(call(kind, made(kind), softcap=value), call(kind, made(kind)))


@each_kind
def test_out_of_any_strides_is_written(kind):
    want = call(kind, made(kind))
    for out in (
        torch.full((*want.shape, 2), 7.0)[..., 0],
        torch.full(want.shape[::-1], 7.0).permute(*range(want.dim())[::-1]),
    ):
        assert not out.is_contiguous()
        around = out._base.clone()
        assert call(kind, made(kind), out=out) is out and torch.equal(out, want)
        if out._base.dim() > out.dim():
            assert torch.equal(out._base[..., 1], around[..., 1])  # what lies between is left alone
