"""Contract 12: a bad argument is named, with what was got and what is allowed, and nothing is written."""

from __future__ import annotations

import re

import cases
import pytest
import torch

import xattn
from xattn import Epilogue, Rotary

NAN, INF = float("nan"), float("inf")


def good(kind: str) -> dict:
    """Arguments by name of a call that works, with everything in place that the table below spoils."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=g)

    options = {
        "attn_mask": torch.ones(5, 7, dtype=torch.bool),
        "alibi_slopes": randn(6),
        "sinks": randn(6),
        "seqused_k": torch.tensor([7, 3]),
        "dropout_rng": torch.tensor([1, 2]),
        "q_scale": randn(2, 3),
        "k_scale": torch.tensor(2.0),
        "v_scale": torch.tensor(2.0),
    }
    if kind == "attention":
        return {
            "q": randn(2, 5, 6, 16),
            "k": randn(2, 7, 3, 16),
            "v": randn(2, 7, 3, 16),
            **options,
            "out": randn(2, 5, 6, 16),
        }
    if kind == "varlen":
        offsets = {
            "cu_seqlens_q": torch.tensor([0, 5, 8]),
            "cu_seqlens_k": torch.tensor([0, 7, 11]),
            "max_seqlen_q": 5,
            "max_seqlen_k": 7,
        }
        return {
            "q": randn(8, 6, 16),
            "k": randn(11, 3, 16),
            "v": randn(11, 3, 16),
            **offsets,
            **options,
            "out": randn(8, 6, 16),
        }
    del options["seqused_k"], options["dropout_rng"]
    return {
        "q": randn(4, 6, 16),
        "k_cache": randn(9, 4, 3, 16),
        "v_cache": randn(9, 4, 3, 16),
        "page_table": torch.arange(8).view(2, 4),
        "seqlens_k": torch.tensor([5, 3]),
        "cu_seqlens_q": torch.tensor([0, 2, 4]),
        "max_seqlen_q": 2,
        "max_seqlen_k": 16,
        "k_new": randn(2, 2, 3, 16),
        "v_new": randn(2, 2, 3, 16),
        "rotary": Rotary(randn(16, 4), randn(16, 4)),
        **options,
        "attn_mask": torch.ones(4, 2, dtype=torch.bool),
        "out": randn(4, 6, 16),
    }


def call(kind: str, arguments: dict):
    given = dict(arguments)
    positional = [given.pop(n) for n in cases.POSITIONAL[kind]]
    return cases.FUNCTIONS[kind](*positional, **given)


INDICES = {"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "seqlens_k", "cu_seqlens_new", "dropout_rng"}
REQUIRED = {"q", "k", "v", "k_cache", "v_cache", "page_table", "seqlens_k", "cu_seqlens_k"}


def bad_tensors():
    """(kind, argument, what is wrong, how to spoil the arguments), for every tensor of every function."""
    for kind in cases.FUNCTIONS:
        for name, value in good(kind).items():
            if not isinstance(value, torch.Tensor):
                continue
            scale = name.endswith("_scale")
            yield kind, name, "type", lambda a, n=name: a | {n: "tensor"}
            yield kind, name, "type", lambda a, n=name: a | {n: [1.0, 2.0]}
            if name in REQUIRED and not (kind == "paged" and name == "cu_seqlens_q"):
                yield kind, name, "None", lambda a, n=name: a | {n: None}
            if name not in ("q", "k_cache"):
                yield kind, name, "device", lambda a, n=name: a | {n: a[n].to("meta")}
            if name not in ("q", "k_cache") and value.dim() > 1:
                yield kind, name, "layout", lambda a, n=name: a | {n: a[n].to_sparse()}
            wrong = [torch.float32, torch.int16, torch.bool] if name in INDICES else [torch.int32, torch.complex64]
            wrong += [torch.float64] if scale else []
            for dtype in wrong:
                yield kind, name, f"{dtype}", lambda a, n=name, d=dtype: a | {n: a[n].to(d)}
            yield kind, name, "too many dimensions", lambda a, n=name: a | {n: a[n][(None,) * 5]}
            if value.dim():
                if name != "attn_mask" or kind == "paged":
                    yield (
                        kind,
                        name,
                        "a number",
                        lambda a, n=name: a | {n: a[n].flatten()[0]} if not n.endswith("_scale") else a | {n: a[n][0]},
                    )
                for dim in range(value.dim()):
                    free = {("k_cache", 0), ("page_table", 1)} | ({("q", 0)} if kind == "paged" else set())
                    if (name, dim) not in free and not (kind == "varlen" and name in "qkv" and dim == 0):
                        yield (
                            kind,
                            name,
                            f"dimension {dim}",
                            lambda a, n=name, d=dim: a | {n: torch.cat([a[n], a[n].narrow(d, 0, 1)], d)},
                        )


BAD_TENSORS = [pytest.param(*rest, id="-".join(rest[:3])) for rest in bad_tensors()]
# A wrong shape of one tensor may be told of another that it does not fit.
PARTNERS = {
    "q": "q|k|k_cache|out|cu_seqlens_q|page_table|alibi_slopes|attn_mask",
    "k": "k|v|q|q_scale",
    "v": "v|out",
    "k_cache": "k_cache|v_cache|k_new|q|k_new",
    "v_cache": "v_cache|v_new|out",
    "cu_seqlens_q": "cu_seqlens_q|cu_seqlens_k|page_table",
    "page_table": "page_table|seqlens_k|k_new",
    "k_new": "k_new|v_new",
}


def assert_refused(kind: str, arguments: dict, names: str, error=(TypeError, ValueError)) -> str:
    """The call raises, names one of ``names`` first, and leaves every tensor as it was."""
    before = {
        n: t.clone()
        for n, t in arguments.items()
        if isinstance(t, torch.Tensor) and t.device.type == "cpu" and not t.is_sparse
    }
    with pytest.raises(error) as caught:
        call(kind, arguments)
    assert all(torch.equal(arguments[n], t) for n, t in before.items()), "something was written"
    assert not isinstance(caught.value, xattn.DeviceValueError)
    text = str(caught.value)
    assert re.match(rf"(\w+, )*({names})\b", text), text
    assert "got" in text and "allowed:" in text, text
    return text


@pytest.mark.parametrize("kind", cases.FUNCTIONS)
def test_the_good_call_works(kind):
    arguments = good(kind)
    call(kind, arguments)


@pytest.mark.parametrize("kind, name, what, spoil", BAD_TENSORS)
def test_bad_tensor(kind, name, what, spoil):
    names = PARTNERS.get(name, name) if what.startswith(("dim", "a number", "too", "torch.", "device")) else name
    text = assert_refused(kind, spoil(good(kind)), names)
    if what == "type":
        assert "str" in text or "list" in text
    if what == "device":
        assert "meta" in text


FLAGS = [1, 0, "yes", None, torch.tensor(True)]
BAD_NUMBERS = {
    "causal": FLAGS,
    "return_lse": FLAGS,
    "deterministic": [1, "yes", torch.tensor(True)],
    "softmax_scale": [NAN, INF, -INF, True, "1", torch.tensor(1.0), [1.0]],
    "softcap": [NAN, INF, -1.0, -1e-9, True, "1", None],
    "dropout_p": [NAN, INF, -0.1, 1.0001, True, "1", None],
    "q_scale": [NAN, INF, True, "1"],
    "k_scale": [NAN, -INF, True, [1.0]],
    "v_scale": [NAN, INF, False, "1"],
    "window": [3, (1,), (1, 2, 3), (1.0, 2), (True, 1), (-1, 0), (0, -1), (7, -8), "ab", (NAN, 1), (None, "1"), {1, 2}],
    "backend": [3, "nosuch", True, ""],
    "score_mod": [3, "relu", torch.ones(1)],
    "mask_mod": [3, torch.ones(1)],
    "epilogue": [3, lambda o, b, h, i, d: o, torch.nn.Identity()],
}
ONLY = {
    "varlen": {
        "max_seqlen_q": [-1, True, 1.5, "5", None, torch.tensor(5)],
        "max_seqlen_k": [-1, False, 7.0, "7", None],
    },
    "paged": {
        "max_seqlen_q": [-1, True, 1.5, "5"],
        "max_seqlen_k": [-1, False, 7.0],
        "num_splits": [0, -1, True, 1.5, "2"],
        "kv_layout": ["nhd", "NDH", "", 3, None],
        "rotary": [3, (torch.ones(1, 1), torch.ones(1, 1)), "rope"],
    },
}


def bad_numbers():
    for kind in cases.FUNCTIONS:
        for name, values in (BAD_NUMBERS | ONLY.get(kind, {})).items():
            for n, value in enumerate(values):
                yield pytest.param(kind, name, value, id=f"{kind}-{name}-{n}")


@pytest.mark.parametrize("kind, name, value", bad_numbers())
def test_bad_number(kind, name, value):
    text = assert_refused(kind, good(kind) | {name: value}, name)
    if name == "window" and isinstance(value, tuple) and any(type(n) is int and n < 0 for n in value):
        assert "None" in text


@pytest.mark.parametrize("kind", cases.FUNCTIONS)
@pytest.mark.parametrize(
    "name, value",
    [
        ("window", (-1, 0)),
        ("softcap", -1.0),
        ("softmax_scale", NAN),
        ("causal", 1),
        ("backend", "nosuch"),
        ("sinks", torch.ones(2)),
    ],
)
def test_the_questions_raise_alike(kind, name, value):
    given = {n: v for n, v in (good(kind) | {name: value}).items() if n != "out"}
    positional = [given.pop(n) for n in cases.POSITIONAL[kind]]
    for question in (xattn.explain, xattn.supported):
        with pytest.raises((TypeError, ValueError), match=name):
            question(*positional, kind=kind, **given)


@pytest.mark.parametrize("kind", cases.FUNCTIONS)
def test_unknown_and_missing_arguments(kind):
    with pytest.raises(TypeError, match="nosuch"):
        call(kind, good(kind) | {"nosuch": 1})
    with pytest.raises(TypeError, match="q"):
        cases.FUNCTIONS[kind]()


# ---------------------------------------------------------------- dtypes and heads
@pytest.mark.parametrize("q, k, v", [
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float16),
    (torch.float64, torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2),
    (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    (torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16),
    (torch.int8, torch.int8, torch.int8),
])  # fmt: skip
@pytest.mark.parametrize("kind", cases.FUNCTIONS)
def test_dtypes_that_do_not_go_together(kind, q, k, v):
    a = {n: x for n, x in good(kind).items() if n not in ("out", "k_new", "v_new", "rotary")}
    names = cases.POSITIONAL[kind][:3]
    a |= {n: a[n].to(d) for n, d in zip(names, (q, k, v), strict=True)}
    assert_refused(kind, a, "|".join(names), TypeError)


@pytest.mark.parametrize("heads_q, heads_kv", [(3, 2), (33, 2), (2, 3), (0, 2), (2, 0), (1, 2)])
@pytest.mark.parametrize("kind", cases.FUNCTIONS)
def test_heads(kind, heads_q, heads_kv):
    a = {n: x for n, x in good(kind).items() if n in cases.POSITIONAL[kind] or n.startswith(("cu_", "max_"))}
    names = cases.POSITIONAL[kind][:3]
    for name, heads in zip(names, (heads_q, heads_kv, heads_kv), strict=True):
        a[name] = torch.randn(*a[name].shape[:-2], heads, 16)
    assert "heads" in assert_refused(kind, a, "q", ValueError)


@pytest.mark.parametrize("name, dim", [("q", 0), ("k", 0), ("v", 0)])
def test_head_dim_of_nothing(name, dim):
    q = torch.randn(1, 2, 1, dim if name != "v" else 8)
    v = torch.randn(1, 2, 1, dim if name == "v" else 8)
    with pytest.raises(ValueError, match="head_dim"):
        xattn.attention(q, torch.randn(q.shape), v)


# ---------------------------------------------------------------- gradients
def test_out_and_gradients_exclude_each_other():
    a = {n: x for n, x in good("attention").items() if n in "qkv"}
    out = torch.full_like(a["q"], NAN)
    a["k"].requires_grad_()
    with pytest.raises(ValueError, match="out: got a gradient is asked for; allowed: .*no_grad"):
        xattn.attention(**a, out=out)
    assert out.isnan().all()
    with torch.no_grad():
        xattn.attention(**a, out=out)
    assert not out.isnan().any()
    a["k"].requires_grad_(False)
    with pytest.raises(ValueError, match="out"):
        xattn.attention(**a, out=out.clone().requires_grad_())


@pytest.mark.parametrize("name", ["q", "k_cache", "sinks", "k_new"])
def test_paged_calls_have_no_gradient(name):
    a = good("paged")
    del a["out"]
    before = a["k_cache"].clone()
    a[name].requires_grad_()
    with pytest.raises(ValueError, match=r"no_grad"):
        call("paged", a)
    assert torch.equal(a["k_cache"], before), "the cache was written"
    with torch.no_grad():
        call("paged", a)


def test_quantised_results_have_no_gradient():
    q = torch.randn(1, 2, 1, 8, requires_grad=True)
    with pytest.raises(ValueError, match="out_dtype"):
        xattn.attention(q, q, q, epilogue=xattn.epilogues.quantize(torch.tensor(1.0)))


# ---------------------------------------------------------------- paged: what only goes together
@pytest.mark.parametrize("change, name", [
    ({"k_new": None}, "k_new"),
    ({"v_new": None}, "v_new"),
    ({"kv_layout": "HND"}, "k_new|v_new|k_cache|q"),
    ({"cu_seqlens_new": torch.tensor([0, 2, 4])}, "k_new"),
    ({"cu_seqlens_q": None}, "q"),
    ({"attn_mask": torch.ones(4, 2)}, "attn_mask"),
    ({"k_new": torch.ones(2, 2, 3, 16, dtype=torch.float16)}, "k_new"),
    ({"v_new": torch.ones(2, 2, 3, 15)}, "v_new"),
    ({"rotary": Rotary(torch.ones(16, 9), torch.ones(16, 9))}, "rotary"),
    ({"rotary": Rotary(torch.ones(16, 4, device="meta"), torch.ones(16, 4, device="meta"))}, "rotary"),
    ({"k_cache": torch.ones(9, 0, 3, 16), "v_cache": torch.ones(9, 0, 3, 16)}, "k_cache"),
    ({"v_cache": torch.ones(9, 5, 3, 16)}, "v_cache"),
])  # fmt: skip
def test_paged(change, name):
    assert_refused("paged", good("paged") | change, name)


# ---------------------------------------------------------------- user functions
@pytest.mark.parametrize(
    "fn", [lambda s: s, lambda s, b, h, i, j: s[0], lambda s, b, h, i, j: 1 / 0, lambda s, b, h, i, j: "x"]
)
def test_score_mods_that_fail(fn):
    with pytest.raises(ValueError, match="score_mod: .*test_errors.py"):
        xattn.attention(*(torch.ones(1, 2, 1, 8) for _ in range(3)), score_mod=fn)


def test_a_function_whose_control_flow_depends_on_values():
    with pytest.raises(xattn.UnsupportedError, match="torch.where"):
        xattn.attention(*(torch.ones(1, 2, 1, 8) for _ in range(3)), score_mod=lambda s, b, h, i, j: s if i > j else -s)


def test_a_mod_that_returns_several_elements():
    with pytest.raises(ValueError, match="mask_mod.*single element"):
        xattn.attention(*(torch.ones(1, 2, 1, 8) for _ in range(3)), mask_mod=lambda b, h, i, j: torch.ones(3) > i)


def test_captured_tensors_without_elements():
    """Nothing reads them where the batch is empty."""
    q = torch.ones(0, 2, 1, 8)
    table = torch.ones(0, dtype=torch.int64)
    assert xattn.attention(q, q, q, mask_mod=lambda b, h, i, j: table[b] != j).shape == q.shape


@pytest.mark.parametrize("args, name", [
    ((3,), "fn"),
    ((lambda o: o, torch.ones(1)), "aux"),
    ((lambda o: o, (3,)), "aux"),
    ((lambda o: o, 3), "aux"),
    ((lambda o: o, (), "int8"), "out_dtype"),
    ((lambda o: o, (), 8), "out_dtype"),
])  # fmt: skip
def test_epilogue(args, name):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: got .*allowed:"):
        Epilogue(*args)


def test_epilogue_to_a_dtype_that_nothing_stores():
    with pytest.raises(TypeError, match=r"out_dtype: got .*allowed:"):
        xattn.attention(
            *(torch.ones(1, 2, 1, 8) for _ in range(3)), epilogue=Epilogue(lambda o, b, h, i, d: o, (), torch.int64)
        )


@pytest.mark.parametrize("args, name", [
    ((3, torch.ones(4, 2)), "cos"),
    ((torch.ones(4, 2), None), "sin"),
    ((torch.ones(4, 2, dtype=torch.int32), torch.ones(4, 2)), "cos"),
    ((torch.ones(4, 2), torch.ones(4, 2, dtype=torch.bool)), "sin"),
    ((torch.ones(4), torch.ones(4)), "cos"),
    ((torch.ones(4, 2), torch.ones(4, 3)), "sin"),
    ((torch.ones(4, 0), torch.ones(4, 0)), "cos"),
    ((torch.ones(4, 2), torch.ones(4, 2, device="meta")), "sin"),
    ((torch.ones(4, 2), torch.ones(4, 2), 1), "interleaved"),
    ((torch.ones(4, 2), torch.ones(4, 2), None), "interleaved"),
])  # fmt: skip
def test_rotary(args, name):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: got .*allowed:"):
        Rotary(*args)


# ---------------------------------------------------------------- merge_states
OUT, LSE = torch.ones(2, 5, 3, 8), torch.ones(2, 3, 5)


@pytest.mark.parametrize("outs, lses, name", [
    ([], [], "outs"),
    ([OUT], [LSE, LSE], "outs"),
    ([OUT, 3], [LSE, LSE], "outs"),
    ([OUT, OUT], [LSE, None], "lses"),
    ([OUT, OUT[:1]], [LSE, LSE], "outs"),
    ([OUT, OUT], [LSE, LSE[:1]], "lses"),
    ([OUT, OUT.bfloat16()], [LSE, LSE], "outs"),
    ([OUT, OUT], [LSE, LSE.double()], "lses"),
    ([OUT, OUT], [LSE.bfloat16()] * 2, "lses"),
    ([OUT.int()] * 2, [LSE, LSE], "outs"),
    ([OUT, OUT.to("meta")], [LSE, LSE], "outs"),
    ([OUT, OUT], [LSE, LSE.to("meta")], "lses"),
    ([OUT, OUT], [LSE.transpose(1, 2)] * 2, "lses"),
    ([OUT[0, 0]], [LSE[0, 0]], "lses"),
    (3, [LSE], "outs"),
    ([OUT], None, "lses"),
])  # fmt: skip
def test_merge_states(outs, lses, name):
    with pytest.raises((TypeError, ValueError), match=rf"{name}\b.*: got .*allowed:"):
        xattn.merge_states(outs, lses)
