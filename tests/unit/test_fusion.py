"""User functions in attention: traced they compute what they compute, with gradients, also under torch.compile; and
what cannot be traced says so."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import xattn
from xattn import Epilogue, UnsupportedError, epilogues, fusion

BATCH, HEADS, SEQLEN_Q, SEQLEN_K, DIM = 2, 4, 5, 7, 16
CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(seqlen_q: int = SEQLEN_Q, seqlen_k: int = SEQLEN_K, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    lengths = (seqlen_q, seqlen_k, seqlen_k)
    return [randn(BATCH, n, HEADS, DIM, seed=s, dtype=dtype) for s, n in enumerate(lengths)]


def direct(q: Tensor, k: Tensor, v: Tensor, score_mod=None, mask_mod=None) -> Tensor:
    """Attention written out, the mods on whole index tensors."""
    s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(DIM)
    b = torch.arange(q.shape[0])[:, None, None, None]
    h = torch.arange(HEADS)[:, None, None]
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    if score_mod is not None:
        s = score_mod(s, b, h, i, j)
    if mask_mod is not None:
        s = s.masked_fill(~mask_mod(b, h, i, j), -math.inf)
    p = torch.softmax(s, -1).nan_to_num(0)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture
def compiled():
    """``xattn.attention`` compiled, its user functions handed in from outside."""
    torch._dynamo.reset()
    yield torch.compile(lambda q, k, v, **mods: xattn.attention(q, k, v, **mods), fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


# ---------------------------------------------------------------- the functions people write
def alibi():
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs()}


def softcap(cap: float = 2.0):
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)}


def relative_bias():
    table = randn(HEADS, SEQLEN_Q + SEQLEN_K, seed=7)
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + SEQLEN_K]}


def documents():
    ids_q, ids_k = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1]]), torch.tensor([[0, 0, 0, 1, 1, 1, 3], [0] * 7])
    return {"mask_mod": lambda b, h, q_idx, kv_idx: ids_q[b, q_idx] == ids_k[b, kv_idx]}


def prefix_lm():
    prefix = torch.tensor([2, 5])
    return {"mask_mod": lambda b, h, q_idx, kv_idx: (kv_idx < prefix[b]) | (q_idx >= kv_idx)}


def sliding_window(left: int = 2):
    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= left

    def both(b, h, q_idx, kv_idx):
        return causal(b, h, q_idx, kv_idx) & near(b, h, q_idx, kv_idx)

    return {"mask_mod": both}


def gemma():
    return softcap(5.0) | sliding_window(3)


def t5_buckets(num_buckets: int = 8, max_distance: int = 16):
    table = randn(num_buckets, HEADS, seed=9)
    exact = num_buckets // 2

    def mod(score, b, h, q_idx, kv_idx):
        n = (q_idx - kv_idx).clamp(min=0)
        far = torch.log(n.float().clamp(min=1) / exact) / math.log(max_distance / exact) * (num_buckets - exact)
        bucket = torch.where(n < exact, n, (exact + far.long()).clamp(max=num_buckets - 1))
        return score + table[bucket, h]

    return {"score_mod": mod}


def document_penalty():
    """A score_mod that captures whole numbers."""
    kind = torch.tensor([0, 1, 1, 0, 2, 2, 1])
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: score - kind[kv_idx] * 0.5}


def one_head_only():
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: torch.where(h == 1, score * 3, score)}


def with_partial():
    def mod(table, factor, score, b, h, q_idx, kv_idx):
        return score * factor * table[h]

    return {"score_mod": functools.partial(mod, randn(HEADS, seed=4), 0.7)}


class Bias:
    def __init__(self) -> None:
        self.table = randn(HEADS, SEQLEN_K, seed=5)

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.table[h, kv_idx]

    def method(self, score, b, h, q_idx, kv_idx):
        return score + self.table[h, kv_idx]


def a_default():
    default = randn(HEADS, seed=6)

    def mod(score, b, h, q_idx, kv_idx, table=default, *, factor=0.5):
        return score * factor * table[h]

    return {"score_mod": mod}


def recursive():
    table = randn(HEADS, seed=6)

    def mod(score, b, h, q_idx, kv_idx, depth=2):
        return score if not depth else mod(score + table[h] * kv_idx, b, h, q_idx, kv_idx, depth - 1)

    return {"score_mod": mod}


MODS = {
    "alibi": alibi,
    "softcap": softcap,
    "relative bias": relative_bias,
    "documents": documents,
    "prefix-LM": prefix_lm,
    "sliding window": sliding_window,
    "gemma": gemma,
    "T5 buckets": t5_buckets,
    "document penalty": document_penalty,
    "one head only": one_head_only,
    "partial": with_partial,
    "callable object": lambda: {"score_mod": Bias()},
    "bound method": lambda: {"score_mod": Bias().method},
    "default argument": a_default,
    "recursive": recursive,
}


@pytest.mark.parametrize("name", MODS)
def test_as_flex_attention(name):
    """FlexAttention's own eager form gives the same numbers."""
    mods = MODS[name]()
    q, k, v = qkv()
    mask_mod, block_mask = mods.get("mask_mod"), None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, BATCH, HEADS, SEQLEN_Q, SEQLEN_K, device="cpu")
    wanted = flex_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), score_mod=mods.get("score_mod"), block_mask=block_mask
    )
    close(xattn.attention(q, k, v, **mods), wanted.transpose(1, 2))


@pytest.mark.parametrize("name", ["alibi", "softcap", "documents", "prefix-LM", "gemma", "one head only"])
def test_written_out(name):
    mods = MODS[name]()
    q, k, v = qkv(dtype=torch.float64)
    got = xattn.attention(q, k, v, **mods)
    torch.testing.assert_close(got, direct(q, k, v, **mods), rtol=1e-9, atol=1e-9)


def test_no_two_examples_are_the_same():
    """None of the examples is without effect."""
    q, k, v = qkv()
    results = [xattn.attention(q, k, v, **mods()) for mods in MODS.values()] + [xattn.attention(q, k, v)]
    for n, one in enumerate(results):
        assert not any(torch.allclose(one, other, atol=1e-4) for other in results[:n])


def test_forms_of_indexing():
    """Numbers, slices and an ellipsis beside the elements that index."""
    table = randn(BATCH, 3, HEADS, SEQLEN_K, seed=8)

    def mod(score, b, h, q_idx, kv_idx):
        return (
            score + table[b, 1, h, kv_idx] - table[b, ..., kv_idx][0, h] * table[b, :, h][2, kv_idx] + table[b][0, 1, 2]
        )

    def plain(score, b, h, q_idx, kv_idx):
        return score + table[b, 1, h, kv_idx] - table[b, 0, h, kv_idx] * table[b, 2, h, kv_idx] + table[b, 0, 1, 2]

    q, k, v = qkv()
    close(xattn.attention(q, k, v, score_mod=mod), direct(q, k, v, plain))


def test_constants_are_results():
    q, k, v = qkv()
    close(
        xattn.attention(q, k, v, score_mod=lambda *_: 1.0, mask_mod=lambda *_: True),
        v.mean(1, keepdim=True).expand_as(q),
    )
    assert not xattn.attention(q, k, v, mask_mod=lambda *_: False).any()


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 7), (5, 0), (0, 0)])
def test_without_queries_or_keys(seqlen_q, seqlen_k):
    mods = relative_bias() | prefix_lm()
    q, k, v = qkv(seqlen_q, seqlen_k)
    out, lse = xattn.attention(q, k, v, **mods, return_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((BATCH, HEADS, seqlen_q), -math.inf))


