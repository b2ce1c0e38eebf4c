"""Context parallelism on gloo ranks: equal to one device, forward and backward; errors on every rank, without a hang.

ranks.py holds the processes and what each of them does; shards are made here by their definition.
"""

from __future__ import annotations

import itertools

import cases
import oracle
import pytest
import ranks
import torch

import xattn
from xattn import shards

METHODS = ["ring", "all_gather"]
SHARDINGS = ["zigzag", "contiguous"]


@pytest.fixture(scope="module")
def started():
    """Groups by the number of their ranks, started once."""
    found = {world: ranks.Ranks(world) for world in (2, 4)}
    for group in found.values():
        group.run(ranks.nothing, limit=120)
    yield found
    for group in found.values():
        group.stop()


@pytest.fixture(params=[2, 4])
def group(request, started):
    return started[request.param]


@pytest.fixture
def pair(started):
    return started[2]


# ---------------------------------------------------------------- which keys which queries see: numbers alone
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_pieces_are_the_definition(world, sharding):
    x = torch.arange(world * 6)
    for rank in range(world):
        own = torch.cat([x[p.start : p.end] for p in shards.pieces(sharding, rank, world, 6)])
        assert torch.equal(own, ranks.shard(x, rank, world, sharding, 0))
        offsets = [p.offset for p in shards.pieces(sharding, rank, world, 6)]
        assert offsets == [0, 3][: len(offsets)]


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(4, 4), (2, 6), (6, 2), (4, 10), (10, 4), (0, 4), (4, 0)])
def test_blocks_hold_every_score_once(sharding, seqlen_q, seqlen_k):
    """Each pair that a window leaves is in one block, and seen there; no other is."""
    world = 3
    shift = world * (seqlen_k - seqlen_q)
    position = {n: torch.arange(world * n) for n in (seqlen_q, seqlen_k)}
    for left, right in itertools.product((None, 0, 1, 4, 7, 100), repeat=2):
        for rank, owner, apart in itertools.product(range(world), (None, *range(world)), (False, True)):
            i = ranks.shard(position[seqlen_q], rank, world, sharding, 0)[:, None] + shift
            j = position[seqlen_k] if owner is None else ranks.shard(position[seqlen_k], owner, world, sharding, 0)
            wanted = torch.ones(len(i), len(j), dtype=torch.bool)
            if left is not None:
                wanted &= j >= i - left
            if right is not None:
                wanted &= j <= i + right
            pieces = shards.pieces(sharding, rank, world, seqlen_q)
            keys = (shards.Piece(0, world * seqlen_k),)
            if owner is not None:
                keys = shards.pieces(sharding, owner, world, seqlen_k)
            found = torch.zeros(len(i), len(j), dtype=torch.int)
            blocks = shards.blocks(pieces, keys, shift, left, right, apart)
            for b in blocks:
                found[b.rows, b.keys] += seen_by_a_call(b).int()
                if apart:
                    by = j[b.keys] - i[b.rows]
                    assert (i[b.rows][0], j[b.keys][0]) == (b.q_start, b.k_start)
                    assert {-1: (by <= 0).all(), 0: by[-1, -1] == 0, 1: (by >= 0).all()}[b.side]
            assert torch.equal(found, wanted.int()), (left, right, rank, owner, apart)
            covered = [n for rows, _ in shards.row_groups(blocks, len(i)) for n in range(rows.start, rows.stop)]
            assert covered == list(range(len(i)))


