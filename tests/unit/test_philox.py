"""The random numbers of dropout: known answers, the documented map, their statistics, and dropout as attention applies
it."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xattn
from xattn import rng

BACKENDS = ["reference", None]

# Random123's kat_vectors for philox4x32-10: counter, key, result.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def pair(seed: int, offset: int) -> torch.Tensor:
    return torch.tensor([seed, offset], dtype=torch.int64)


def indices(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> tuple[torch.Tensor, ...]:
    """Indices that broadcast to (batch, heads, seqlen_q, seqlen_k)."""
    sizes = (batch, heads, seqlen_q, seqlen_k)
    return tuple(torch.arange(n).reshape([-1 if d == at else 1 for d in range(4)]) for at, n in enumerate(sizes))


def tensors(batch=2, seqlen_q=5, seqlen_k=70, heads=2, heads_kv=2, head_dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, seqlen_q, heads), (batch, seqlen_k, heads_kv), (batch, seqlen_k, heads_kv)]
    return [torch.randn((*s, head_dim), generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


# ---------------------------------------------------------------- the generator
@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_known_answers(counter, key, result):
    words = rng.philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)), rounds=10)
    assert tuple(map(int, words)) == result
    assert oracle.philox(counter, key, rounds=10) == result


def test_seven_rounds_are_the_default():
    counter, key = (1, 2, 3, 4), (5, 6)
    words = rng.philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert rng.ROUNDS == 7
    assert tuple(map(int, words)) == oracle.philox(counter, key, rounds=7) != oracle.philox(counter, key, rounds=10)


WORD = st.integers(0, 2**32 - 1)


@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD), st.integers(1, 12))
def test_any_counter_and_key(counter, key, rounds):
    words = rng.philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)), rounds)
    assert tuple(map(int, words)) == oracle.philox(counter, key, rounds)


# ---------------------------------------------------------------- the map from indices to numbers
INT64 = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 2**62 - 1, 2**32, -(2**32)])
)


@settings(max_examples=50)
@given(INT64, INT64)
def test_numbers_of_any_pair(seed, offset):
    got = rng.uniform16(pair(seed, offset), *indices(2, 3, 5, 131))
    assert np.array_equal(got.numpy(), oracle.numbers16((seed, offset), 2, 3, 5, 131))


@settings(max_examples=50)
@given(INT64, INT64, *[st.integers(0, 2**31 - 1)] * 4)
def test_numbers_of_large_indices(seed, offset, b, h, i, j):
    """Against the definition, in Python integers."""
    got = rng.uniform16(pair(seed, offset), *map(torch.tensor, (b, h, i, j)))
    key = (seed + offset * 0x9E3779B97F4A7C15) % 2**64
    words = oracle.philox(((j >> 6) * 8 + (j >> 1) % 8, i, b, h), (key % 2**32, key >> 32))
    assert int(got) == words[(j >> 4) & 3] >> 16 * (j & 1) & 0xFFFF


def test_index_types_do_not_matter():
    wide = indices(2, 2, 3, 65)
    narrow = [x.to(torch.int32) for x in wide]
    assert torch.equal(rng.uniform16(pair(3, 4), *wide), rng.uniform16(pair(3, 4), *narrow))


def test_each_number_of_the_four_words_is_used_once():
    """The 64 keys of a tile take 8 blocks of 8 numbers, and no number twice."""
    taken = {((j >> 6) * 8 + ((j >> 1) & 7), (j >> 4) & 3, j & 1) for j in range(256)}
    assert len(taken) == 256
    assert {group for group, _, _ in taken} == set(range(32))


# ---------------------------------------------------------------- statistics
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed, offset", [(0, 0), (-5, 2**63 - 1), (0x1234_5678_9ABC_DEF1, 977)])
def test_keep_rate(p, seed, offset):
    kept = rng.keep(pair(seed, offset), p, *indices(4, 4, 64, 512))
    wanted = 1 - rng.threshold(p) / 65536
    sigma = (wanted * (1 - wanted) / kept.numel()) ** 0.5
    assert abs(float(kept.double().mean()) - wanted) < 5 * sigma
    assert abs(wanted - (1 - p)) <= 2**-17


@pytest.mark.parametrize("axis", range(4))
def test_neighbours_are_independent(axis):
    numbers = rng.uniform16(pair(11, 12), *indices(8, 8, 64, 128)).double()
    first, second = numbers.narrow(axis, 0, numbers.shape[axis] - 1), numbers.narrow(axis, 1, numbers.shape[axis] - 1)
    correlation = float(torch.corrcoef(torch.stack([first.reshape(-1), second.reshape(-1)]))[0, 1])
    assert abs(correlation) < 5 / first.numel() ** 0.5


@pytest.mark.parametrize("other", [(12, 12), (11, 13), (12, 11)])
def test_pairs_are_independent(other):
    one, two = (rng.uniform16(pair(*p), *indices(4, 4, 64, 128)).double().reshape(-1) for p in ((11, 12), other))
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 5 / one.numel() ** 0.5


def test_numbers_are_uniform():
    """Chi-squared of the 256 values of each byte, within 5 sigma of its mean."""
    numbers = rng.uniform16(pair(1, 2), *indices(4, 4, 64, 512)).reshape(-1)
    assert 0 <= int(numbers.min()) and int(numbers.max()) < 65536
    for byte in (numbers & 0xFF, numbers >> 8):
        counts = torch.bincount(byte, minlength=256).double()
        expected = numbers.numel() / 256
        assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 5 * (2 * 255) ** 0.5


def test_threshold():
    assert [rng.threshold(p) for p in (0.0, 1.0, 0.5, 0.1, 1 / 65536, 1 - 1 / 65536)] == [
        0,
        65536,
        32768,
        6554,
        1,
        65535,
    ]
    number = int(rng.uniform16(pair(7, 7), *map(torch.tensor, (1, 1, 1, 1))))
    one = tuple(map(torch.tensor, (1, 1, 1, 1)))
    assert bool(rng.keep(pair(7, 7), number / 65536, *one))
    assert not bool(rng.keep(pair(7, 7), (number + 1) / 65536, *one))


def test_nothing_and_everything_dropped():
    shape = indices(2, 2, 16, 256)
    assert bool(rng.keep(pair(1, 1), 0.0, *shape).all())
    assert not bool(rng.keep(pair(1, 1), 1.0, *shape).any())


# ---------------------------------------------------------------- attention with dropout
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_drops_what_the_oracle_drops(backend, p, causal):
    q, k, v = tensors(heads=4, heads_kv=2)
    given = (-(2**62) + 5, 2**63 - 1)
    out = xattn.attention(q, k, v, dropout_p=p, dropout_rng=pair(*given), causal=causal, backend=backend)
    keep = oracle.keep(given, p, 2, 4, 5, 70)
    truth, plain = (
        oracle.attention(q.to(d), k.to(d), v.to(d), dropout_p=p, keep=keep, causal=causal)[0]
        for d in (torch.float64, torch.float32)
    )
    oracle.assert_close("out", out, truth, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_drop_what_the_oracle_drops(backend):
    q, k, v = (t.requires_grad_() for t in tensors())
    out = xattn.attention(q, k, v, dropout_p=0.3, dropout_rng=pair(9, 10), backend=backend)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    got = torch.autograd.grad(out, (q, k, v), dout)
    keep = oracle.keep((9, 10), 0.3, 2, 2, 5, 70)
    wanted = []
    for dtype in (torch.float64, torch.float32):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        wanted.append(
            torch.autograd.grad(oracle.attention(*leaves, dropout_p=0.3, keep=keep)[0], leaves, dout.to(dtype))
        )
    for name, *each in zip("qkv", got, *wanted, strict=True):
        oracle.assert_close(f"d{name}", *each, among=wanted[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_is_from_before_dropout(backend):
    q, k, v = tensors()
    _, plain = xattn.attention(q, k, v, return_lse=True, backend=backend)
    _, dropped = xattn.attention(q, k, v, return_lse=True, dropout_p=0.5, dropout_rng=pair(1, 2), backend=backend)
    torch.testing.assert_close(dropped, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_p_of_one_gives_zeros(backend):
    q, k, v = (t.requires_grad_() for t in tensors())
    out, lse = xattn.attention(q, k, v, dropout_p=1.0, return_lse=True, backend=backend)
    assert torch.equal(out, torch.zeros_like(out))
    assert bool(torch.isfinite(lse).all())
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("backend", ["reference", None])
def test_p_of_zero_is_no_dropout(backend):
    q, k, v = tensors()
    state = torch.get_rng_state()
    assert torch.equal(
        xattn.attention(q, k, v, dropout_p=0.0, backend=backend), xattn.attention(q, k, v, backend=backend)
    )
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packing_does_not_change_the_mask(backend):
    """Values that are one-hot show each dropped weight: the zeros of the output are the mask."""
    seqlen_k, seqlen_q, heads = 70, 5, 2
    q, k, _ = tensors(batch=3, seqlen_k=seqlen_k)
    v = torch.eye(seqlen_k).reshape(1, seqlen_k, 1, seqlen_k).repeat(3, 1, heads, 1)
    common = {"dropout_p": 0.5, "dropout_rng": pair(21, 22), "backend": backend}
    dense = xattn.attention(q, k, v, **common)
    lengths = torch.arange(4, dtype=torch.int32)
    packed = xattn.attention_varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), lengths * seqlen_q, lengths * seqlen_k, 5, 70, **common
    )
    mask = oracle.keep((21, 22), 0.5, 3, heads, seqlen_q, seqlen_k).transpose(1, 2)
    assert torch.equal(dense != 0, mask)
    assert torch.equal(packed.reshape(dense.shape) != 0, mask)


def test_sequences_of_different_lengths_have_the_mask_of_their_own_index():
    q, k, v = (t[0] for t in tensors(batch=1, seqlen_q=9, seqlen_k=140, head_dim=8))
    cu_q, cu_k = torch.tensor([0, 2, 2, 9]), torch.tensor([0, 70, 75, 140])
    out = xattn.attention_varlen(q, k, v, cu_q, cu_k, 7, 70, dropout_p=0.5, dropout_rng=pair(5, 6))
    keep = oracle.keep((5, 6), 0.5, 3, 2, 7, 70)
    truth, plain = (
        oracle.varlen(q.to(d), k.to(d), v.to(d), cu_q, cu_k, 7, 70, dropout_p=0.5, keep=keep)[0]
        for d in (torch.float64, torch.float32)
    )
    oracle.assert_close("out", out, truth, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_pairs_give_equal_results(backend):
    q, k, v = tensors()
    one = xattn.attention(q, k, v, dropout_p=0.5, dropout_rng=pair(1, 2), backend=backend)
    assert torch.equal(one, xattn.attention(q, k, v, dropout_p=0.5, dropout_rng=pair(1, 2), backend=backend))
    for other in ((2, 2), (1, 3), (2, 1), (1, -2), (1 + 2**32, 2)):
        assert not torch.equal(one, xattn.attention(q, k, v, dropout_p=0.5, dropout_rng=pair(*other), backend=backend))


def test_a_given_pair_is_not_changed_and_torch_draws_nothing():
    q, k, v = tensors()
    given, state = pair(1, 2), torch.get_rng_state()
    xattn.attention(q, k, v, dropout_p=0.5, dropout_rng=given)
    assert torch.equal(given, pair(1, 2))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_pairs_come_from_torchs_generator(kind):
    q, k, v = tensors()
    ends = torch.tensor([0, 5, 10]), torch.tensor([0, 70, 140])

    def call():
        if kind == "dense":
            return xattn.attention(q, k, v, dropout_p=0.5)
        flat = (t.flatten(0, 1) for t in (q, k, v))
        return xattn.attention_varlen(*flat, *ends, 5, 70, dropout_p=0.5)

    with torch.random.fork_rng():
        torch.manual_seed(17)
        state = torch.get_rng_state()
        one, two = call(), call()
        assert not torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(one, two)
        torch.manual_seed(17)
        assert torch.equal(call(), one)
        assert torch.equal(call(), two)
        torch.manual_seed(18)
        assert not torch.equal(call(), one)


def test_draw():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        one, two = rng.draw(torch.device("cpu")), rng.draw(torch.device("cpu"))
    assert one.dtype == torch.int64 and one.shape == (2,)
    assert not torch.equal(one, two)


# ---------------------------------------------------------------- where the numbers of a block lie in a tile
# Each accumulator as (query row, key) of every element that a lane holds, over a tile of 64 keys.
def mma_m16n8k16():
    """S = Q K^T: lane 4g + t has rows g, g + 8 and columns 2t, 2t + 1 of each 8 keys."""
    for lane in range(32):
        g, t = divmod(lane, 4)
        for key in range(0, 64, 8):
            for row in (g, g + 8):
                for column in (2 * t, 2 * t + 1):
                    yield lane, row, key + column


def mfma_16x16():
    """S^T = K Q^T: lane l has keys 4 * (l / 16) + i of each 16, and query l % 16."""
    for lane in range(64):
        for key in range(0, 64, 16):
            for i in range(4):
                yield lane, lane % 16, key + 4 * (lane // 16) + i


def mfma_32x32():
    """S^T = K Q^T: lane l has keys 8 * (i / 4) + 4 * (l / 32) + i % 4 of each 32, and query l % 32."""
    for lane in range(64):
        for key in range(0, 64, 32):
            for i in range(16):
                yield lane, lane % 32, key + 8 * (i // 4) + 4 * (lane // 32) + i % 4


@pytest.mark.parametrize("lane_map, rows", [(mma_m16n8k16, 16), (mfma_16x16, 16), (mfma_32x32, 32)])
def test_one_lane_holds_all_of_a_block(lane_map, rows):
    held = list(lane_map())
    assert len(set(held)) == len(held) == rows * 64
    assert {(row, key) for _, row, key in held} == {(row, key) for row in range(rows) for key in range(64)}
    # The block of a key as the generator has it: numbers that agree in all but word and half.
    lanes, keys = defaultdict(set), defaultdict(set)
    for lane, row, key in held:
        group = (key >> 6) * 8 + ((key >> 1) & 7)
        lanes[row, group].add(lane)
        keys[row, group].add(key)
    assert len(lanes) == rows * 8
    assert all(len(found) == 1 for found in lanes.values())
    assert all(len(found) == 8 for found in keys.values())


def test_blocks_are_the_ones_of_the_generator(monkeypatch):
    """The counter that ``uniform16`` evaluates for a key is that of its block."""
    seen = []
    original = rng.philox4x32
    monkeypatch.setattr(rng, "philox4x32", lambda counter, key: seen.append(counter) or original(counter, key))
    rng.uniform16(pair(0, 0), *indices(1, 1, 1, 192))
    groups = seen[0][0].reshape(-1).tolist()
    for n in range(24):
        tile, i = divmod(n, 8)
        members = [j for j in range(192) if groups[j] == n]
        assert members == sorted(64 * tile + 2 * i + j for j in (0, 1, 16, 17, 32, 33, 48, 49))


@pytest.mark.parametrize("shift", [2**32, -(2**32)])
def test_indices_count_mod_2_to_the_32(shift):
    """Queries that are more than the tokens of their sequence stand at negative positions."""
    batch, head, q_idx, kv_idx = indices(2, 2, 5, 16)
    q_idx = q_idx - 3
    numbers = rng.uniform16(pair(3, 4), batch, head, q_idx, kv_idx)
    for n in range(3):
        moved = [batch, head, q_idx]
        moved[n] = moved[n] + shift
        assert torch.equal(numbers, rng.uniform16(pair(3, 4), *moved, kv_idx))


@pytest.mark.parametrize("start", [(0, 0), (5, 64), (3, 17), (2**33, 2**34 + 1)], ids=str)
def test_a_part_of_a_larger_call_drops_what_the_whole_drops(start):
    """dropout_rng of four numbers: the part's queries and keys count from its start."""
    pair = torch.tensor([7, 9])
    q_idx, kv_idx = torch.arange(6)[:, None], torch.arange(80)
    at = (torch.arange(2)[:, None, None, None], torch.arange(3)[:, None, None])
    part = rng.keep(torch.cat([pair, torch.tensor(start)]), 0.5, *at, q_idx, kv_idx)
    assert torch.equal(part, rng.keep(pair, 0.5, *at, q_idx + start[0], kv_idx + start[1]))