# ---------------------------------------------------------------- indices
def test_indices_in_varlen_count_within_the_sequence():
    """q_idx and kv_idx start at 0 in every sequence, whatever its place; b is its number."""
    lengths_q, lengths_k = (3, 0, 5), (6, 2, 4)
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0) for n in (lengths_q, lengths_k))
    q, k, v = (randn(n, HEADS, DIM, seed=s) for s, n in enumerate((8, 12, 12)))
    table = randn(3, HEADS, 8, 8, seed=3)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[b, h, q_idx, kv_idx]

    def mask(b, h, q_idx, kv_idx):
        return q_idx + 1 >= kv_idx

    out = xattn.attention_varlen(q, k, v, cu_q, cu_k, 5, 6, score_mod=mod, mask_mod=mask)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if rows.start == rows.stop:
            continue
        wanted = direct(
            q[rows][None],
            k[keys][None],
            v[keys][None],
            lambda s, _, h, i, j, b=b: s + table[b, h, i, j],
            lambda _, h, i, j: i + 1 >= j,
        )
        close(out[rows], wanted[0])


@pytest.mark.parametrize("packed", [False, True])
def test_indices_in_paged_calls_are_positions(packed):
    """q_idx is length - seqlen_q + i: a mod means the same in prefill and in decode."""
    lengths, page_size, new = torch.tensor([6, 3]), 4, 2
    k_cache, v_cache = randn(4, page_size, HEADS, DIM, seed=1), randn(4, page_size, HEADS, DIM, seed=2)
    page_table = torch.tensor([[2, 0], [3, 1]])
    q = randn(2, new, HEADS, DIM, seed=3)
    table = randn(2, HEADS, 8, 8, seed=4)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[b, h, q_idx, kv_idx]

    def mask(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    options = {"cu_seqlens_q": torch.tensor([0, new, 2 * new]), "max_seqlen_q": new} if packed else {}
    given = q.flatten(0, 1) if packed else q
    out = xattn.attention_paged(
        given, k_cache, v_cache, page_table, lengths, score_mod=mod, mask_mod=mask, **options
    ).view_as(q)
    for b, n in enumerate(lengths.tolist()):
        k, v = (c[page_table[b]].flatten(0, 1)[None, :n] for c in (k_cache, v_cache))
        shift = n - new
        wanted = direct(
            q[b : b + 1],
            k,
            v,
            lambda s, _, h, i, j, b=b, shift=shift: s + table[b, h, i + shift, j],
            lambda _, h, i, j, shift=shift: i + shift >= j,
        )
        close(out[b], wanted[0])


# ---------------------------------------------------------------- gradients of what is captured
GLOBAL = torch.nn.Parameter(randn(HEADS, seed=11))


def holders():
    """Every way in which a function may hold a tensor: (function, tensor)."""
    w = GLOBAL

    def in_closure(score, b, h, q_idx, kv_idx):
        return score * w[h]

    def computed(score, b, h, q_idx, kv_idx):
        return score * torch.sigmoid(w)[h]

    def inner(h):
        return torch.sigmoid(w)[h]

    def nested(score, b, h, q_idx, kv_idx):
        return score * inner(h)

    def default(score, b, h, q_idx, kv_idx, weight=w):
        return score * torch.sigmoid(weight)[h]

    def from_global(score, b, h, q_idx, kv_idx):
        return score * torch.sigmoid(GLOBAL)[h]

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = w

        def forward(self, score, b, h, q_idx, kv_idx):
            return score * torch.sigmoid(self.weight)[h]

    module, in_list = Module(), [w]
    sigmoid = {"computed": computed, "nested": nested, "default": default, "global": from_global, "module": module}
    sigmoid["list"] = lambda score, b, h, q_idx, kv_idx: score * torch.sigmoid(in_list[0])[h]
    sigmoid["partial"] = functools.partial(lambda weight, s, b, h, i, j: s * torch.sigmoid(weight)[h], w)
    found = {name: (fn, lambda s, b, h, i, j: s * torch.sigmoid(w)[h]) for name, fn in sigmoid.items()}
    return found | {"closure": (in_closure, in_closure)}


@pytest.mark.parametrize("name", holders())
def test_gradients_of_captured_tensors(name):
    fn, plain = holders()[name]
    inputs = [t.requires_grad_() for t in qkv()]
    seed = randn(BATCH, SEQLEN_Q, HEADS, DIM, seed=12)
    out, wanted = xattn.attention(*inputs, score_mod=fn), direct(*inputs, plain)
    close(out, wanted)
    grads, wanted_grads = (torch.autograd.grad(x, [*inputs, GLOBAL], seed) for x in (out, wanted))
    assert wanted_grads[-1].abs().max() > 0.1
    for got, want in zip(grads, wanted_grads, strict=True):
        close(got, want)


def test_gradient_beside_whole_numbers():
    """Of two captured tensors, one has a gradient and one cannot have any."""
    bucket, table = torch.arange(SEQLEN_K) % 3, randn(3, seed=1).requires_grad_()
    q, k, v = qkv()

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[bucket[kv_idx]]

    out, wanted = xattn.attention(q, k, v, score_mod=mod), direct(q, k, v, mod)
    close(out, wanted)
    close(*(torch.autograd.grad(x.square().sum(), table)[0] for x in (out, wanted)))


# ---------------------------------------------------------------- what cannot be
def test_conditions_on_values_are_refused():
    def by_distance(score, b, h, q_idx, kv_idx):
        if q_idx > kv_idx:
            return score
        return score * 2

    q, k, v = qkv()
    with pytest.raises(UnsupportedError) as caught:
        xattn.attention(q, k, v, score_mod=by_distance)
    text = str(caught.value)
    assert text.startswith(
        f"score_mod: by_distance ({__file__}:{by_distance.__code__.co_firstlineno}) cannot be traced"
    )
    assert "torch.where" in text


@pytest.mark.parametrize(
    "options",
    [
        {"score_mod": lambda s, b, h, i, j: s * int(h)},
        {"score_mod": lambda s, b, h, i, j: s if s.item() > 0 else -s},
        {"score_mod": lambda s, b, h, i, j: s + [1, 2, 3, 4][h]},
        {"mask_mod": lambda b, h, i, j: i >= j and j > 2},
        {"epilogue": Epilogue(lambda o, b, h, i, d: o if o > 0 else 0.0)},
    ],
    ids=["int", "item", "list", "and", "epilogue"],
)
def test_values_read_by_python_are_refused(options):
    with pytest.raises(UnsupportedError, match=f"{next(iter(options))}: <lambda> .* cannot be traced"):
        xattn.attention(*qkv(), **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"score_mod": lambda s, b, h: s}, r"It is called as score_mod\(value, b, h, q_idx, kv_idx, \*aux\)"),
        ({"mask_mod": lambda s, b, h, i, j: s}, r"It is called as mask_mod\(b, h, q_idx, kv_idx, \*aux\)"),
        ({"epilogue": Epilogue(lambda o: o)}, r"It is called as epilogue\(value, b, h, q_idx, d, \*aux\)"),
        ({"score_mod": lambda s, *_: s * torch.ones(3)}, r"it returned shape \(3,\); allowed: a single element"),
        ({"score_mod": lambda s, *_: s[None]}, r"it returned shape \(1,\)"),
        ({"score_mod": lambda s, *_: None}, "NoneType"),
        ({"score_mod": lambda s, *_: (s, s)}, "tuple"),
        ({"mask_mod": lambda b, h, i, j: (i - j) * 1.0}, "it returned torch.float32; allowed: a boolean"),
        ({"mask_mod": lambda b, h, i, j: i & j}, "it returned torch.int64; allowed: a boolean"),
        ({"score_mod": lambda s, *_: 1 / 0}, "division by zero"),
        ({"score_mod": lambda s, *_: s * 1j}, "it returned torch.complex64; allowed: a real number"),
        ({"score_mod": lambda s, b, h, i, j: i >= j}, "it returned torch.bool; allowed: a real number"),
        ({"score_mod": lambda *_: True}, "it returned torch.bool; allowed: a real number"),
        ({"epilogue": Epilogue(lambda o, *_: torch.sqrt(o + 0j))}, "it returned torch.complex64; allowed: a real"),
        ({"score_mod": lambda s, *_: s + torch.rand(())}, "it draws random numbers .*; allowed: functions of their"),
        ({"score_mod": lambda s, *_: torch.nn.functional.dropout(s)}, "it draws random numbers"),
        ({"mask_mod": lambda b, h, i, j: torch.rand_like(i * 1.0) > 0.5}, "it draws random numbers"),
        ({"epilogue": Epilogue(lambda o, *_: o + torch.randn(()))}, "it draws random numbers"),
    ],
)
def test_functions_that_do_not_fit(options, words):
    role = next(iter(options))
    with pytest.raises(ValueError, match=words) as caught:
        xattn.attention(*qkv(), **options)
    assert str(caught.value).startswith(f"{role}: ") and "It is called as" in str(caught.value)