def seen_by_a_call(b: shards.Block) -> torch.Tensor:
    rows, keys = b.rows.stop - b.rows.start, b.keys.stop - b.keys.start
    diagonal, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    left, right = b.window or (None, None)
    assert all(n is None or n >= 0 for n in (left, right))
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen &= j <= diagonal if b.causal else True
    seen &= j >= diagonal - left if left is not None else True
    return seen & (j <= diagonal + right if right is not None else torch.tensor(True))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_zigzag_ranks_have_equal_work(world):
    def work(sharding: str, rank: int) -> int:
        own = shards.pieces(sharding, rank, world, 8)
        found = [shards.blocks(own, shards.pieces(sharding, owner, world, 8), 0, None, 0) for owner in range(world)]
        return sum(int(seen_by_a_call(b).sum()) for blocks in found for b in blocks)

    assert len({work("zigzag", rank) for rank in range(world)}) == 1
    assert len({work("contiguous", rank) for rank in range(world)}) == world


def test_neighbours_are_one_call():
    """Causal ranks: two calls for their own keys, one for those of any other."""
    for rank, owner in itertools.product(range(4), repeat=2):
        own, keys = (shards.pieces("zigzag", n, 4, 8) for n in (rank, owner))
        found = shards.blocks(own, keys, 0, None, 0)
        assert len(found) == (2 if rank == owner != 3 else 1)
        assert len(shards.blocks(own, keys, 0, None, None)) == 1


# ---------------------------------------------------------------- equal to one device
def made(world: int, dtype=torch.float32, per_rank=(4, 4), heads=(2, 2), dims=(16, 8), batch=2) -> dict:
    g = torch.Generator().manual_seed(world)
    (seqlen_q, seqlen_k), (heads_kv, ratio) = per_rank, heads
    shapes = {"q": (seqlen_q, heads_kv * ratio, dims[0]), "k": (seqlen_k, heads_kv, dims[0])}
    shapes["v"] = (seqlen_k, heads_kv, dims[1])
    return {n: torch.randn(batch, world * s[0], *s[1:], generator=g).to(dtype) for n, s in shapes.items()}


def whole(results: list[dict], sharding: str) -> dict:
    """Results of all ranks put together; gradients of what all hold alike are added."""
    found = {}
    for name in results[0]:
        parts = [r[name] for r in results]
        if name in ("out", "q", "k", "v"):
            found[name] = ranks.unshard(parts, sharding)
        elif name == "lse":
            found[name] = ranks.unshard(parts, sharding, dim=2)
        else:
            found[name] = sum(parts)
    return found


def by_oracle(tensors: dict, options: dict, wants: tuple, dtype: torch.dtype) -> dict:
    leaves = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    leaves = {n: t.clone().requires_grad_(n in wants) for n, t in leaves.items()}
    rest = {n: t for n, t in leaves.items() if n not in "qkv"} | options
    return_lse = rest.pop("return_lse", False)
    out, lse = oracle.attention(*(leaves[n] for n in "qkv"), **rest)
    loss = out.sin().sum()
    if return_lse:
        loss = loss + torch.where(lse.isfinite(), lse, 0).cos().sum()
    grads = torch.autograd.grad(loss, [leaves[n] for n in wants]) if wants else ()
    return {"out": out, "lse": lse, **dict(zip(wants, grads, strict=True))}


def checked(group, tensors: dict, options: dict, how: dict, wants: tuple = ("q", "k", "v")) -> dict:
    found = whole(group.run(ranks.attend, tensors, options, wants, how), how.get("sharding", "zigzag"))
    truth = by_oracle(tensors, options, wants, torch.float64)
    plain = by_oracle(tensors, options, wants, tensors["q"].dtype)
    for name, got in found.items():
        among = tuple(truth[n] for n in wants) if name in wants else ()
        oracle.assert_close(name, got, truth[name], plain[name], among)
    return found


OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "causal, window": {"causal": True, "window": (3, None)},
    "scale, softcap": {"causal": True, "softmax_scale": 0.4, "softcap": 2.0},
    "lse": {"causal": True, "return_lse": True},
    "alibi": {"alibi_slopes": "h", "return_lse": True},
    "alibi, causal": {"alibi_slopes": "bh", "causal": True},
    "alibi, window, sinks": {"alibi_slopes": "h", "sinks": True, "window": (6, 1)},
    "sinks": {"sinks": True, "causal": True, "return_lse": True},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", OPTIONS)
