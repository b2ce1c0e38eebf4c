"""Bad arguments, one at a time: named, with what was got and what is allowed, before anything is written."""

from __future__ import annotations

import inspect
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import xattn

FUNCTIONS = {
    "attention": xattn.attention,
    "varlen": xattn.attention_varlen,
    "paged": xattn.attention_paged,
    "packed": xattn.attention_paged,  # paged, with packed queries and packed new tokens
}
KINDS = list(FUNCTIONS)
POSITIONAL = {
    "attention": ("q", "k", "v"),
    "varlen": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "paged": ("q", "k_cache", "v_cache", "page_table", "seqlens_k"),
}
POSITIONAL["packed"] = POSITIONAL["paged"]
NAN, INF = math.nan, math.inf


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def rotary(width: int = 4, positions: int = 16) -> xattn.Rotary:
    angle = torch.arange(positions)[:, None] / torch.arange(1, width + 1)
    return xattn.Rotary(angle.cos(), angle.sin())


def made(kind: str, append: bool = True) -> dict[str, Any]:
    """Good arguments: 2 sequences, 4 query heads on 2, head_dim 8, head_dim_v 16."""
    if kind == "attention":
        return {"q": randn(2, 5, 4, 8), "k": randn(2, 6, 2, 8), "v": randn(2, 6, 2, 16)}
    if kind == "varlen":
        found: dict[str, Any] = {"q": randn(7, 4, 8), "k": randn(9, 2, 8), "v": randn(9, 2, 16)}
        found |= {"cu_seqlens_q": torch.tensor([0, 5, 7]), "cu_seqlens_k": torch.tensor([0, 3, 9], dtype=torch.int32)}
        return found | {"max_seqlen_q": 5, "max_seqlen_k": 6}
    found = {"q": randn(2, 2, 4, 8), "k_cache": randn(4, 4, 2, 8), "v_cache": randn(4, 4, 2, 16)}
    found |= {"page_table": torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), "seqlens_k": torch.tensor([5, 3])}
    if append:
        found |= {"k_new": randn(2, 2, 2, 8), "v_new": randn(2, 2, 2, 16), "rotary": rotary()}
    if kind == "packed":
        cu_seqlens = torch.tensor([0, 3, 4])
        found |= {"q": randn(4, 4, 8), "cu_seqlens_q": cu_seqlens, "max_seqlen_q": 3}
        if append:
            found |= {"k_new": randn(4, 2, 8), "v_new": randn(4, 2, 16), "cu_seqlens_new": cu_seqlens.int()}
    return found


def out_like(given: dict[str, Any]) -> torch.Tensor:
    return torch.full((*given["q"].shape[:-1], 16), 7.0)


def call(kind: str, given: dict[str, Any], **more: Any) -> Any:
    args = [given[name] for name in POSITIONAL[kind]]
    return FUNCTIONS[kind](*args, **{n: v for n, v in given.items() if n not in POSITIONAL[kind]}, **more)


def explain(kind: str, given: dict[str, Any]) -> xattn.Plan:
    args = [given[name] for name in POSITIONAL[kind]]
    kwargs = {n: v for n, v in given.items() if n not in POSITIONAL[kind]}
    return xattn.explain(*args, kind="paged" if kind == "packed" else kind, **kwargs)


def bits(given: dict[str, Any]) -> dict[str, bytes]:
    """Every byte of every dense tensor that lies on the CPU."""
    return {
        name: t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, t in given.items()
        if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.layout is torch.strided
    }


class unchanged:
    """A context in which no byte of the tensors changes."""

    def __init__(self, given: dict[str, Any]):
        self.given, self.before = given, bits(given)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        after = bits(self.given)
        assert [name for name in self.before if self.before[name] != after[name]] == []