SMALL = torch.ones(3)
TOO_SMALL = {
    "keys": {"score_mod": lambda s, b, h, i, j: s + SMALL[j]},
    "queries": {"score_mod": lambda s, b, h, i, j: s + SMALL[i]},
    "heads": {"mask_mod": lambda b, h, i, j: SMALL[h] > 0},
    "channels": {"epilogue": Epilogue(lambda o, b, h, i, d, x: o + x[d], (SMALL,))},
}


@pytest.mark.parametrize("name", TOO_SMALL)
@pytest.mark.parametrize("kind", ["attention", "varlen", "paged", "packed"])
def test_a_captured_tensor_that_is_too_small(kind, name):
    """It is named, with the function, before anything is written."""
    given, function = in_kind(kind), next(iter(TOO_SMALL[name]))
    for extra in ({}, {"out": torch.full(given["q"].shape, 7.0)}):
        before = {n: t.clone() for n, t in (given | extra).items() if isinstance(t, Tensor)}
        with pytest.raises(ValueError, match=f"^{function}: <lambda> .* indexes a captured tensor .*shapes .3,"):
            asked(kind, given | extra, **TOO_SMALL[name])
        assert all(torch.equal((given | extra)[n], t) for n, t in before.items())


def in_kind(kind: str) -> dict[str, object]:
    """Good arguments of one attention: BATCH sequences of SEQLEN_Q queries and SEQLEN_K keys; in paged calls two of the
    keys are new."""
    q, k, v = qkv()
    if kind == "attention":
        return {"q": q, "k": k, "v": v}
    offsets = {f"cu_seqlens_{s}": torch.arange(BATCH + 1) * n for s, n in (("q", SEQLEN_Q), ("k", SEQLEN_K))}
    longest = {"max_seqlen_q": SEQLEN_Q, "max_seqlen_k": SEQLEN_K}
    if kind == "varlen":
        return {n: t.flatten(0, 1) for n, t in zip("qkv", (q, k, v), strict=True)} | offsets | longest
    new, page_size = 2, 4
    caches = [torch.full((2 * BATCH, page_size, HEADS, DIM), 9.0) for _ in "kv"]
    for cache, x in zip(caches, (k, v), strict=True):
        cache.unflatten(0, (BATCH, 2)).flatten(1, 2)[:, : SEQLEN_K - new] = x[:, :-new]
    given = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "page_table": torch.arange(2 * BATCH).view(BATCH, 2)}
    given |= {"seqlens_k": torch.full((BATCH,), SEQLEN_K - new), "k_new": k[:, -new:], "v_new": v[:, -new:]}
    if kind == "packed":
        given |= {n: given[n].flatten(0, 1) for n in ("q", "k_new", "v_new")}
        given |= {"cu_seqlens_q": offsets["cu_seqlens_q"], "cu_seqlens_new": torch.arange(BATCH + 1) * new}
    return given


def asked(kind: str, given: dict, **options):
    fn = {"attention": xattn.attention, "varlen": xattn.attention_varlen}.get(kind, xattn.attention_paged)
    return fn(**given, **options)


@pytest.mark.parametrize("role", ["score_mod", "mask_mod"])
def test_not_a_function(role):
    with pytest.raises(TypeError, match=f"{role}: got int; allowed: a function, or None"):
        xattn.attention(*qkv(), **{role: 3})


def test_unknown_key():
    for role in ("score_mod", "mask_mod", "epilogue"):
        with pytest.raises(UnsupportedError, match="this process has traced no such function"):
            torch.ops.xattn.attention(*qkv(), **{role: f"{role}:0123456789abcdef"})


def test_keys():
    """The same code gives the same key, whatever it captured; other code or another role another."""

    def make(value, sign=1):
        table = torch.full((HEADS,), float(value))
        return lambda s, b, h, i, j: s + sign * table[h]

    key, aux = fusion.trace("score_mod", make(1), CPU)
    assert key.startswith("score_mod:") and fusion.lookup(key).key == key
    again, other = fusion.trace("score_mod", make(2), CPU)
    assert again == key and (aux[0][0], other[0][0]) == (1, 2)
    assert fusion.trace("score_mod", make(1, sign=-1), CPU)[0] != key
    assert fusion.lookup("") is None and fusion.intern(None) == ""


def test_captured_tensors_are_arguments_and_come_last():
    extra, held = torch.ones(3), torch.ones(HEADS)
    _, aux = fusion.trace("epilogue", lambda o, b, h, i, d, x: o + x[0] * held[h], CPU, [extra])
    assert [t is u for t, u in zip(aux, (extra, held), strict=True)] == [True, True]


