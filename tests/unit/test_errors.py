"""What no single argument shows: arguments that do not go together, values that only the device can see, gradients that
cannot be had, user functions that fail, and the classes beside the calls. One bad argument: test_validation.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from arguments import (
    NAN,
    POSITIONAL,
    assert_message,
    call,
    each_kind,
    explain,
    made,
    out_like,
    randn,
    rotary,
    unchanged,
)

import xattn


def assert_refused(kind: str, given: dict[str, Any], blamed: str, error: type[Exception]) -> str:
    """By the call, which writes nothing, and by ``explain``; returns the message of the call."""
    messages = []
    for question in (call, explain):
        with unchanged(given), pytest.raises(error) as caught:
            question(kind, given)
        assert_message(caught.value, blamed)
        messages.append(str(caught.value))
    return messages[0]


# ---------------------------------------------------------------- arguments that do not go together
@pytest.mark.parametrize("q, k, v", [
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float16),
    (torch.float64, torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2),
    (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    (torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16),
    (torch.int8, torch.int8, torch.int8),
])  # fmt: skip
@each_kind
def test_dtypes_that_do_not_go_together(kind, q, k, v):
    given, names = made(kind, append=False), POSITIONAL[kind][:3]
    given |= {n: given[n].to(d) for n, d in zip(names, (q, k, v), strict=True)}
    assert_refused(kind, given, "|".join(names), TypeError)


@each_kind
@pytest.mark.parametrize("heads_q, heads_kv", [(3, 2), (33, 2), (2, 3), (0, 2), (2, 0), (1, 2)])
def test_heads(kind, heads_q, heads_kv):
    given, names = made(kind, append=False), POSITIONAL[kind][:3]
    for name, heads in zip(names, (heads_q, heads_kv, heads_kv), strict=True):
        t = given[name]
        given[name] = torch.randn(*t.shape[:-2], heads, t.shape[-1])
    assert "heads" in assert_refused(kind, given, "q", ValueError)


@pytest.mark.parametrize("name, dim", [("q", 0), ("k", 0), ("v", 0)])
def test_head_dim_of_nothing(name, dim):
    q = torch.randn(1, 2, 1, dim if name != "v" else 8)
    v = torch.randn(1, 2, 1, dim if name == "v" else 8)
    with pytest.raises(ValueError, match="head_dim"):
        xattn.attention(q, torch.randn(q.shape), v)


@pytest.mark.parametrize("kind", ["paged", "packed"])
def test_caches_of_another_layout_or_of_no_size(kind):
    assert_refused(kind, made(kind) | {"kv_layout": "HND"}, "k_new", ValueError)
    for append in (False, True):
        given = made(kind, append)
        given |= {name: given[name][:, :0] for name in ("k_cache", "v_cache")}
        assert "page_size 0" in assert_refused(kind, given, "k_cache", ValueError)


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


# ---------------------------------------------------------------- gradients
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


def test_no_gradient_through_a_quantised_output():
    q = torch.randn(1, 2, 1, 8, requires_grad=True)
    with pytest.raises(ValueError, match="out_dtype"):
        xattn.attention(q, q, q, epilogue=xattn.epilogues.quantize(torch.tensor(1.0)))


# ---------------------------------------------------------------- user functions
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


def test_epilogue_to_a_dtype_that_nothing_stores():
    with pytest.raises(TypeError, match=r"out_dtype: got .*allowed:"):
        xattn.attention(
            *(torch.ones(1, 2, 1, 8) for _ in range(3)),
            epilogue=xattn.Epilogue(lambda o, b, h, i, d: o, (), torch.int64),
        )


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
        (lambda o, s: (o, [s[0], None]), TypeError, "lses"),
        (lambda o, s: (o, [x.bfloat16() for x in s]), TypeError, "lses"),
        (lambda o, s: ([x.flatten(0, -2) for x in o], [x.flatten() for x in s]), ValueError, "lses"),
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
        ((randn(9, 4), randn(9, 4).bool()), TypeError, "sin"),
        ((3, randn(9, 4)), TypeError, "cos"),
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