@dataclass(frozen=True)
class Case:
    """``value`` in the place of argument ``name``; a function makes it from the good one. The message names
    ``blamed``, by default that argument."""

    kind: str
    name: str
    value: Any
    error: type[Exception]
    blamed: str = ""

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, Change):
            text = value.words
        elif isinstance(value, torch.Tensor):
            text = f"{str(value.dtype)[6:]}{list(value.shape)}"
        else:
            text = f"{value!r}" if len(repr(value)) < 25 else type(value).__name__
        return f"{self.kind}-{self.name}-{text}"

    def arguments(self) -> dict[str, Any]:
        given = made(self.kind)
        good = given.get(self.name)
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
        bad(name, TypeError, None, 1, 0.0, "yes", torch.tensor(True))
    bad("deterministic", TypeError, 1, "yes", torch.tensor(True))
    bad("window", TypeError, 3, True, "ab", (1,), (1, 2, 3), (1.0, 0), (NAN, 0), (0, True), ("1", None), {1: 2, 3: 4})
    bad("window", ValueError, (-1, 0), (0, -1), (-1, -1), [None, -5], (2**70, 0))
    bad("softmax_scale", TypeError, True, "1", 1j, [1.0], torch.ones(()))
    bad("softmax_scale", ValueError, NAN, INF, -INF, 10**400, 1e39, -1e300, 1e-46, 1e38)
    bad("softcap", TypeError, None, True, "1", torch.ones(()))
    bad("softcap", ValueError, -1, -1e-9, NAN, INF, 10**400, 1e39, 1e300, 1e-46, 1e38)
    bad("dropout_p", TypeError, None, True, "0.5", torch.ones(()))
    bad("dropout_p", ValueError, -0.1, 1.5, 2, NAN, INF, -INF)
    bad("score_mod", TypeError, 3, "s + 1", torch.ones(()))
    bad("mask_mod", TypeError, 3, "causal", torch.ones(()))
    bad("epilogue", TypeError, 3, lambda o, b, h, q_idx, d: o, torch.ones(()))
    floats = (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn)
    optional_tensor("alibi_slopes", floats, torch.ones(4), (), (3,), (2,), (1, 4), (2, 2), (4, 2), (1, 2, 4))
    optional_tensor("sinks", floats, torch.ones(4), (), (3,), (2, 4), (1,))
    optional_tensor("dropout_rng", (torch.int32, torch.float32), torch.zeros(2).long(), (), (1,), (3,), (2, 2))
    for name in ("q_scale", "k_scale", "v_scale"):
        bad(name, TypeError, True, "1", [1.0], 1j, torch.ones((), dtype=torch.float64), torch.ones(2, 2).half())
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
    bad("kv_layout", ValueError, "nhd", "", "NHDX")
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
    bad("rotary", TypeError, 3, (randn(16, 4), randn(16, 4)), randn(16, 4))
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


CASES = cases()
each_kind = pytest.mark.parametrize("kind", KINDS)


def assert_message(error: BaseException, blamed: str) -> None:
    assert re.match(rf"({blamed})(\[\d+\])?\b.*: got .*; allowed: .+", str(error), re.DOTALL), str(error)
    assert not isinstance(error, xattn.DeviceValueError)


@each_kind
def test_the_good_arguments_are_good(kind):
    """So that each case below differs from them in what it says, and nothing else."""
    given = made(kind)
    out = out_like(given)
    assert call(kind, given, out=out) is out and out.isfinite().all() and not out.eq(7).any()
    assert explain(kind, given).backend
    assert not call(kind, made(kind, append=False)).isnan().any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_bad_argument_is_named_and_nothing_is_written(case):
    for with_out in (False, True):
        given = case.arguments()
        if with_out and case.name != "out" and isinstance(given["q"], torch.Tensor):
            given["out"] = torch.full((*made(case.kind)["q"].shape[:-1], 16), 7.0)
        with unchanged(given), pytest.raises(case.error) as caught:
            call(case.kind, given)
        assert_message(caught.value, case.blamed or case.name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_explain_raises_as_the_call_does(case):
    with pytest.raises(case.error) as caught:
        explain(case.kind, case.arguments())
    assert_message(caught.value, case.blamed or case.name)


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


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("kind, name", [(k, n) for k in KINDS for n in (*POSITIONAL[k][:3], "attn_mask", "k_new")])
def test_nested_tensors(kind, name, layout):
    if name == "k_new" and kind not in ("paged", "packed"):
        name = "sinks"
    nested = torch.nested.nested_tensor([randn(3, 4, 8), randn(2, 4, 8)], layout=layout)
    for question in (call, explain):
        with pytest.raises(ValueError, match=f"^{name}: got a nested tensor; allowed: a dense"):
            question(kind, made(kind) | {name: nested})


@pytest.mark.parametrize("value, error", [([], ValueError), (None, ValueError), ("ring", ValueError)])
def test_kinds_of_questions(value, error):
    with pytest.raises(error, match="^kind: got .*; allowed: attention, varlen, paged"):
        xattn.explain(*made("attention").values(), kind=value)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), "hpu", "meta", "sm_90", "gfx942"])
