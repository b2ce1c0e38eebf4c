"""v_cache as a view of k_cache: which views let v_new be left out, however the call is made."""

from __future__ import annotations

import random

import pytest
import torch

import xattn
from xattn import validate

TABLE, LENGTHS = torch.tensor([[0, 1], [2, 3]]), torch.tensor([1, 2])


def whole(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 100


NOT_PARTS = {
    "beside": lambda: tuple(whole(2, 4, 4, 2, 8)),
    "other halves": lambda: tuple(whole(4, 4, 2, 16).split(8, -1)),
    "past the end": lambda: (lambda c: (c[..., :8], c[..., 4:12]))(whole(4, 4, 2, 16)),
    "other tensor": lambda: (whole(4, 4, 2, 8), whole(4, 4, 2, 8)),
    "other page": lambda: (lambda c: (c[:4], c[1:]))(whole(5, 4, 2, 8)),
    "heads swapped": lambda: (lambda c: (c[:, :2], c[:, :2].transpose(1, 2)))(whole(4, 4, 2, 8)),
    "other dtype": lambda: (lambda c: (c, c.view(torch.int32).view(torch.float16)[..., :8]))(whole(4, 4, 2, 8)),
}
PARTS = {
    "all": lambda c: c,
    "first": lambda c: c[..., :4],
    "last": lambda c: c[..., 4:],
    "every other": lambda c: c[..., ::2],
    "one": lambda c: c[..., 3:4],
}


def call(k_cache, v_cache, new):
    return xattn.attention_paged(new, k_cache, v_cache, TABLE, LENGTHS, k_new=new, causal=True)


def op(k_cache, v_cache, new):
    return torch.ops.xattn.append_paged(k_cache, v_cache, TABLE, LENGTHS, new, None)


def call_with_values(k_cache, v_cache, k_new, v_new):
    return xattn.attention_paged(k_new, k_cache, v_cache, TABLE, LENGTHS, k_new=k_new, v_new=v_new)


def op_with_values(k_cache, v_cache, k_new, v_new):
    return torch.ops.xattn.append_paged(k_cache, v_cache, TABLE, LENGTHS, k_new, v_new)


def compiled(fn):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("way", [call, op, compiled(call)], ids=["call", "op", "compiled"])
@pytest.mark.parametrize("name", NOT_PARTS)
def test_what_is_no_part_needs_v_new(way, name):
    k_cache, v_cache = NOT_PARTS[name]()
    k_before, v_before = k_cache.clone(), v_cache.clone()
    with pytest.raises(Exception, match="v_new: got None|v_cache: got fp16"):
        way(k_cache, v_cache, torch.ones(2, 1, 2, 8))
    assert torch.equal(k_cache, k_before) and torch.equal(v_cache, v_before)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_written_with_k_new(name):
    part, new = PARTS[name], torch.randn(2, 3, 2, 8)
    k_cache = whole(4, 4, 2, 8)
    plain_k, plain_v = k_cache.clone(), part(k_cache).clone()
    found = call(k_cache, part(k_cache), new)
    wanted = xattn.attention_paged(
        new, plain_k, plain_v, TABLE, LENGTHS, k_new=new, v_new=part(new), causal=True, backend="reference"
    )
    torch.testing.assert_close(found, wanted)
    assert torch.equal(k_cache, plain_k) and torch.equal(part(k_cache), plain_v)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_can_be_compiled(name):
    part, new = PARTS[name], torch.randn(2, 3, 2, 8)
    one, two = whole(4, 4, 2, 8), whole(4, 4, 2, 8)
    found = compiled(lambda new, c: call(c, part(c), new))(new, one)
    torch.testing.assert_close(found, call(two, part(two), new))
    assert torch.equal(one, two)


class Latent(torch.nn.Module):
    def forward(self, new, cache, table, lengths):
        return xattn.attention_paged(new, cache, cache[..., :4], table, lengths, k_new=new, causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_a_part_can_be_exported(strict):
    new, one, two = torch.randn(2, 3, 2, 8), whole(4, 4, 2, 8), whole(4, 4, 2, 8)
    exported = torch.export.export(Latent(), (new, whole(4, 4, 2, 8), TABLE, LENGTHS), strict=strict)
    torch.testing.assert_close(exported.module()(new, one, TABLE, LENGTHS), call(two, two[..., :4], new))
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", NOT_PARTS)
def test_explain_on_meta_raises_as_the_call(name):
    def meta(t):
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    q, k, v, table, lengths = (meta(t) for t in (torch.ones(2, 1, 2, 8), *NOT_PARTS[name](), TABLE, LENGTHS))
    with pytest.raises((TypeError, ValueError), match="v_new: got None|v_cache: got fp16"):
        xattn.explain(q, k, v, table, lengths, k_new=q, kind="paged")
    assert xattn.supported(q, k, k[..., :4], table, lengths, k_new=q, kind="paged")


def interleaved(*widths):
    return lambda: tuple(whole(4, 4, 2, sum(widths)).split(widths, -1))


APART = {
    "two tensors": NOT_PARTS["other tensor"],
    "halves of each vector": interleaved(8, 8),
    "unequal parts of each vector": interleaved(4, 12),
    "wider values": interleaved(12, 4),
    "channels in turn": lambda: (lambda c: (c[..., ::2], c[..., 1::2]))(whole(4, 4, 2, 16)),
    "halves of each page": lambda: whole(4, 2, 4, 2, 8).unbind(1),
    "halves of the storage": lambda: whole(2, 4, 4, 2, 8).unbind(0),
    "slots in turn": lambda: (lambda c: (c[:, ::2], c[:, 1::2]))(whole(4, 8, 2, 8)),
}  # fmt: skip
SHARED = {
    "the same": lambda: (lambda c: (c, c))(whole(4, 4, 2, 8)),
    "a part": lambda: (lambda c: (c, c[..., :4]))(whole(4, 4, 2, 8)),
    "past the end": NOT_PARTS["past the end"],
    "one channel": lambda: (lambda c: (c[..., :8], c[..., 7:]))(whole(4, 4, 2, 15)),
    "other page": NOT_PARTS["other page"],
    "other slot": lambda: (lambda c: (c[:, :4], c[:, 1:]))(whole(4, 5, 2, 8)),
    "last page and first": lambda: (lambda c: (c[:4], c[3:]))(whole(7, 4, 2, 8)),
    "heads swapped": NOT_PARTS["heads swapped"],
    "steps of two and three": lambda: (lambda c: (c[..., :15:2], c[..., :24:3]))(whole(4, 4, 2, 24)),
    "other order": lambda: (lambda c: (c, c.permute(1, 0, 2, 3)))(whole(4, 4, 2, 8)),
}


@pytest.mark.parametrize("name", APART)
def test_caches_without_a_common_element_take_both(name):
    k_cache, v_cache = APART[name]()
    k_new, v_new = (torch.randn(2, 1, c.shape[2], c.shape[3]) for c in (k_cache, v_cache))
    xattn.attention_paged(k_new, k_cache, v_cache, TABLE, torch.tensor([1, 0]), k_new=k_new, v_new=v_new)
    if k_cache.shape[0]:
        assert torch.equal(k_cache[0, 1], k_new[0, 0]) and torch.equal(v_cache[0, 1], v_new[0, 0])


@pytest.mark.parametrize(
    "way", [call_with_values, op_with_values, lambda *a: compiled(call_with_values)(*a)], ids=["call", "op", "compiled"]
)
@pytest.mark.parametrize("name", SHARED)
def test_values_never_overwrite_keys(way, name):
    k_cache, v_cache = SHARED[name]()
    k_before, v_before = k_cache.clone(), v_cache.clone()
    with pytest.raises(Exception, match="v_new: got a tensor; allowed: None"):
        way(k_cache, v_cache, *(torch.ones(2, 1, 2, c.shape[3]) for c in (k_cache, v_cache)))
    assert torch.equal(k_cache, k_before) and torch.equal(v_cache, v_before)


@pytest.mark.parametrize("seed", range(200))
def test_shared_elements_as_counted(seed):
    rng = random.Random(seed)

    def view():
        shape = [rng.randint(1, 3) for _ in range(4)]
        return torch.as_strided(base, shape, [rng.randint(0, 9) for _ in shape], rng.randint(0, 30))

    base = torch.zeros(120)
    a, b = view(), view()
    index = torch.arange(120)
    at = [set(torch.as_strided(index, t.shape, t.stride(), t.storage_offset()).flatten().tolist()) for t in (a, b)]
    assert validate._share_elements(a, b) == bool(at[0] & at[1])