# ---------------------------------------------------------------- epilogues
def test_epilogue_with_aux():
    q, k, v = qkv()
    gain, shift = randn(HEADS, DIM, seed=1), randn(DIM, seed=2)

    def fn(o, b, h, q_idx, d, gain, shift):
        return o * gain[h, d] + shift[d] + q_idx - 10 * b

    where = torch.arange(SEQLEN_Q)[:, None, None] - 10 * torch.arange(BATCH)[:, None, None, None]
    plain = xattn.attention(q, k, v)
    close(xattn.attention(q, k, v, epilogue=Epilogue(fn, (gain, shift))), plain * gain + shift + where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_and_gate(dtype):
    q, k, v = qkv(dtype=dtype)
    x = randn(*q.shape, seed=5, dtype=dtype)
    plain = xattn.attention(q.float(), k.float(), v.float())
    for epilogue, wanted in (
        (epilogues.residual(x), plain + x),
        (epilogues.gate(x), plain * torch.nn.functional.silu(x.float())),
    ):
        got = xattn.attention(q, k, v, epilogue=epilogue)
        assert got.dtype == dtype
        torch.testing.assert_close(got, wanted.to(dtype))


EACH_KIND = pytest.mark.parametrize("kind", ["attention", "varlen", "paged", "packed"])


@EACH_KIND
@pytest.mark.parametrize("make", ["residual", "gate", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_tensors_have_the_shape_of_the_output(kind, make, dtype, strided):
    given = {n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in in_kind(kind).items()}
    x, y = (randn(*given["q"].shape, seed=s, dtype=dtype) for s in (5, 6))
    if strided:
        x = torch.stack([x, x], -1)[..., 0]
    silu = torch.nn.functional.silu
    epilogue = {
        "residual": lambda: epilogues.residual(x),
        "gate": lambda: epilogues.gate(y),
        "both": lambda: (
            Epilogue(lambda o, b, h, i, d, s: o * s, (torch.tensor(2.0),))
            .then(epilogues.residual(x))
            .then(Epilogue(lambda o, *_: o + 1))
            .then(epilogues.gate(y))
        ),
    }[make]()
    plain = asked(kind, given).float()
    wanted = {
        "residual": lambda: plain + x.float(),
        "gate": lambda: plain * silu(y.float()),
        "both": lambda: (2 * plain + x.float() + 1) * silu(y.float()),
    }[make]()
    names = {"attention": "attention", "varlen": "varlen"}
    assert xattn.supported(**given, kind=names.get(kind, "paged"), epilogue=epilogue)
    got = asked(
        kind,
        in_kind(kind) | {n: t for n, t in given.items() if "cache" not in n} | caches_of(kind, dtype),
        epilogue=epilogue,
    )
    torch.testing.assert_close(
        got.float(), wanted, rtol=2e-2 if dtype.itemsize == 2 else 1e-4, atol=2e-2 if dtype.itemsize == 2 else 1e-5
    )


def caches_of(kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: t.to(dtype) for n, t in in_kind(kind).items() if n.endswith("_cache")}


@EACH_KIND
@pytest.mark.parametrize("make", ["residual", "gate"])
@pytest.mark.parametrize("change", ["one row less", "broadcast", "4-d and 3-d", "width", "heads"])
def test_tensors_of_another_shape_are_refused(kind, make, change):
    given = in_kind(kind)
    x = torch.ones(given["q"].shape)
    x = {
        "one row less": lambda: x[..., :-1, :, :],
        "broadcast": lambda: x[..., :1, :, :],
        "4-d and 3-d": lambda: x[None] if x.dim() == 3 else x.flatten(0, 1),
        "width": lambda: x[..., :-1],
        "heads": lambda: x[..., :-1, :],
    }[change]()
    epilogue = getattr(epilogues, make)(x)
    out = torch.full(given["q"].shape, 7.0)
    before = {n: t.clone() for n, t in given.items() if isinstance(t, Tensor)}
    for options in ({}, {"out": out}):
        with pytest.raises(
            ValueError, match="^epilogue: got a tensor of shape .*; allowed: .*, the shape of the output"
        ):
            asked(kind, given, epilogue=epilogue, **options)
    with pytest.raises(ValueError, match="^epilogue: got a tensor of shape"):
        xattn.explain(**given, kind=kind if kind in ("attention", "varlen") else "paged", epilogue=epilogue)
    assert (out == 7).all() and all(torch.equal(given[n], t) for n, t in before.items())
    with pytest.raises(ValueError, match="^q: got shape"):
        asked(kind, given | {"q": given["q"][0]}, epilogue=epilogue)


def test_tensors_of_the_output_and_rows_of_no_sequence():
    """Sequences of different lengths, a row of padding, more queries than keys, and an empty sequence."""
    q, k = randn(8, HEADS, DIM, seed=1), randn(9, HEADS, DIM, seed=2)
    offsets = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 2, 6, 9])
    x = randn(8, HEADS, DIM, seed=3).requires_grad_()
    plain = xattn.attention_varlen(q, k, k, *offsets, 4, 4)
    got = xattn.attention_varlen(q, k, k, *offsets, 4, 4, epilogue=epilogues.residual(x))
    close(got[:7], (plain + x)[:7])
    assert not got[7].any()
    assert torch.equal(torch.autograd.grad(got.sum(), x)[0][:, 0, 0], torch.tensor([1.0] * 7 + [0.0]))


def test_epilogues_can_be_pickled_and_printed():
    x = randn(BATCH, SEQLEN_Q, HEADS, DIM, seed=5)
    q, k, v = qkv()
    for epilogue, words in (
        (epilogues.residual(x), ["residual", "(2, 5, 4, 16)"]),
        (epilogues.gate(x), ["gate"]),
        (epilogues.quantize(torch.tensor(0.1), torch.int8), ["quantize", "torch.int8"]),
        (epilogues.residual(x).then(epilogues.gate(x)).then(epilogues.quantize(torch.tensor(0.1))), ["then", "gate"]),
        (Epilogue(doubled, out_dtype=torch.float16), ["doubled", "torch.float16"]),
    ):
        assert all(word in repr(epilogue) for word in words)
        for again in (pickle.loads(pickle.dumps(epilogue)), copy.deepcopy(epilogue)):
            a, b = (xattn.attention(q, k, v, epilogue=e).float() for e in (epilogue, again))
            assert torch.equal(a, b) and repr(again) == repr(epilogue)


def doubled(o, b, h, q_idx, d):
    return o * 2


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: epilogues.residual(None), TypeError, "x: got NoneType; allowed: a tensor of the shape of the output"),
        (lambda: epilogues.gate(1.0), TypeError, "x: got float; allowed: a tensor"),
        (lambda: epilogues.quantize(0.5), TypeError, "scale: got float; allowed: a tensor of one float32 number"),
        (lambda: epilogues.quantize(torch.ones(2)), ValueError, r"scale: got torch.float32 \(2,\); allowed"),
        (lambda: epilogues.quantize(torch.tensor(1)), ValueError, r"scale: got torch.int64 \(\); allowed"),
        (lambda: epilogues.quantize(torch.tensor(1.0), "int8"), TypeError, "dtype: got 'int8'; allowed: .*torch.int8"),
        (lambda: epilogues.quantize(torch.tensor(1.0), torch.bool), TypeError, "dtype: got torch.bool; allowed: "),
        (lambda: epilogues.quantize(torch.tensor(1.0), torch.float16), TypeError, "dtype: got torch.float16; allowed"),
        (lambda: epilogues.quantize(torch.tensor(1.0), None), TypeError, "dtype: got None; allowed"),
    ],
)
def test_ready_made_epilogues_refuse(make, error, words):
    with pytest.raises(error, match=f"^{words}"):
        make()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_quantize(dtype):
    q, k, v = qkv()
    scale = torch.tensor(0.003)  # small: some values are clamped
    plain = xattn.attention(q, k, v) / scale
    got = xattn.attention(q, k, v, epilogue=epilogues.quantize(scale, dtype))
    assert got.dtype == dtype
    if dtype.is_floating_point:
        top = torch.finfo(dtype).max
        wanted = plain.clamp(-top, top).to(dtype)
        assert (got.float() - wanted.float()).abs().max() <= wanted.float().abs().max() / 8
        assert (got.float() == wanted.float()).float().mean() > 0.99 and not got.float().isnan().any()
    else:
        info = torch.iinfo(dtype)
        wanted = plain.round().clamp(info.min, info.max)
        assert (got.float() - wanted).abs().max() <= 1 and (got.float() == wanted).float().mean() > 0.99
        assert (got == info.max).any() and (got == info.min).any()


def test_quantize_takes_one_number_of_any_shape():
    q, k, v = qkv()
    one, other = (
        xattn.attention(q, k, v, epilogue=epilogues.quantize(torch.full(shape, 0.05), torch.int8))
        for shape in ((), (1, 1))
    )
    assert torch.equal(one, other)


def test_then():
    """First the one, then the other, each with its own aux; the last out_dtype counts."""
    q, k, v = qkv()
    x, y = randn(*q.shape, seed=5), randn(*q.shape, seed=6)
    plain, silu = xattn.attention(q, k, v), torch.nn.functional.silu
    close(xattn.attention(q, k, v, epilogue=epilogues.residual(x).then(epilogues.gate(y))), (plain + x) * silu(y))
    close(xattn.attention(q, k, v, epilogue=epilogues.gate(y).then(epilogues.residual(x))), plain * silu(y) + x)
    three = epilogues.residual(x).then(epilogues.gate(y)).then(epilogues.residual(y))
    close(xattn.attention(q, k, v, epilogue=three), (plain + x) * silu(y) + y)
    quantized = epilogues.residual(x).then(epilogues.quantize(torch.tensor(0.1), torch.int8))
    got = xattn.attention(q, k, v, epilogue=quantized)
    wanted = ((plain + x) / 0.1).round().clamp(-128, 127)
    assert got.dtype == torch.int8 and (got.float() - wanted).abs().max() <= 1
    assert Epilogue(lambda o, *_: o, out_dtype=torch.float16).then(epilogues.residual(x)).out_dtype == torch.float16


@pytest.mark.parametrize("make", ["residual", "gate"])
def test_gradients_through_epilogues(make):
    inputs = [t.requires_grad_() for t in (*qkv(), randn(BATCH, SEQLEN_Q, HEADS, DIM, seed=5))]
    *parts, x = inputs
    out = xattn.attention(*parts, epilogue=getattr(epilogues, make)(x))
    plain = direct(*parts)
    wanted = plain + x if make == "residual" else plain * torch.nn.functional.silu(x)
    close(out, wanted)
    seed = randn(*out.shape, seed=6)
    for got, want in zip(*(torch.autograd.grad(o, inputs, seed) for o in (out, wanted)), strict=True):
        assert want.abs().max() > 0.01
        close(got, want)


def test_out_dtype():
    q, k, v = qkv(dtype=torch.bfloat16)
    got = xattn.attention(q, k, v, epilogue=Epilogue(lambda o, *_: o * 2, out_dtype=torch.float32))
    assert got.dtype == torch.float32
    close(got, 2 * xattn.attention(*(t.float() for t in (q, k, v))))