def test_equal_to_one_device(group, method, sharding, name):
    options = dict(OPTIONS[name])
    tensors = made(group.world)
    g = torch.Generator().manual_seed(7)
    if slopes := options.pop("alibi_slopes", None):
        tensors["alibi_slopes"] = torch.rand((4,) if slopes == "h" else (2, 4), generator=g)
    if options.pop("sinks", False):
        tensors["sinks"] = torch.randn(4, generator=g)
    checked(group, tensors, options, {"method": method, "sharding": sharding}, tuple(tensors))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("per_rank", [(2, 6), (6, 2), (0, 2), (2, 0)], ids=str)
def test_other_lengths(group, method, sharding, per_rank):
    """seqlen_q and seqlen_k differ: aligned bottom-right; rows that see no key are empty, whoever holds them."""
    tensors = made(group.world, per_rank=per_rank) | {"alibi_slopes": torch.tensor([0.5, 0.1, 1.0, 0.0])}
    found = checked(group, tensors, {"causal": True, "return_lse": True}, {"method": method, "sharding": sharding})
    empty = max(0, group.world * (per_rank[0] - per_rank[1]))
    assert (found["out"][:, :empty] == 0).all() and (found["lse"][..., :empty] == -torch.inf).all()
    assert (found["q"][:, :empty] == 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("heads", [(1, 4), (3, 1), (2, 3)], ids=str)
def test_dtypes_and_heads(group, method, dtype, heads):
    tensors = made(group.world, dtype, heads=heads)
    found = checked(group, tensors, {"causal": True}, {"method": method})
    assert all(t.dtype == dtype for t in found.values())


@pytest.mark.parametrize("method", METHODS)
def test_fp8_with_scales(pair, method):
    tensors = {n: t.to(torch.float8_e4m3fn) for n, t in made(2).items()}
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.rand(2, 2) + 0.5}
    found = whole(pair.run(ranks.attend, tensors | scales, {"causal": True}, (), {"method": method}), "zigzag")
    wide = {n: t.double() for n, t in tensors.items()}
    truth, _ = oracle.attention(**wide, **{n: t.double() for n, t in scales.items()}, causal=True)
    assert found["out"].dtype == torch.bfloat16
    oracle.assert_close("out", found["out"], truth, truth.to(torch.bfloat16))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (5, 2)}, {}], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["given", "drawn"])
def test_dropout_drops_what_one_device_drops(pair, method, options, given):
    """A pair that was not given is the first rank's."""
    tensors = made(2, torch.float64)
    how = {"method": method, "dropout_p": 0.4}
    if given:
        tensors["dropout_rng"] = torch.tensor(cases.RNG)
    found = whole(pair.run(ranks.attend, tensors, options, ("q", "k", "v"), how), "zigzag")
    if not given:
        torch.manual_seed(ranks.SEED)
        tensors["dropout_rng"] = xattn.rng.draw(torch.device("cpu"))
    leaves = {n: t.requires_grad_(n in "qkv") for n, t in tensors.items()}
    out = xattn.attention(**leaves, **options, dropout_p=0.4, backend="reference")
    grads = torch.autograd.grad(out.sin().sum(), [leaves[n] for n in "qkv"])
    for name, wanted in zip(("out", "q", "k", "v"), (out, *grads), strict=True):
        torch.testing.assert_close(found[name], wanted.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (5, 2)}], ids=str)