def test_devices_of_questions(device):
    assert xattn.explain(*made("attention").values(), device=device).backend
    found = xattn.capabilities(device)
    assert json.loads(json.dumps(found.as_dict()))["device"]["arch"] == found.device.arch


@pytest.mark.parametrize("device, error", [("foo", ValueError), ("", ValueError), ([], TypeError), (1.5, TypeError)])
def test_devices_that_are_none(device, error):
    for question in (lambda: xattn.explain(*made("attention").values(), device=device), xattn.capabilities):
        with pytest.raises(error, match="^device: got .*; allowed: a torch device, an architecture by name"):
            question() if question is not xattn.capabilities else question(device)


def test_capabilities_for_json():
    found = xattn.capabilities("cpu").as_dict()
    assert list(found) == ["device", "backends", "refused"]
    able = found["backends"]["sdpa"]
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


# ---------------------------------------------------------------- values that only the device can see
def values() -> list[Any]:
    found: list[Any] = []

    def bad(kind: str, words: str, match: str, append: bool = False, **changes: Any) -> None:
        found.append(pytest.param(kind, append, changes, match, id=f"{kind}-{words}"))

    for dtype in (torch.int32, torch.int64):
        for words, offsets in {
            "decreasing": [0, 8, 7],
            "start_at_1": [1, 5, 7],
            "start_below_0": [-1, 5, 7],
            "beyond_total": [0, 5, 8],
            "below_0_inside": [0, -1, 7],
            "far_beyond": [0, 5, 2**31 - 1],
        }.items():
            name = f"{str(dtype)[6:]}_{words}"
            most = {"max_seqlen_q": 2**31 - 1, "max_seqlen_k": 2**31 - 1}
            bad(
                "varlen",
                f"cu_seqlens_q_{name}",
                "cu_seqlens_q",
                cu_seqlens_q=torch.tensor(offsets, dtype=dtype),
                **most,
            )
            offsets = [n + 2 if n >= 7 and words == "beyond_total" else n for n in offsets]
            bad(
                "varlen",
                f"cu_seqlens_k_{name}",
                "cu_seqlens_k",
                cu_seqlens_k=torch.tensor(offsets, dtype=dtype),
                **most,
            )
        offsets = torch.tensor([0, 4, 3], dtype=dtype)
        bad("packed", f"cu_seqlens_q_decreasing_{dtype}", "cu_seqlens_q", cu_seqlens_q=offsets)
        bad("packed", f"cu_seqlens_q_beyond_{dtype}", "cu_seqlens_q", cu_seqlens_q=torch.tensor([0, 3, 5], dtype=dtype))
        bad("packed", f"cu_seqlens_q_from_1_{dtype}", "cu_seqlens_q", cu_seqlens_q=torch.tensor([1, 3, 4], dtype=dtype))
    for dtype, far in ((torch.int32, 2**31), (torch.int64, 2**63)):  # differences of neighbours wrap around
        offsets = torch.tensor([0, far - 1, -far + 7], dtype=dtype)
        most = {"max_seqlen_q": 2**31 - 1, "max_seqlen_k": 2**31 - 1}
        bad("varlen", f"cu_seqlens_q_wraps_{dtype}", "cu_seqlens_q", cu_seqlens_q=offsets, **most)
        bad("varlen", f"cu_seqlens_k_wraps_{dtype}", "cu_seqlens_k", cu_seqlens_k=offsets, **most)
        bad("packed", f"cu_seqlens_q_wraps_{dtype}", "cu_seqlens_q", cu_seqlens_q=offsets)
        bad("packed", f"cu_seqlens_new_wraps_{dtype}", "cu_seqlens_new", True, cu_seqlens_new=offsets)
    bad("varlen", "max_seqlen_q", "max_seqlen_q", max_seqlen_q=4)
    bad("varlen", "max_seqlen_q_0", "max_seqlen_q", max_seqlen_q=0)
    bad("varlen", "max_seqlen_k", "max_seqlen_k", max_seqlen_k=5)
    bad("packed", "max_seqlen_q", "max_seqlen_q", max_seqlen_q=2)
    for words, lengths in {"negative": [-1, 3], "too_long": [3, 7], "far_too_long": [2**31 - 1, 0]}.items():
        bad("attention", f"seqused_k_{words}", "seqused_k", seqused_k=torch.tensor(lengths))
        bad("varlen", f"seqused_k_{words}", "seqused_k", seqused_k=torch.tensor(lengths))
    bad("varlen", "seqused_k_beyond_its_sequence", "seqused_k", seqused_k=torch.tensor([4, 6]))
    for kind in ("paged", "packed"):
        for words, lengths in {"negative": [-1, 3], "too_long": [5, 9], "far": [2**31 - 1, 3]}.items():
            bad(kind, f"seqlens_k_{words}", "seqlens_k", seqlens_k=torch.tensor(lengths))
        for words, pages in {
            "4": [[2, 4], [3, 1]],
            "-1": [[-1, 0], [3, 1]],
            "2^31-1": [[2, 0], [2**31 - 1, 1]],
        }.items():
            bad(kind, f"page_{words}", "page_table", page_table=torch.tensor(pages))
            bad(kind, f"page_{words}_append", "page_table", True, page_table=torch.tensor(pages))
        bad(kind, "seqlens_k_negative_append", "seqlens_k", True, seqlens_k=torch.tensor([5, -1]))
        bad(kind, "seqlens_k_very_negative_append", "seqlens_k", True, seqlens_k=torch.tensor([-9, 3]))
        bad(kind, "max_seqlen_k", "max_seqlen_k: got 4", max_seqlen_k=4)
        bad(kind, "max_seqlen_k_append", "max_seqlen_k: got 5", True, max_seqlen_k=5)
        bad(kind, "no_room", "room", True, seqlens_k=torch.tensor([3, 8]))
        bad(kind, "room_for_one_of_two", "room", True, seqlens_k=torch.tensor([7, 3]))
        bad(
            kind,
            "page_of_a_new_token",
            "page_table",
            True,
            seqlens_k=torch.tensor([3, 3]),
            page_table=torch.tensor([[2, 9], [3, 1]]),
        )
        bad(kind, "rotary_too_short", "rotary", True, rotary=rotary(positions=6))
    for words, offsets in {
        "decreasing": [0, 4, 3],
        "beyond": [0, 3, 5],
        "from_1": [1, 3, 4],
        "negative": [0, -1, 4],
    }.items():
        bad("packed", f"cu_seqlens_new_{words}", "cu_seqlens", True, cu_seqlens_new=torch.tensor(offsets))
        bad("packed", f"cu_seqlens_q_{words}_append", "cu_seqlens_q", True, cu_seqlens_q=torch.tensor(offsets))
    bad("packed", "max_seqlen_q_append", "max_seqlen_q", True, max_seqlen_q=2)
    return found