@pytest.mark.parametrize(
    "args, words",
    [
        ((3,), "fn: got int; allowed: a function"),
        ((None,), "fn: got NoneType"),
        ((len, torch.ones(2)), "aux: got Tensor; allowed: a tuple or list of tensors"),
        ((len, (1.0,)), "aux: got tuple; allowed: a tuple or list of tensors"),
        ((len, None), "aux: got NoneType"),
        ((len, (), "fp8"), "out_dtype: got 'fp8'; allowed: a torch.dtype or None"),
    ],
)
def test_epilogue_refuses(args, words):
    with pytest.raises(TypeError, match=words):
        Epilogue(*args)


def test_epilogue_types():
    with pytest.raises(TypeError, match="epilogue: got function; allowed: an xattn.Epilogue or None"):
        xattn.attention(*qkv(), epilogue=lambda o, b, h, i, d: o)
    with pytest.raises(TypeError, match="other: got int; allowed: an xattn.Epilogue"):
        Epilogue(lambda o, *_: o).then(3)
    with pytest.raises(TypeError, match="out_dtype"):
        xattn.attention(*qkv(), epilogue=Epilogue(lambda o, *_: o, out_dtype=torch.int64))
    with pytest.raises(TypeError):
        epilogues.quantize(0.5)
    with pytest.raises(TypeError):
        epilogues.residual(None)


# ---------------------------------------------------------------- torch.compile
def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ["alibi", "relative bias", "documents", "gemma", "T5 buckets", "default argument"])
def test_compile(compiled, name):
    mods = MODS[name]()
    q, k, v = qkv()
    close(compiled(q, k, v, **mods), xattn.attention(q, k, v, **mods))


class Changing:
    """A function and the means to change what it holds."""

    def __init__(self, value, form):
        def mod(score, b, h, q_idx, kv_idx):
            return form(score, value, h, kv_idx)

        def change(new):
            nonlocal value
            value = new

        self.mod, self.change = mod, change


def by_size(score, table, h, kv_idx):
    """The size of a captured tensor, as a number of Python's."""
    return score + table[(kv_idx + h).clamp(max=table.shape[0] - 1)] / table.shape[0]


