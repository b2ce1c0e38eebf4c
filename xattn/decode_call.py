"""Paged calls with few queries: the decode kernel (csrc_cuda/kernels/attention_decode.h), from inputs to one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import forward_call
from .device import of as device_of
from .forward_call import CACHES, Fields, ForwardBody, Tiles
from .images import ImageSpec
from .inputs import FP8, Inputs
from .kernel_call import Call, Output, Shape, slot
from .launch_params import ForwardParams
from .problem import Problem, SizeBucket

TILE_M = 16
_TILE_NAMES = ("tile_n", "num_warps", "num_stages", "min_blocks")
_MOST_ROWS = 64  # queries times heads that share a key head: more go to the forward body
# kDecodeTiles and kDecodeSplits of attention_decode.h.
_SPLIT_TILES, _MOST_SPLITS = 512, 128
_NARROW_MULTIPLE = 64  # of head dimensions: rows of a tile are halves of 64 or 128 bytes


@dataclass(frozen=True)
class DecodeBody:
    """A layer of the decode kernel. ``tiles``: rows (largest head dimension, *_TILE_NAMES), ``narrow_tiles`` those for
    caches of 8 bits; min_blocks are on a multiprocessor at once. ``narrow_cache`` names the one that an architecture
    reads."""

    entry: str
    warp_size: int
    tiles: Tiles
    narrow_tiles: Tiles
    narrow_cache: Callable[[str], str] = lambda arch: "e4m3"

    def tile(self, head_dim: int, head_dim_v: int, narrow: bool = False) -> tuple[tuple[str, int], ...]:
        """``narrow``: the cache is of 8 bits."""
        if narrow:
            return forward_call.chosen_tile(self.narrow_tiles, _TILE_NAMES, head_dim, head_dim_v, _NARROW_MULTIPLE)
        return forward_call.chosen_tile(self.tiles, _TILE_NAMES, head_dim, head_dim_v)

    def fields(self, element: tuple[str, str], sizes: Fields, chosen: Fields, cache: str = "") -> Fields:
        """``cache``: "" where it holds the element."""
        keep_q = int(dict(sizes)["head_dim"]) <= 64  # registers for it
        return (element, ("cache", cache or element[1]), *sizes, ("keep_q", keep_q), ("paged", True), *chosen)

    def images(self, arch: str) -> Iterator[ImageSpec]:
        """Every configuration for an architecture."""
        for d, dv in forward_call.padded_dims(self.tiles):
            for name, chosen in forward_call.variants(paged=True):
                yield ImageSpec(self.entry, self.fields(("element", name), self.tile(d, dv), chosen), arch)
        yield from self.narrow_images(arch)

    def narrow_images(self, arch: str) -> Iterator[ImageSpec]:
        """Those that read caches of 8 bits."""
        cache = self.narrow_cache(arch)
        for d, dv in forward_call.padded_dims(self.narrow_tiles, _NARROW_MULTIPLE):
            for name, chosen in forward_call.variants(paged=True, scaled=True):
                fields = self.fields(("element", name), self.tile(d, dv, narrow=True), chosen, cache)
                yield ImageSpec(self.entry, fields, arch)

    def shared_bytes(self, fields: Fields) -> int:
        """kSharedBytes of attention_decode.h."""
        c = {name: int(value) for name, value in fields if not isinstance(value, str)}
        narrow = dict(fields)["cache"] in CACHES.values()
        size = 1 if narrow else 2
        rings = c["num_warps"] * c["num_stages"] * c["tile_n"] * (c["head_dim"] + c["head_dim_v"]) * size
        rings += 4 * TILE_M if narrow else 0
        parts = c["num_warps"] * 4 * TILE_M * (c["head_dim_v"] + 6) + 16
        return max(2 * TILE_M * c["head_dim"] + rings, parts)


# Measured on an H200 beside others, see NOTES.md in csrc_cuda/arch/sm80; 99 KiB hold a block on every architecture.
NVIDIA = DecodeBody(
    entry="arch/sm80/decode.cu",
    warp_size=32,
    tiles=((64, 32, 4, 3, 2), (128, 16, 4, 2, 2), (256, 16, 2, 2, 3)),
    narrow_tiles=((64, 32, 4, 4, 2), (128, 32, 4, 2, 2), (256, 16, 2, 4, 2)),  # as many bytes under way; not measured
)


def serves(problem: Problem, size: SizeBucket) -> bool:
    """Whether the decode kernel is the faster one. Where a sequence's result must not depend on the others, it answers
    whatever the longest one is; it alone reads caches of 8 bits."""
    few = size.seqlen_q * problem.gqa_ratio <= _MOST_ROWS
    return problem.kind == "paged" and (few or problem.batch_invariant or problem.dtype_kv in FP8)


def config(
    forward: ForwardBody, decode: DecodeBody, problem: Problem, size: SizeBucket
) -> tuple[tuple[str, object], ...]:
    """``Backend.config`` of a backend with both bodies."""
    if serves(problem, size):
        return decode_config(decode, problem)
    return forward_call.plan_config(forward.tile(problem.head_dim, problem.head_dim_v, problem.dropout), problem)


def decode_config(body: DecodeBody, problem: Problem) -> tuple[tuple[str, object], ...]:
    """The decode kernel's part of ``Backend.config``."""
    tile = body.tile(problem.head_dim, problem.head_dim_v, problem.dtype_kv in FP8)
    return forward_call.plan_config((("kernel", "decode"), *tile), problem)