@pytest.mark.parametrize("kind, append, changes, match", values())
def test_bad_values_raise_at_once_and_nothing_is_written(kind, append, changes, match):
    for with_out in (False, True):
        given = made(kind, append) | changes
        if with_out:
            given["out"] = out_like(given)
        with unchanged(given), pytest.raises(xattn.DeviceValueError, match=match) as caught:
            call(kind, given)
        assert re.match(r"\w+: got (\[?-?\d).*; allowed: .+", str(caught.value)), str(caught.value)
    xattn.check_errors()  # raised already: nothing is left to be told


@pytest.mark.parametrize("kind", ["paged", "packed"])
def test_a_page_id_behind_the_length_is_not_looked_at(kind):
    given = made(kind, append=False)
    want = call(kind, given | {"seqlens_k": torch.tensor([4, 3])})
    given["page_table"] = torch.tensor([[2, 2**31 - 1], [3, -7]])
    assert torch.equal(call(kind, given | {"seqlens_k": torch.tensor([4, 3])}), want)


@pytest.mark.parametrize("far", [(torch.int32, 2**31), (torch.int64, 2**63)], ids=str)
def test_the_append_op_checks_offsets_before_it_writes(far):
    dtype, n = far
    given = made("packed")
    names = ("k_cache", "v_cache", "page_table", "seqlens_k", "k_new", "v_new")
    offsets = torch.tensor([0, n - 1, -n + 4], dtype=dtype)
    with unchanged(given), pytest.raises(xattn.DeviceValueError, match="cu_seqlens_new"):
        torch.ops.xattn.append_paged(*(given[name] for name in names), cu_seqlens_new=offsets)