def test_user_functions_see_the_whole_sequence(pair, method, options):
    tensors = made(2, torch.float64)
    tensors |= {"score_mod": torch.randn(4, dtype=torch.float64), "mask_mod": torch.tensor([0, 1, 2, 0])}
    mods = ("score_mod", "mask_mod")
    wants = ("q", "k", "v", "score_mod")
    found = whole(pair.run(ranks.attend, tensors, options, wants, {"method": method}, mods), "zigzag")
    leaves = {n: t.clone().requires_grad_(n in wants) for n, t in tensors.items()}
    functions = {n: ranks.MODS[n](leaves[n]) for n in mods}
    out, _ = oracle.attention(*(leaves[n] for n in "qkv"), **options, **functions)
    grads = torch.autograd.grad(out.sin().sum(), [leaves[n] for n in wants])
    for name, wanted in zip(("out", *wants), (out, *grads), strict=True):
        torch.testing.assert_close(found[name], wanted.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wants", ["q", "k", "kv", "qv"])
def test_gradients_only_for_what_asks(pair, method, wants):
    checked(pair, made(2), {"causal": True}, {"method": method}, tuple(wants))


def test_one_rank_alone(pair):
    assert pair.run(ranks.alone, made(1)) == ["done"] * 2


# ---------------------------------------------------------------- sharding
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_shard_and_unshard(group, sharding):
    x = torch.randn(3, 8 * group.world, 2)
    for rank, (own, back, grad, last) in enumerate(group.run(ranks.shard_and_back, x, sharding)):
        assert torch.equal(own, ranks.shard(x, rank, group.world, sharding))
        assert torch.equal(back, x) and torch.equal(last, x)
        assert torch.equal(grad, group.world * 2 * own)  # each rank's loss, the sum of squares, asks for as much


def test_shards_must_be_equal(pair):
    found = pair.failures(ranks.shard_of, torch.zeros(1, 6, 1), "zigzag")
    assert found == [("ValueError", found[0][1])] * 2 and "a multiple of 4" in found[0][1]
    assert [len(s) for s in pair.run(ranks.shard_of, torch.zeros(1, 6, 1), "contiguous")] == [1, 1]


# ---------------------------------------------------------------- errors: on every rank, and no hang
@pytest.mark.parametrize(
    "wrong, error, words",
    [
        ({"method": "star"}, "ValueError", "method: got 'star'; allowed: 'ring' or 'all_gather'"),
        ({"method": None}, "TypeError", "method: got None"),
        ({"sharding": "striped"}, "ValueError", "sharding: got 'striped'"),
        ({"colour": 1}, "TypeError", "colour"),
        ({"window": (-1, 0)}, "ValueError", "window"),
        ({"backend": "sm90"}, "UnsupportedError", "sm90"),
        ({"backend": "sdpa", "softcap": 2.0}, "UnsupportedError", "sdpa"),
        ({"dropout_p": 0.5, "dropout_rng": torch.zeros(4).long()}, "ValueError", "dropout_rng"),
    ],
    ids=str,
)
@pytest.mark.parametrize("who", ["all", "one"])
def test_wrong_arguments(pair, wrong, error, words, who):
    """On the rank that is wrong, and, where only one is, on the others with its words."""
    found = pair.failures(ranks.wrong_call, wrong, None if who == "all" else 1)
    assert found[1][0] == error and words in found[1][1]
    if who == "all":
        assert found[0] == found[1]
    else:
        assert found[0][0] == "ValueError" and "rank 1 of the group failed" in found[0][1] and words in found[0][1]
    checked(pair, made(2), {"causal": True}, {})  # the group is as good as before


@pytest.mark.parametrize("name", ["attn_mask", "seqused_k", "epilogue", "out"])
@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_be_honoured_is_refused_before_anything_is_sent(pair, name, method):
    for kind, text, sent in pair.run(ranks.refused_call, name, method):
        assert kind == "UnsupportedError" and text.startswith(f"{name}: got") and sent == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name, other",
    [
        ("q", {"q": (1, 6, 2, 8)}),
        ("k", {"k": (1, 6, 2, 8), "v": (1, 6, 2, 8)}),
        ("v", {"v": (1, 4, 2, 16)}),
        ("q", {"dtype": torch.float64}),
        ("causal", {"causal": True}),
        ("method", {"method": "swap"}),
        ("gradients", {"grad": True}),
        ("sinks", {"sinks": torch.zeros(2)}),
        ("softmax_scale", {"softmax_scale": 0.5}),
        ("dropout_rng", {"dropout_rng": torch.tensor([1, 2])}),
    ],
    ids=str,
)
def test_ranks_that_differ(pair, method, name, other):
    found = pair.failures(ranks.differing_call, method, other)
    assert found[0] == found[1] and found[0][0] == "ValueError"
    assert found[0][1].startswith(f"{name}: got ") and "on rank 0" in found[0][1] and "on rank 1" in found[0][1]