def test_calls_of_parts_are_parts_of_the_call():
    q, k, v = (torch.randn(2, n, 2, 8, dtype=torch.float64) for n in (6, 80, 80))
    pair, options = torch.tensor([7, 9]), {"dropout_p": 0.5, "return_lse": True}
    whole, _ = xattn.attention(q, k, v, dropout_rng=pair, **options)
    rows = []
    for i in (0, 4):
        parts = []
        for j in (0, 33):
            four = torch.cat([pair, torch.tensor([i, j])])
            stop = 33 if j == 0 else 80
            parts.append(xattn.attention(q[:, i : i + 4], k[:, j:stop], v[:, j:stop], dropout_rng=four, **options))
        rows.append(xattn.merge_states(*zip(*parts, strict=True))[0])
    torch.testing.assert_close(torch.cat(rows, 1), whole, rtol=1e-6, atol=1e-6)


def test_four_numbers_are_for_dense_calls(arch="sm_90"):
    """Others refuse them; kernels that do not know where a part starts are not asked."""
    q, offsets = torch.randn(4, 2, 8), torch.tensor([0, 4])
    with pytest.raises(ValueError, match=r"dropout_rng: got shape \(4,\); allowed: \(2,\)"):
        xattn.attention_varlen(q, q, q, offsets, offsets, 4, 4, dropout_p=0.5, dropout_rng=torch.zeros(4).long())
    plan = xattn.explain(q[None], q[None], q[None], dropout_p=0.5, dropout_rng=torch.zeros(4).long(), device=arch)
    refused = {name: {r.field for r in refusals} for name, refusals in plan.rejected}
    assert plan.backend == "reference" and "dropout_start" in refused["sm90"]