@pytest.mark.parametrize("kind", ["paged", "packed"])
@pytest.mark.parametrize("value", [0.0, -1.0, NAN], ids=str)
@pytest.mark.parametrize("shape", [(), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_that_cannot_divide(kind, value, shape, name):
    """Where nothing is written it may be any finite number."""
    given = made(kind) | {name: torch.full(shape, value)}
    with unchanged(given), pytest.raises(ValueError, match=f"^{name}: got .*; allowed: (more than 0|finite)"):
        call(kind, given)
    finite = value if value == value else 0.0
    call(kind, made(kind, append=False) | {name: torch.full(shape, finite)})
    call(kind, made(kind, append=False) | {name: finite})


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


def test_a_cache_of_float64_keeps_its_precision_under_a_scale():
    given = made("paged")
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in given.items()}
    del wide["rotary"]
    call("paged", wide | {"k_scale": 3.0, "v_scale": torch.full((2, 2), 7.0)})
    at = (given["page_table"][0, 1].long(), 1)  # the sixth token
    assert torch.equal(wide["k_cache"][at], wide["k_new"][0, 0] / 3)
    assert torch.equal(wide["v_cache"][at], wide["v_new"][0, 0] / 7)


@each_kind
@pytest.mark.parametrize(
    "options",
    [
        {"score_mod": lambda s, b, h, q_idx, kv_idx: s if s > 0 else -s},
        {"score_mod": lambda s, b: s},
        {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx * 2},
        {"epilogue": xattn.Epilogue(lambda o: o)},
    ],
    ids=["condition", "arguments", "result", "epilogue"],
)
@pytest.mark.parametrize("meta", [False, True])
def test_explain_raises_for_functions_that_cannot_be_traced(kind, options, meta):
    given = made(kind, append=False) | options
    with pytest.raises((ValueError, xattn.UnsupportedError)) as caught:
        call(kind, given)
    if meta:
        given = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    with pytest.raises(type(caught.value), match=f"^{next(iter(options))}: .* cannot be traced"):
        explain(kind, given)


# ---------------------------------------------------------------- out and gradients
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


@pytest.mark.parametrize("kind", ["attention", "varlen"])
@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "alibi_slopes", "attn_mask", "k_scale", "out"])
def test_out_and_gradients_exclude_each_other(kind, name):
    given = made(kind) | {"out": out_like(made(kind))}
    shape = {"attn_mask": (5, 6), "k_scale": ()}.get(name, (4,))
    given[name] = given.get(name, torch.ones(shape)).clone().requires_grad_()
    with unchanged(given), pytest.raises(ValueError, match=r"^out: got .*gradient.*; allowed: .*no_grad"):
        call(kind, given)
    with torch.no_grad():
        assert call(kind, given) is given["out"] and not given["out"].eq(7).any()


@pytest.mark.parametrize("kind", ["paged", "packed"])
@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "sinks", "k_scale", "k_new", "v_new"])
def test_paged_calls_have_no_gradient(kind, append, name):
    given = made(kind, append)
    if name.endswith("_new") and not append:
        given |= {n: t for n, t in made(kind).items() if n in ("k_new", "v_new", "cu_seqlens_new")}
    given[name] = given.get(name, torch.ones(() if name == "k_scale" else (4,))).clone().requires_grad_()
    with unchanged(given), pytest.raises(ValueError, match="gradient"):
        call(kind, given)
    with torch.no_grad():
        assert call(kind, given).isfinite().all()