def test_odd_shards_have_no_zigzag(pair):
    tensors = made(2, per_rank=(3, 3))
    checked(pair, tensors, {"causal": True}, {"sharding": "contiguous"})
    for kind, text in pair.failures(ranks.wrong_call, {"q": torch.zeros(1, 3, 2, 8)}, None):
        assert kind == "ValueError" and text.startswith("q: got 3 in dimension 1; allowed: an even length")


@pytest.mark.parametrize("wrong", ["all", 0, torch.zeros(2)], ids=str)
def test_what_is_no_group(pair, wrong):
    for kind, text in pair.failures(ranks.wrong_call, {"group": wrong}, None):
        assert kind == "TypeError" and text.startswith(
            f"group: got {type(wrong).__name__}; allowed: a torch.distributed"
        )


def test_without_a_process_group():
    x = torch.zeros(1, 4, 2, 8)
    for call in (
        lambda: xattn.context_parallel(x, x, x),
        lambda: xattn.context_parallel_shard(x),
        lambda: xattn.context_parallel_unshard(x),
    ):
        with pytest.raises(RuntimeError, match="init_process_group"):
            call()


def test_groups_of_some_ranks(group):
    """Each half of the ranks is a group, numbered anew; who is in none is told so."""
    tensors = made(group.world // 2)
    truth, _ = oracle.attention(**{n: t.double() for n, t in tensors.items()}, causal=True)
    for half, found in group.run(ranks.in_halves, tensors):
        wanted = ranks.shard(truth, half, group.world // 2)
        torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- beside the rest of torch
def test_communication_goes_on_beside_the_computation(pair):
    """What comes next is sent for before the part at hand is computed, and waited for after."""
    for forward, backward in pair.run(ranks.order_of_events):
        assert forward == ["send", "attend", "wait", "attend"]
        # Keys leave; a part; its gradients leave; keys came; a part; gradients came, leave again, and are home.
        assert backward == ["send", "attend", "send", "wait", "attend", "wait", "send", "wait"]


def test_what_is_kept_for_the_backward(group):
    """The ring keeps a shard and its result, whatever the number of ranks; all_gather keys and values, once."""
    for ring, gathered in group.run(ranks.kept_for_backward):
        assert ring == 1.0
        assert gathered <= 1 + 2 * group.world


@pytest.mark.parametrize("method", METHODS)
def test_autocast_checkpoints_and_modes(pair, method):
    assert pair.run(ranks.modes, method) == ["done"] * 2


def test_compiled_code_breaks_here(pair):
    assert pair.run(ranks.compiled, limit=120) == ["done"] * 2


@pytest.mark.parametrize("method", METHODS)
def test_second_derivatives(pair, method):
    found = pair.failures(ranks.second_derivative, method)
    if method == "ring":
        assert all(kind == "UnsupportedError" and "second derivative" in text for kind, text in found)
    else:
        assert found == [("", "")] * 2


def test_transforms_are_refused(pair):
    for kind, text in pair.failures(ranks.under_grad):
        assert kind == "UnsupportedError" and "torch.func" in text


def test_a_rank_that_does_not_come(pair):
    kind, text = pair.failures(ranks.absent, 1)[0]
    assert kind == "RuntimeError" and "rank 1 of the group did not make this call" in text
    pair.stop()  # the ranks' counts of calls differ now: the last test