def prepare(
    forward: ForwardBody, decode: DecodeBody, inputs: Inputs, options: tuple[tuple[str, object], ...]
) -> tuple[Call, dict[str, Tensor]]:
    """``Backend.prepare`` of a backend with both bodies."""
    if dict(options).get("kernel") == "decode":
        return prepare_decode(decode, inputs)
    return forward_call.prepare(forward, inputs, options)


def prepare_decode(body: DecodeBody, x: Inputs) -> tuple[Call, dict[str, Tensor]]:
    """The decode kernel's part of ``Backend.prepare``."""
    cache = CACHES.get(x.k.dtype, "")
    sizes = body.tile(x.head_dim, x.head_dim_v, bool(cache))
    c = dict(sizes)
    described = forward_call.describe(x, TILE_M, 1, forward_call.direct)
    p = described.params
    # A longest sequence that the caller only bounds may be far longer than q.
    longest = min(x.seqlen_q, x.q.shape[0]) if x.packed else x.seqlen_q
    rows = longest * (x.num_heads_q // x.num_heads_kv)
    p.m_blocks = max(-(-rows // TILE_M), int(x.packed))
    tiles = p.sequences * x.num_heads_kv * p.m_blocks
    at = device_of(x.q.device)
    p.num_splits = splits(x, tiles, c["tile_n"], c["num_warps"], at.sm_count * c["min_blocks"])
    p.queue = -1
    outputs = described.outputs
    if p.num_splits > 1:
        parts = (tiles, p.num_splits, TILE_M, c["head_dim_v"] + 2)
        outputs = (*outputs, Output(slot(ForwardParams, "partials"), parts, torch.float32))
    chosen = forward_call.switches(x, described.mask, scaled=bool(cache))
    fields = body.fields(forward_call.element(x), sizes, chosen, cache)
    image, another = forward_call.choose(body.entry, fields, at.arch)
    call = Call(
        image=image,
        symbol="xattn_decode",
        device=x.q.device,
        shape=Shape((tiles * p.num_splits, 1, 1), (body.warp_size * c["num_warps"], 1, 1), body.shared_bytes(fields)),
        params=p,
        slots=described.slots(),
        outputs=outputs,
        aligned=3,
        other_image=another,
        queue=slot(ForwardParams, "queue") if p.num_splits > 1 else None,
    )
    return call, described.tensors


def splits(x: Inputs, tiles: int, tile_n: int, num_warps: int, blocks_at_once: int) -> int:
    """Parts that the keys of each tile are cut into, so that every multiprocessor has work, from what the host knows:
    lengths are on the device."""
    if x.batch_invariant or not 0 < tiles <= _SPLIT_TILES:
        return 1
    key_blocks = -(-x.seqlen_k // tile_n)
    wanted = blocks_at_once // tiles if x.num_splits is None else x.num_splits
    return max(1, min(wanted, -(-key_blocks // num_warps), _MOST_SPLITS))