@pytest.mark.parametrize("kind", ["attention", "varlen"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_no_gradient_through_an_output_of_8_bits(kind, dtype):
    given = made(kind) | {"epilogue": xattn.Epilogue(lambda o, b, h, q_idx, d: o * 0.5, out_dtype=dtype)}
    assert call(kind, given).dtype == dtype
    given["v"].requires_grad_()
    with pytest.raises(ValueError, match=r"^out_dtype: got .*; allowed: .*gradient"):
        call(kind, given)
    with torch.no_grad():
        assert call(kind, given).dtype == dtype


# ---------------------------------------------------------------- merge_states, Epilogue, Rotary
def parts(n: int = 2, packed: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if packed:
        return [randn(5, 4, 8) for _ in range(n)], [randn(4, 5) for _ in range(n)]
    return [randn(2, 5, 4, 8) for _ in range(n)], [randn(2, 4, 5) for _ in range(n)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "change, error, blamed",
    [
        (lambda o, s: ([], []), ValueError, "outs, lses"),
        (lambda o, s: (o, s[:1]), ValueError, "outs, lses"),
        (lambda o, s: (o[:1], s), ValueError, "outs, lses"),
        (lambda o, s: ([o[0], None], s), TypeError, "outs"),
        (lambda o, s: ([o[0], 3], s), TypeError, "outs"),
        (lambda o, s: (o, [s[0], [1.0]]), TypeError, "lses"),
        (lambda o, s: ([o[0], o[1].double()], s), ValueError, "outs"),
        (lambda o, s: ([o[0], o[1][..., :7]], s), ValueError, "outs"),
        (lambda o, s: ([o[0], o[1][None]], s), ValueError, "outs"),
        (lambda o, s: ([o[0], o[1].to("meta")], s), ValueError, "outs"),
        (lambda o, s: ([x.int() for x in o], s), ValueError, "outs"),
        (lambda o, s: ([x.to(torch.float8_e4m3fn) for x in o], s), ValueError, "outs"),
        (lambda o, s: (o, [x.int() for x in s]), ValueError, "lses"),
        (lambda o, s: (o, [s[0], s[1].double()]), ValueError, "lses"),
        (lambda o, s: (o, [s[0], s[1].to("meta")]), ValueError, "lses"),
        (lambda o, s: (o, [x.to("meta") for x in s]), ValueError, "lses"),
        (lambda o, s: (o, [s[0], s[1][..., :4]]), ValueError, "lses"),
        (lambda o, s: (o, [x.transpose(-1, -2) for x in s]), ValueError, "lses"),
        (lambda o, s: (o, [x[..., 0] for x in s]), ValueError, "lses"),
        (lambda o, s: ([x[None, None] for x in o], s), ValueError, "lses|outs"),
        (lambda o, s: (3, s), TypeError, "outs"),
        (lambda o, s: (o, None), TypeError, "lses"),
    ],
)
def test_merge_states(packed, change, error, blamed):
    assert xattn.merge_states(*parts(packed=packed))[0].isfinite().all()
    outs, lses = change(*parts(packed=packed))
    with pytest.raises(error) as caught:
        xattn.merge_states(outs, lses)
    assert_message(caught.value, blamed)


def keep(o, b, h, q_idx, d):
    return o


@pytest.mark.parametrize(
    "args, kwargs, name",
    [
        ((3,), {}, "fn"),
        ((None,), {}, "fn"),
        (("o + 1",), {}, "fn"),
        ((keep, torch.ones(3)), {}, "aux"),
        ((keep, (1.0,)), {}, "aux"),
        ((keep, [torch.ones(3), None]), {}, "aux"),
        ((keep, 3), {}, "aux"),
        ((keep, None), {}, "aux"),
        ((keep,), {"out_dtype": "int8"}, "out_dtype"),
        ((keep,), {"out_dtype": 8}, "out_dtype"),
        ((keep,), {"out_dtype": float}, "out_dtype"),
    ],
)
def test_epilogue(args, kwargs, name):
    with pytest.raises(TypeError) as caught:
        xattn.Epilogue(*args, **kwargs)
    assert_message(caught.value, name)


@each_kind
def test_an_epilogue_on_another_device(kind):
    epilogue = xattn.Epilogue(lambda o, b, h, q_idx, d, x: o * x[d], (torch.ones(16, device="meta"),))
    given = made(kind) | {"epilogue": epilogue, "out": out_like(made(kind))}
    with unchanged(given), pytest.raises(ValueError, match=r"^epilogue.*: got .*meta.*; allowed: .*cpu"):
        call(kind, given)


@pytest.mark.parametrize(
    "args, error, name",
    [
        ((None, randn(9, 4)), TypeError, "cos"),
        ((randn(9, 4), [1.0]), TypeError, "sin"),
        ((randn(9, 4).int(), randn(9, 4)), TypeError, "cos"),
        ((randn(9, 4), randn(9, 4).long()), TypeError, "sin"),
        ((randn(9), randn(9)), ValueError, "cos"),
        ((randn(9, 4), randn(9, 3)), ValueError, "sin"),
        ((randn(9, 4), randn(8, 4)), ValueError, "sin"),
        ((randn(9, 0), randn(9, 0)), ValueError, "cos"),
        ((randn(9, 4), randn(9, 4).to("meta")), ValueError, "sin"),
        ((randn(9, 4), randn(9, 4), 1), TypeError, "interleaved"),
        ((randn(9, 4), randn(9, 4), None), TypeError, "interleaved"),
    ],
)
def test_rotary(args, error, name):
    with pytest.raises(error) as caught:
        xattn.Rotary(*args)
    assert_message(caught.value, name)
