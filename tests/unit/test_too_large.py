"""Sizes that kernels have no 32-bit number for: refused by name, and everything up to there is told to them as it is.

Meta tensors and devices that are only talked about: nothing is allocated.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

import xattn
from xattn import explain, forward_call
from xattn.backends import REGISTRY
from xattn.inputs import Inputs
from xattn.launch_params import Divisor, ForwardParams
from xattn.problem import SizeBucket

ROWS = 2**30 - 2**10
TILES = {"sm80": 2**31 - 2**12, "sm90": 2**31 - 2**12, "cdna": (2**32 - 1) // 256}
TILE_M = {"sm80": 128, "sm90": 128, "cdna": 64}  # of head dimension 8
ARCHS = {"sm80": "sm_80", "sm90": "sm_90", "cdna": "gfx942"}
BACKENDS = list(TILES)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dense(batch=1, heads=1, seqlen_q=1, seqlen_k=1, head_dim=8, heads_kv=1) -> dict:
    q, k = empty(batch, seqlen_q, heads, head_dim), empty(batch, seqlen_k, heads_kv, head_dim)
    return {"kind": "attention", "q": q, "k": k, "v": k}


def varlen(batch=1, heads=1, total_q=1, total_k=1, max_q=1, max_k=1, heads_kv=1) -> dict:
    q, k, offsets = empty(total_q, heads, 8), empty(total_k, heads_kv, 8), empty(batch + 1, dtype=torch.int32)
    given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return {"kind": "varlen", "q": q, "k": k, "v": k, **given}


def planned(given: dict, device: str, backend: str | None = None) -> xattn.Plan:
    rest = {n: t for n, t in given.items() if n != "kind"}
    return explain(*rest.values(), kind=given["kind"], device=device, backend=backend)


def most(backend: str) -> dict[str, tuple[dict, dict, str]]:
    """By words: the largest that is answered, one more, and what is blamed then."""
    tiles, tile_m = TILES[backend], TILE_M[backend]
    found = {
        "batch": (dense(tiles), dense(tiles + 1), "tiles"),
        "batch_and_heads": (dense(tiles // 2, 2), dense(tiles // 2 + 1, 2), "tiles"),
        "packed_sequences": (varlen(tiles - 1), varlen(tiles), "tiles"),
        "packed_sequences_and_heads": (varlen(tiles // 4 - 1, 4), varlen(tiles // 4, 4), "tiles"),
        "m_blocks": (dense(1, 256, tiles // 256 * tile_m), dense(1, 256, (tiles // 256 + 1) * tile_m), "tiles"),
        "packed_blocks": (
            varlen(7, tiles // 16, 9, 1, tile_m + 1),
            varlen(7, tiles // 16 + 1, 9, 1, tile_m + 1),
            "tiles",
        ),
        "seqlen_k": (dense(seqlen_k=ROWS), dense(seqlen_k=ROWS + 1), "seqlen_k"),
        "max_seqlen_k": (varlen(max_k=ROWS), varlen(max_k=2**32 + 5), "seqlen_k"),
        "total_q": (varlen(total_q=ROWS), varlen(total_q=ROWS + 1), "rows of a packed"),
        "total_k": (varlen(total_k=ROWS), varlen(total_k=ROWS + 1), "rows of a packed"),
        "seqlen_q": (dense(seqlen_q=ROWS), dense(seqlen_q=ROWS + 1), "seqlen_q"),
        "max_seqlen_q": (varlen(0, max_q=ROWS), varlen(0, max_q=2**32 + 5), "seqlen_q"),
    }
    if backend != "cdna":  # which counts fewer tiles
        n = 2**28
        found["row_stride"] = (dense(heads=n - 1, heads_kv=n - 1), dense(heads=n, heads_kv=n), "head_dim")
    if backend == "sm90":
        rows = tiles // 2**10 * tile_m
        found["spare_blocks"] = (varlen(0, 2**10, rows), varlen(0, 2**10, rows + 1), "tiles")
    return found


CASES = [pytest.param(b, *case, id=f"{b}-{words}") for b in BACKENDS for words, case in most(b).items()]


@pytest.mark.parametrize("backend, fits, large, blamed", CASES)
def test_what_overflows_is_refused_by_name(request, backend, fits, large, blamed):
    device = ARCHS[backend]
    assert planned(fits, device, backend).backend == backend
    refused = planned(large, device, backend)
    [(name, refusals)] = refused.rejected
    assert (name, refused.backend) == (backend, None)
    assert {r.code for r in refusals} == {"large"} and any(blamed in r.field for r in refusals), refusals
    assert all("up to" in str(r) and str(r.got) in str(r) for r in refusals)
    fallback = planned(large, device)
    assert fallback.backend not in (None, backend) and dict(fallback.rejected)[backend] == refusals
    assert fallback.native == ("spare_blocks" in request.node.callspec.id)  # where sm80 answers


@pytest.mark.parametrize("backend, fits, large, blamed", CASES)
def test_what_fits_is_told_as_it_is(backend, fits, large, blamed):
    """No field of the parameter block has lost a bit of the number that it was given."""
    x = Inputs(**fits)
    packed = int(x.packed)
    forward = forward_call.describe(x, TILE_M[backend], 1, lambda t: t)
    p = forward.params
    assert (p.batch, p.sequences, p.heads_q, p.heads_kv) == (x.batch, x.batch + packed, x.num_heads_q, x.num_heads_kv)
    assert (p.seqlen_q, p.seqlen_k, p.total_q, p.total_k) == (x.seqlen_q, x.seqlen_k, x.q.shape[0], x.k.shape[0])
    assert p.m_blocks * TILE_M[backend] >= x.seqlen_q and p.m_blocks > 0
    assert forward.tiles == (x.batch + packed) * x.num_heads_q * p.m_blocks <= TILES[backend]
    assert p.q.row_stride < 2**31 and p.k.row_stride < 2**31
    heads = p.sequences * p.heads_q
    for name, value in {"section_tiles": p.section_heads.value * p.m_blocks, "heads": p.heads_q}.items():
        d: Divisor = getattr(p, name)
        assert d.value == value and d.multiplier == (1 << d.shift) // value + 1
        for n in (0, 1, value - 1, value, forward.tiles - 1, 2**31 - 1):
            assert (n * d.multiplier) >> d.shift == n // value
    assert heads + p.section_heads.value < 2**32
    assert ctypes.sizeof(ForwardParams) % 8 == 0


@pytest.mark.parametrize("window", [2**30 - 2, 2**30 - 1, 2**30, 2**31, 2**40])
def test_a_distance_beyond_every_key_is_unbounded(window):
    x = Inputs(**dense(seqlen_q=7, seqlen_k=ROWS), window_left=window, window_right=window)
    p = forward_call.describe(x, 128, 1, lambda t: t).params
    assert p.window_left == p.window_right >= ROWS
    assert ROWS + 2**10 + p.window_right <= 2**31 - 1


def test_backends_that_are_not_native_have_no_such_bound():
    x = Inputs(**dense(batch=2**31))
    for backend in REGISTRY:
        if not backend.native:
            assert backend.too_large(x.problem(), x.size_bucket()) == ()


@pytest.mark.parametrize("sizes", [(8, 32, 131072, 131072), (2**16, 64, 1, 2**20), (1, 128, 2**20, 2**20)])
def test_sizes_that_people_have_are_powers_of_two(sizes):
    batch, heads, seqlen_q, seqlen_k = sizes
    assert SizeBucket.of(*sizes, rows=batch * seqlen_q - 1) == SizeBucket(*sizes)
    assert SizeBucket.of(batch, heads, seqlen_q, seqlen_k - 1, rows=77) == SizeBucket(*sizes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_counts_tiles_of_keys(backend):
    """More than the forward has tiles, where the gradients are asked for."""
    given = dense(heads=128, heads_kv=128, seqlen_k=2**29, head_dim=256)
    assert planned(given, ARCHS[backend], backend).backend == backend
    given["q"].requires_grad_()
    [(name, refusals)] = planned(given, ARCHS[backend], backend).rejected
    assert name == backend and {r.code for r in refusals} == {"large"} and "tiles" in refusals[0].field