CHANGES = {
    "float": (lambda s, x, h, j: s * x, [2.0, 3.0, 4.5]),
    "int": (lambda s, x, h, j: s * (j + x), [2, 3, 7]),
    "int as Python's": (lambda s, x, h, j: sum([s] * x), [1, 3, 4]),
    "float as Python's": (lambda s, x, h, j: s * math.log(x), [2.0, 3.0, 4.5]),
    "flag": (lambda s, x, h, j: s * 3 if x else s, [True, False, True]),
    "word": (lambda s, x, h, j: s * 3 if x == "much" else s, ["much", "little", "much"]),
    "None": (lambda s, x, h, j: s if x is None else s * x, [None, 3.0, None]),
    "tensor": (lambda s, x, h, j: s * x[h], [randn(HEADS, seed=n) for n in range(3)]),
    "other function": (lambda s, x, h, j: x(s), [lambda s: s * 2, lambda s: s * 3, torch.tanh]),
    "size": (by_size, [randn(n, seed=n) for n in (3, 5, 9)]),
    "tensor of another size": (lambda s, x, h, j: s * x[h], [randn(n, seed=n) for n in (4, 6, 9)]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_compile_sees_what_changes(compiled, name):
    form, values = CHANGES[name]
    holder = Changing(values[0], form)
    q, k, v = qkv()
    results = []
    for value in values:
        holder.change(value)
        wanted = xattn.attention(q, k, v, score_mod=holder.mod)
        close(compiled(q, k, v, score_mod=holder.mod), wanted)
        results.append(wanted)
    assert not torch.allclose(results[0], results[1], atol=1e-4), "the values make no difference"


@pytest.mark.parametrize(
    "values", [[2.0, 3.0], [True, False], [randn(HEADS, seed=1), randn(HEADS, seed=2)]], ids=["float", "flag", "tensor"]
)
def test_compile_sees_what_inner_functions_hold(compiled, values):
    def form(score, value, h, kv_idx):
        return (score * 3 if value else score) if isinstance(value, bool) else score * value + h

    holder = Changing(values[0], lambda s, x, h, j: form(s, x if not isinstance(x, Tensor) else x[h], h, j))

    def outer(score, b, h, q_idx, kv_idx):
        return holder_mod(score, b, h, q_idx, kv_idx) * 2

    holder_mod, (q, k, v) = holder.mod, qkv()
    for value in values:
        holder.change(value)
        close(compiled(q, k, v, score_mod=outer), xattn.attention(q, k, v, score_mod=outer))


FACTOR = 2.0


def by_global(score, b, h, q_idx, kv_idx):
    return score * FACTOR


def test_compile_sees_a_global_change(compiled, monkeypatch):
    q, k, v = qkv()
    for factor in (2.0, 5.0, 0.1):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        close(compiled(q, k, v, score_mod=by_global), direct(q, k, v, lambda s, *_, factor=factor: s * factor))


def test_compile_once_for_new_tensors_and_whole_numbers(compiled):
    torch._dynamo.utils.counters.clear()
    q, k, v = qkv()

    def make(table, shift):
        return lambda s, b, h, i, j: s + table[h] * (i - j + shift)

    for n in range(2, 7):
        mods = {"score_mod": make(randn(HEADS, seed=n), n)}
        close(compiled(q, k, v, **mods), xattn.attention(q, k, v, **mods))
    assert graphs() <= 2, "the first, and one where the number is an argument"


def test_compile_gradients_of_captured_tensors(compiled):
    table = randn(HEADS, seed=1).requires_grad_()
    q, k, v = (t.requires_grad_() for t in qkv())

    def mod(score, b, h, q_idx, kv_idx):
        return score * torch.sigmoid(table)[h]

    seed = randn(*q.shape, seed=3)
    for _ in range(2):
        got, want = (
            torch.autograd.grad(f(q, k, v, score_mod=mod), [q, k, v, table], seed) for f in (compiled, xattn.attention)
        )
        for x, y in zip(got, want, strict=True):
            close(x, y)
        with torch.no_grad():
            table.add_(1.0)


def test_compile_epilogues(compiled):
    q, k, v = qkv()
    for seed in (1, 2):
        x, bias = randn(*q.shape, seed=seed), randn(HEADS, seed=seed)
        for epilogue in (
            epilogues.residual(x).then(epilogues.gate(x)),
            Epilogue(lambda o, b, h, i, d, bias: o + bias[h], (bias,)),
            Epilogue(lambda o, b, h, i, d, bias, index: o + bias[index[h]], (bias, torch.tensor([1, 0, 3, seed]))),
            epilogues.quantize(torch.tensor(0.1 * seed), torch.int8),
        ):
            got, want = (f(q, k, v, epilogue=epilogue) for f in (compiled, xattn.attention))
            assert got.dtype == want.dtype
            close(got.float(), want.float())


@EACH_KIND
def test_compile_epilogues_of_every_kind(compiled, kind):
    fast = torch.compile(asked, fullgraph=True, dynamic=True, backend="aot_eager")
    epilogue = epilogues.residual(randn(*in_kind(kind)["q"].shape, seed=3))
    close(fast(kind, in_kind(kind), epilogue=epilogue), asked(kind, in_kind(kind), epilogue=epilogue))


class Holder:
    def __init__(self):
        self.factor, self.table = 2.0, torch.ones(HEADS)

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.factor


@pytest.mark.parametrize("what", ["object", "list", "attribute", "tensor of its own"])
def test_compile_refuses_what_might_change_unseen(compiled, what):
    holder, values = Holder(), [2.0]
    mod, words = {
        "object": (holder, "an object, Holder"),
        "list": (lambda s, b, h, i, j: s * values[0], r"values \(list\)"),
        "attribute": (lambda s, b, h, i, j: s * holder.factor, r"holder \(Holder\)"),
        "tensor of its own": (lambda s, b, h, i, j: s * torch.tensor([1.0, 2.0, 3.0, 4.0])[h], "tensor of its own"),
    }[what]
    with pytest.raises(Exception, match=f"(?s)score_mod: .*{words}.*hold"):
        compiled(*qkv(), score_mod=mod)
    assert xattn.attention(*qkv(), score_mod=mod).shape == (BATCH, SEQLEN_Q, HEADS, DIM)


def test_what_is_compiled_is_not_taken_for_exported(monkeypatch):
    """In code that torch 2.10 and 2.11 compile, is_exporting is always True."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    q, k, v = qkv()
    call = functools.partial(xattn.attention, score_mod=lambda s, b, h, i, j: s * 2)
    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(q, k, v), call(q, k, v))


@pytest.mark.parametrize("role", ["score_mod", "mask_mod", "epilogue"])
def test_export_refuses(role):
    options = {
        "score_mod": {"score_mod": lambda s, b, h, i, j: s * 2},
        "mask_mod": {"mask_mod": lambda b, h, i, j: i >= j},
        "epilogue": {"epilogue": Epilogue(lambda o, b, h, i, d: o * 2)},
    }[role]

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return xattn.attention(q, k, v, **options)

    with pytest.raises(UnsupportedError, match=f"{role}: user functions do not travel in exported modules"):
        torch.export.export(Model(), tuple(qkv()), strict=False)


# ---------------------------------------------------------------- elements, and their values
TABLE, DEEP = randn(8, 8, seed=21), randn(8, 3, 8, seed=22)
KEEP, KEEP_BYTES = torch.arange(8) % 3 > 0, (torch.arange(8) % 3).clamp(max=1).to(torch.uint8)
SMALL_IDS = torch.arange(8, dtype=torch.int8).flip(0)
T = torch.tensor


def elementwise(role: str, fn, given: Tensor) -> Tensor:
    """fn called for each element with its real coordinates: given (batch, heads, rows, width)."""
    results = []
    for at in itertools.product(*map(range, given.shape)):
        value = [] if role == "mask_mod" else [given[at].clone()]
        results.append(torch.as_tensor(fn(*value, *(torch.tensor(n) for n in at))))
    made = torch.stack(results).reshape(given.shape)
    return made if role == "mask_mod" else made.to(given.dtype)


def by_elements(options: dict, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    role, fn = next(iter(options.items()))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(DIM)
    if role == "score_mod":
        s = elementwise(role, fn, s)
    if role == "mask_mod":
        s = s.masked_fill(~elementwise(role, fn, s), -math.inf)
    out = torch.einsum("bhij,bjhd->bhid", torch.softmax(s, -1).nan_to_num(0), v)
    return (elementwise(role, fn.fn, out) if role == "epilogue" else out).transpose(1, 2)


MADE_OF_ELEMENTS = {
    "lists that index": {"score_mod": lambda s, b, h, i, j: s + TABLE[[i], [j]].sum()},
    "one list of elements": {"score_mod": lambda s, b, h, i, j: s + TABLE[[i, j]].sum()},
    "a list in a list": {"score_mod": lambda s, b, h, i, j: s + TABLE[[[i, j], [j, 0]]].sum()},
    "element beside a list": {"score_mod": lambda s, b, h, i, j: s + TABLE[i, [j, 0]].sum()},
    "tensor": {"score_mod": lambda s, b, h, i, j: s + T([[i, 2], [j, h]]).sum() * 0.1},
    "tensor, mixed": {"score_mod": lambda s, b, h, i, j: s + T([j, 0.5, True]).prod() * T((i,))[0]},
    "tensor of the score": {"score_mod": lambda s, b, h, i, j: T([s, j]).max()},
    "tensor, dtype": {"score_mod": lambda s, b, h, i, j: s + T([j, 2], dtype=torch.int32).sum() * 0.1},
    "tensor that indexes": {"score_mod": lambda s, b, h, i, j: s + TABLE[T([i, j])].sum()},
    "tensor of one": {"score_mod": lambda s, b, h, i, j: s + T(j) + torch.as_tensor(i) + torch.asarray(h)},
    "as_tensor": {"score_mod": lambda s, b, h, i, j: s + torch.as_tensor([i, j], dtype=torch.float64).sum() * 0.1},
    "asarray": {"score_mod": lambda s, b, h, i, j: s + torch.asarray([i, j]).sum() * 0.1},
    "new_tensor": {"score_mod": lambda s, b, h, i, j: s + s.new_tensor([j, 3]).sum() * 0.1},
    "new_tensor, dtype": {"score_mod": lambda s, b, h, i, j: s + i.new_tensor(data=[j], dtype=torch.float32)[0]},
    "causal": {"mask_mod": lambda b, h, i, j: (T([j]) <= T([i]))[0]},
    "mask": {"mask_mod": lambda b, h, i, j: TABLE[[i], [j]][0] > 0},
    "channel": {"epilogue": Epilogue(lambda o, b, h, i, d: o + T([d])[0])},
    "channel that indexes": {"epilogue": Epilogue(lambda o, b, h, i, d: o * TABLE[[i], [d // 2]][0])},
}


@pytest.mark.filterwarnings("ignore:.*copy construct", "ignore:Using a non-tuple")
@pytest.mark.parametrize("name", MADE_OF_ELEMENTS)
def test_tensors_made_of_elements(compiled, name):
    options, (q, k, v) = MADE_OF_ELEMENTS[name], qkv()
    wanted = by_elements(options, q, k, v)
    assert not torch.allclose(wanted, xattn.attention(q, k, v), atol=1e-3)
    close(xattn.attention(q, k, v, **options), wanted)
    close(compiled(q, k, v, **options), wanted)


def test_a_causal_mask_of_tensors_made():
    q, k, v = qkv(SEQLEN_K)
    close(xattn.attention(q, k, v, **MADE_OF_ELEMENTS["causal"]), xattn.attention(q, k, v, causal=True))


READ = {
    "tolist": lambda x, t: x + t.tolist(),
    "numpy": lambda x, t: x + int(t.numpy()),
    "numpy, force": lambda x, t: x + float(t.numpy(force=True)),
    "asarray": lambda x, t: x + float(np.asarray(t)),
    "array": lambda x, t: x + float(np.array([t])[0]),
    "numpy function": lambda x, t: x + float(np.maximum(t, 1)),
    "condition of numpy": lambda x, t: x if bool(t.numpy() <= 2) else -x,
    "dlpack": lambda x, t: x + torch.from_numpy(np.from_dlpack(t)),
    "storage": lambda x, t: x + t.untyped_storage()[0],
    "data_ptr": lambda x, t: x + t.data_ptr(),
    "format": lambda x, t: x + {"0": 1.0}.get(f"{t}", 2.0),
    "old constructor": lambda x, t: x + torch.LongTensor([t]).sum(),
    "full": lambda x, t: x + torch.full((), t),
    "arange": lambda x, t: x + torch.arange(t).sum(),
    "slice": lambda x, t: x + TABLE[0, : t.long()].sum(),
    "range": lambda x, t: x + sum(range(t.long())),
    "equal": lambda x, t: x + torch.equal(t, t + 0),
    "allclose": lambda x, t: x + torch.allclose(t * 1.0, t * 2.0),
    "number of nonzeros": lambda x, t: x + len(torch.nonzero(t[None])),
    "number of unique ones": lambda x, t: x + torch.stack([t, t + 1]).unique().numel(),
    "math": lambda x, t: x + math.floor(t),
    "set into a tensor": lambda x, t: x + filled(t).tolist()[0],
    "captured tensor": lambda x, t: x + TABLE.tolist()[0][0],
    "captured tensor, numpy": lambda x, t: x + TABLE.numpy()[0, 0],
    "captured tensor, numpy, element": lambda x, t: x + TABLE.numpy()[t.long()][0],
    "captured tensor, item": lambda x, t: x + TABLE.sum().item(),
}


def filled(t):
    made = torch.zeros(3)
    made[0] = t
    return made


def reader(role: str, name: str) -> dict:
    form = READ[name]
    if role == "score_mod":
        return {role: lambda s, b, h, i, j: form(s, j)}
    if role == "mask_mod":
        return {role: lambda b, h, i, j: form(i, j) >= j}
    return {role: Epilogue(lambda o, b, h, i, d: form(o, d))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("role", ["score_mod", "mask_mod", "epilogue"])
def test_values_read_on_the_host_are_refused(role, name):
    options, given = reader(role, name), in_kind("paged")
    with pytest.raises(UnsupportedError, match=f"^{role}: .*cannot be"):
        xattn.attention(*qkv(), **options)
    with pytest.raises(UnsupportedError, match=f"^{role}: .*cannot be"):
        xattn.explain(*qkv(), **options)
    before = {n: t.clone() for n, t in given.items()}
    with pytest.raises(UnsupportedError, match=f"^{role}: .*cannot be"):
        asked("paged", given, **options)
    assert all(torch.equal(given[n], t) for n, t in before.items())


@pytest.mark.parametrize("name", ["tolist", "numpy", "captured tensor", "captured tensor, numpy"])
def test_values_read_on_the_host_are_refused_in_compiled_code(compiled, name):
    with pytest.raises(Exception, match=r"(?s)score_mod: .* cannot be traced"):
        compiled(*qkv(), **reader("score_mod", name))


def test_values_of_what_a_function_makes_of_numbers():
    """A tensor that no argument takes part in may be read."""
    q, k, v = qkv()
    mod = lambda s, b, h, i, j: s * T(3.0).item() + TABLE.shape[0] + float(np.float32(0.5))  # noqa: E731
    close(xattn.attention(q, k, v, score_mod=mod), direct(q, k, v, lambda s, *_: 3 * s))


INDEXED = {
    "new axis": lambda i, j: TABLE[0, j, None][0],
    "new axes": lambda i, j: TABLE[None, i, None, j, None].sum(),
    "new axis, ellipsis": lambda i, j: DEEP[i, ..., None, j][1, 0],
    "ellipsis, new axis": lambda i, j: DEEP[..., None, j].sum(),
    "list": lambda i, j: TABLE[j, [0, 1]].sum(),
    "list first": lambda i, j: TABLE[[0, 1, 1], j].prod(),
    "empty list": lambda i, j: TABLE[j, []].sum() + i,
    "list behind a slice": lambda i, j: DEEP[j, :, [0, 1]][2, 1],
    "list of negative numbers": lambda i, j: DEEP[:, [-1, 0], j][i, 0],
    "nested list": lambda i, j: DEEP[j, [[0, 1], [2, 2]]][1, 0, i],
    "tuple in a tuple": lambda i, j: TABLE[j, (0, 1)].sum(),
    "list of flags": lambda i, j: TABLE[j, [True, False] * 4].sum(),
    "array": lambda i, j: TABLE[np.array([0, 2]), j].sum(),
    "array of one": lambda i, j: TABLE[np.array(2), j],
    "numpy's number": lambda i, j: TABLE[np.int64(2), j],
    "range": lambda i, j: TABLE[range(3), j].sum(),
    "True": lambda i, j: TABLE[True, j, 0].sum(),
    "False": lambda i, j: TABLE[False, j].sum() + i,
    "captured mask": lambda i, j: TABLE[j, KEEP].sum(),
    "captured mask of bytes": lambda i, j: TABLE[j, KEEP_BYTES].sum(),
    "captured mask of rows": lambda i, j: TABLE[KEEP, j].prod() + TABLE[j][KEEP].sum(),
    "captured mask, two dimensions": lambda i, j: DEEP[DEEP[:, :, 0] > 0, j].sum() + i,
    "int8": lambda i, j: TABLE[i.to(torch.int8), j.to(torch.int16)],
    "int8 table": lambda i, j: TABLE[SMALL_IDS[i], SMALL_IDS[j]],
    "int32": lambda i, j: TABLE[0, j.int()],
    "vector of elements": lambda i, j: TABLE[torch.stack([i, j])].sum(),
    "vector and element": lambda i, j: DEEP[torch.stack([i, j]), 1, j].sum(),
    "element between lists": lambda i, j: DEEP[[0, 1], i % 3, [3, 4]].sum(),
    "element of one dimension": lambda i, j: TABLE[i[None], j].sum(),
    "negative": lambda i, j: TABLE[-1, -j] + TABLE[-i, -1],
    "slices": lambda i, j: DEEP[1:, 1, j][i] - DEEP[::2, ::2, j].sum(),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", INDEXED)
def test_indices_of_every_form(compiled, name):
    form, (q, k, v) = INDEXED[name], qkv()
    options = {"score_mod": lambda s, b, h, i, j: s + form(i, j)}
    wanted = by_elements(options, q, k, v)
    assert name in ("array of one", "new axis, ellipsis") or not torch.allclose(wanted, xattn.attention(q, k, v))
    close(xattn.attention(q, k, v, **options), wanted)
    if "array" not in name:
        close(compiled(q, k, v, **options), wanted)


@pytest.mark.parametrize(
    "form, words",
    [
        (lambda i, j: TABLE[0, j.to(torch.uint8)], "indexes by uint8, which torch takes for a mask; allowed: .*long"),
        (lambda i, j: TABLE[0, KEEP_BYTES[j]], "indexes by uint8"),
        (lambda i, j: TABLE[0, [j.to(torch.uint8)]].sum(), "indexes by uint8"),
        (lambda i, j: TABLE[0, i > j].sum(), "indexes by a condition.*torch.where"),
        (lambda i, j: TABLE[0][(i > j).expand(8)].sum(), "cannot be mapped over elements"),
    ],
)
def test_indices_that_are_masks_of_elements(form, words):
    with pytest.raises(UnsupportedError, match=f"^score_mod: .*{words}"):
        xattn.attention(*qkv(), score_mod=lambda s, b, h, i, j: s + form(i, j))


@pytest.mark.parametrize(
    "form", [lambda i, j: TABLE[0, j * 1.0], lambda i, j: TABLE[0, [0.5]], lambda i, j: TABLE["a"]]
)
def test_indices_that_are_none(form):
    with pytest.raises(ValueError, match="^score_mod: .* cannot be traced"):
        xattn.attention(*qkv(), score_mod=lambda s, b, h, i, j: s + form(i, j).sum())


# ---------------------------------------------------------------- what cannot be mapped, and what is written
REFUSED = {
    "nonzero": lambda x, i, j: x + torch.stack([i, j]).nonzero().sum(),
    "where": lambda x, i, j: x + torch.where(torch.stack([i, j]) > 1)[0].sum(),
    "argwhere": lambda x, i, j: x + torch.argwhere(torch.stack([i, j])).sum(),
    "unique": lambda x, i, j: x + torch.stack([i, j]).unique().sum(),
    "masked_select": lambda x, i, j: x + torch.arange(3).masked_select(i > j).sum(),
    "repeat_interleave": lambda x, i, j: x + torch.arange(3).repeat_interleave(torch.stack([i, j, j])).sum(),
    "captured, add_": lambda x, i, j: x + TABLE.add_(1.0)[0, 0],
    "captured, element": lambda x, i, j: x + TABLE[0].mul_(j)[0],
    "captured, set": lambda x, i, j: x + (TABLE.__setitem__(0, 0.0) or 0) + TABLE[0, 1],
    "captured, in a list": lambda x, i, j: x + IN_LIST[0].zero_().sum(),
    "captured, out": lambda x, i, j: x + torch.zeros(()) + torch.mul(TABLE, 2.0, out=TABLE)[0, 0],
    "captured, unbind": lambda x, i, j: x + TABLE.unbind()[1].add_(2.0)[0],
}
IN_LIST = [torch.ones(3)]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("role", ["score_mod", "mask_mod", "epilogue"])
def test_shapes_and_writes_that_cannot_be_are_refused(role, name):
    form = REFUSED[name]
    options = {
        "score_mod": lambda: lambda s, b, h, i, j: form(s, i, j),
        "mask_mod": lambda: lambda b, h, i, j: form(i, i, j) > 2,
        "epilogue": lambda: Epilogue(lambda o, b, h, i, d: form(o, i, d)),
    }[role]()
    words = "writes into a tensor that it holds" if "captured" in name else "the shape of aten.* depends on scores"
    held = TABLE.clone()
    for kind in ("attention", "varlen", "paged", "packed"):
        given = in_kind(kind)
        before = {n: t.clone() for n, t in given.items() if isinstance(t, Tensor)}
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=f"^{role}: .*{words}"):
                asked(kind, given, **{role: options})
        assert all(torch.equal(given[n], t) for n, t in before.items())
    with pytest.raises(UnsupportedError, match=f"^{role}: .*{words}"):
        xattn.explain(*qkv(), **{role: options})
    assert torch.equal(TABLE, held) and IN_LIST[0].all()


def test_shapes_and_writes_that_cannot_be_are_refused_in_compiled_code(compiled):
    for form in REFUSED.values():
        with pytest.raises(
            Exception, match=r"(?s)score_mod: .*(depends on scores|writes into|own from values|IN_LIST)"
        ):
            compiled(*qkv(), score_mod=lambda s, b, h, i, j, form=form: form(s, i, j))


# Functions that write into what they make, or into their arguments: only they see it.
WRITTEN = {
    "index_put_": lambda x, i, j: x + torch.zeros(8).index_put_((j,), i * 1.0).sum(),
    "copy_": lambda x, i, j: x + torch.zeros(()).copy_(j),
    "add_": lambda x, i, j: x + torch.zeros(3).add_(j).sum(),
    "mul_ of one row": lambda x, i, j: x + torch.ones(5, 3)[1:2].mul_(j + i).sum(),
    "set": lambda x, i, j: x + filled(j)[0] * 2,
    "masked_fill_": lambda x, i, j: x + torch.zeros(3).masked_fill_(i > j, 0.5).sum(),
    "out": lambda x, i, j: x + torch.add(i, j, out=torch.zeros((), dtype=torch.int64)),
    "copy of a captured one": lambda x, i, j: x + TABLE.clone().add_(j)[0, 1],
    "of a captured one": lambda x, i, j: x + (TABLE * 2)[1].sub_(i)[3],
    "score": lambda x, i, j: x.mul_(2) + j,
    "index": lambda x, i, j: x + i.add_(j) - i * 3,
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements")
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("role", ["score_mod", "mask_mod", "epilogue"])
def test_writes_into_what_a_function_makes(compiled, role, name):
    form, (q, k, v) = WRITTEN[name], qkv()
    options = {
        "score_mod": lambda: lambda s, b, h, i, j: form(s, i, j),
        "mask_mod": lambda: lambda b, h, i, j: form(j - i, i, j) >= j,
        "epilogue": lambda: Epilogue(lambda o, b, h, i, d: form(o, i, d % 8)),
    }[role]()
    wanted = by_elements({role: options}, q, k, v)
    close(xattn.attention(q, k, v, **{role: options}), wanted)
    close(compiled(q, k, v, **{role: options}), wanted)


def changed(s, b, h, i, j):
    j += 1
    i -= 2
    h.mul_(2)
    return s.mul_(0.5).add_(j * 0.1 - i * 0.2 + h + b)


def unchanged(s, b, h, i, j):
    return s * 0.5 + ((j + 1) * 0.1 - (i - 2) * 0.2 + h * 2 + b)


@pytest.mark.parametrize("kind", ["attention", "varlen", "paged"])
@pytest.mark.parametrize("grad", [False, True])
def test_arguments_may_be_changed_in_place(kind, grad):
    """It changes nothing but what the function itself sees."""
    given = in_kind(kind)
    grad = grad and kind != "paged"
    rng = torch.tensor([3, 4])
    options = {"alibi_slopes": torch.full((HEADS,), 0.3), "dropout_p": 0.3, "dropout_rng": rng}
    options["mask_mod"] = lambda b, h, i, j: i.add_(2).ge(j.sub_(1))
    got, want = (
        asked(kind, {n: t.clone() if isinstance(t, Tensor) else t for n, t in given.items()}, **options, score_mod=fn)
        for fn in (changed, unchanged)
    )
    assert torch.equal(got, want)
    if grad:
        q = given["q"].requires_grad_()
        grads = (
            torch.autograd.grad(asked(kind, given | {"q": q}, **options, score_mod=fn).sum(), q)[0]
            for fn in (changed, unchanged)
        )
        close(*grads)


# ---------------------------------------------------------------- precision
DOUBLES = {
    "float": lambda n, k: lambda s, b, h, i, j: s * k,
    "float and index": lambda n, k: lambda s, b, h, i, j: s + i * k,
    "float twice": lambda n, k: lambda s, b, h, i, j: s * (k / 3) + k,
    "int": lambda n, k: lambda s, b, h, i, j: s * n + i - n,
    "int divided": lambda n, k: lambda s, b, h, i, j: s * (n / 7),
    "int inverted": lambda n, k: lambda s, b, h, i, j: s * 2.0**-n,
    "power of an int": lambda n, k: lambda s, b, h, i, j: s * 2**-n,
    "root of an int": lambda n, k: lambda s, b, h, i, j: s * abs(n) ** -0.5,
    "int times float": lambda n, k: lambda s, b, h, i, j: s * (n * 0.1),
    "index to a power": lambda n, k: lambda s, b, h, i, j: s + (j + 1.5) ** -n,
    "int and small integers": lambda n, k: lambda s, b, h, i, j: s + SMALL_IDS[j % 8] * (100 * n),
    "int in a condition": lambda n, k: lambda s, b, h, i, j: s * 3 if n > 2 else s,
    "dtype of the score": lambda n, k: lambda s, b, h, i, j: s + torch.log(j.to(s.dtype) + 1) * k,
    "like the score": lambda n, k: lambda s, b, h, i, j: s + torch.full_like(s, k) * s.new_tensor([k, j]).sum(),
    "where": lambda n, k: lambda s, b, h, i, j: torch.where(i < j, s * k, torch.finfo(s.dtype).min / 1e3),
}


@pytest.mark.parametrize("name", DOUBLES)
@pytest.mark.parametrize("n", [3, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("role", ["score_mod", "epilogue"])
def test_numbers_are_as_precise_as_pythons(compiled, role, name, n, dtype):
    """In eager and in compiled code."""
    make = DOUBLES[name]
    q, k, v = qkv(dtype=dtype)
    for value in (0.1, 0.3):
        fn = make(n, value)
        options = {role: Epilogue(fn) if role == "epilogue" else fn}
        got = xattn.attention(q, k, v, **options)
        tight = {"rtol": 1e-13, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got, by_elements(options, q, k, v), **tight)
        torch.testing.assert_close(compiled(q, k, v, **options), got, **tight)


HUGE = 2**70


def test_a_number_beyond_int64_names_the_function(compiled):
    for call in (xattn.attention, compiled):
        with pytest.raises(Exception, match=r"(?s)score_mod: .* cannot be traced: int too big"):
            call(*qkv(), score_mod=lambda s, b, h, i, j: s / HUGE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_number_as_result_is_as_precise_as_the_call(dtype):
    out = xattn.attention(*qkv(dtype=dtype), epilogue=Epilogue(lambda *_: 0.1))
    assert torch.equal(out, torch.full_like(out, 0.1))


def test_a_wide_mask_makes_the_score_wide():
    q, k, v = qkv()
    seen = []

    def mod(s, b, h, i, j):
        seen.append(s.dtype)
        return s

    xattn.attention(q, k, v, score_mod=mod, attn_mask=torch.zeros(SEQLEN_Q, SEQLEN_K, dtype=torch.float64))
    xattn.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), score_mod=mod)
    assert list(dict.fromkeys(seen)) == [torch.float64, torch.float32]


def test_what_vmap_has_no_rule_for_prints_nothing(capfd):
    """torch says so from C++, once for every element, past Python's filters."""
    q = torch.randn(1, 8, 2, 16)

    def mod(s, b, h, i, j):
        z = torch.zeros(2)
        z[0], z[1] = i, j
        return s - (z[0] - z[1]).abs()

    out = xattn.attention(q, q, q, score_mod=mod)
    torch.testing.assert_close(out, xattn.attention(q, q, q, alibi_slopes=torch.ones(2)))
    assert capfd.readouterr().err == ""
