"""Hopper (sm_90): TMA and wgmma, warp-specialised (csrc_cuda/arch/sm90)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from .. import append_call, backward_call, decode_call, forward_call, jit, launch
from ..capability import Refusal
from ..device import Device
from ..device import of as device_of
from ..forward_call import Fields
from ..images import ImageSpec
from ..inputs import Inputs, is_direct
from ..kernel_call import Call, Shape, TensorMap
from ..launch_params import ForwardParams
from ..problem import Problem, SizeBucket
from .base import Backend, Config

CAPABILITY = replace(
    forward_call.SHARED_CAPABILITY, vendors=frozenset({"nvidia"}), archs=frozenset({"sm_90"}), page_size_multiple_of=8
)

_ENTRY, _ARCH = "arch/sm90/forward.cu", "sm_90a"  # Hopper's own instructions are in sm_90a only
# No kernel of Hopper's own yet: sm80's, compiled for it.
BACKWARD = replace(backward_call.NVIDIA, arch=_ARCH)
_DIMS = (64, 96, 128, 192, 256)  # other head dimensions are padded by TMA to the next


class Tile(NamedTuple):
    """A configuration and where it is chosen: the first row of the table that answers, by the larger head dimension.

    ``plain``: only where a score is the scaled product and no more, as its lanes have no registers for other things;
    ``least``: lengths of q and k from which on it is the fastest, without and with causal; None: never. ``reason``:
    measured, TFLOP/s on an H200 in bf16 beside what it was compared with.
    """

    largest: int
    tile_n: int
    num_warpgroups: int
    num_stages: int
    keep_q: bool
    q_stages: int
    plain: bool = False
    least: tuple[int | None, int | None] = (0, 0)
    reason: str = ""

    def sizes(self, head_dim: int, head_dim_v: int) -> tuple[tuple[str, int | bool], ...]:
        d, dv = (next(n for n in _DIMS if dim <= n) for dim in (head_dim, head_dim_v))
        return (("head_dim", d), ("head_dim_v", dv), *((n, getattr(self, n)) for n in _TILE_NAMES))


_TILE_NAMES = ("tile_n", "num_warpgroups", "num_stages", "keep_q", "q_stages")
TILES = (
    Tile(
        64, 128, 3, 4, False, 2, plain=True, least=(512, 2048),
        reason="full s512 405 with 3 warpgroups, 370 with 2, s8192 546, 436; causal s1024 302, 324, s2048 417, 378",
    ),
    Tile(64, 128, 2, 4, True, 1, reason="s2048 413 with 128 keys, 404 with 192"),
    Tile(96, 128, 2, 3, True, 1),
    Tile(
        128, 128, 2, 2, True, 1,
        reason="s2048 657 with 128 keys, 633 with 3 warpgroups of 80; s16384 673, 687, causal 661, 670",
    ),
    Tile(192, 112, 2, 2, False, 1),
    Tile(256, 64, 2, 2, False, 1, reason="causal s2048 587 with 64 keys, 554 with 80"),
)  # fmt: skip
_WORKS = 4  # kWorks, and the bytes of a Work and its two barriers
_WORK_BYTES = 64 + 16
_SIZE_NAMES = ("head_dim", "head_dim_v", *_TILE_NAMES)


class Params(ctypes.Structure):
    """Sm90Params of csrc_cuda/arch/sm90/forward.h, which is a multiple of 64 bytes."""

    _fields_ = (
        ("q", ctypes.c_uint64 * 16),
        ("k", ctypes.c_uint64 * 16),
        ("v", ctypes.c_uint64 * 16),
        ("p", ForwardParams),
        ("tiles", ctypes.c_int32),
        ("queue", ctypes.c_int32),
        ("piece", ctypes.c_int32),
        ("padding", ctypes.c_byte * (-(ctypes.sizeof(ForwardParams) + 12) % 64)),
    )


def rows(head_dim: int, head_dim_v: int) -> list[Tile]:
    """The rows of the table that can be chosen for head dimensions."""
    found = [row for row in TILES if max(head_dim, head_dim_v) <= row.largest]
    return found[: next(n for n, row in enumerate(found) if not row.plain) + 1]


def tile(problem: Problem, size: SizeBucket) -> Tile:
    """The configuration for a call."""
    plain = not (problem.softcap or problem.alibi_slopes or problem.attn_mask)
    whole = plain and not problem.window and problem.kind == "attention"  # what the rows were measured on
    length = min(size.seqlen_q, size.seqlen_k)

    def serves(row: Tile) -> bool:
        least = row.least[problem.causal]
        return not row.plain or (whole and least is not None and length >= least)

    return next(row for row in rows(problem.head_dim, problem.head_dim_v) if serves(row))


def _is_plain(switches: Fields) -> bool:
    return all(value in (False, "none") for _, value in switches)


def _fields(element: tuple[str, str], sizes: Fields, paged: bool, switches: Fields) -> Fields:
    """An image's configuration. Where a score is more than a product its lanes need registers: Q stays in shared memory
    then, unless it is small."""
    if not _is_plain(switches) and dict(sizes)["head_dim"] != 64:
        sizes = tuple((name, False if name == "keep_q" else value) for name, value in sizes)
    return (element, *sizes, ("paged", paged), *switches)


def _prepare(inputs: Inputs, config: Config) -> tuple[Call, dict[str, Tensor]]:
    x, options = inputs, dict(config)
    if options.get("kernel") == "decode":
        return decode_call.prepare_decode(decode_call.NVIDIA, inputs)
    paged = x.kind == "paged"
    sizes = tuple((n, _number(options[n])) for n in _SIZE_NAMES)
    tile_n, groups = (_number(options[n]) for n in ("tile_n", "num_warpgroups"))
    tile_m = 64 * groups
    forward = forward_call.describe(x, tile_m, _section(x), _direct)
    fields = _fields(forward_call.element(x), sizes, paged, forward_call.switches(x, forward.mask))
    image, another = forward_call.choose(_ENTRY, fields, _ARCH)
    base = Params.p.offset
    piece = math.gcd(tile_n, x.page_size) if paged else tile_n
    params = Params(p=forward.params, tiles=forward.tiles, queue=-1, piece=piece)
    q, k, v = (forward.tensors[n] for n in "qkv")
    if x.kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    sms = device_of(x.q.device).sm_count
    # Without keys nothing is loaded: Q stands for what has no address.
    numbered = [(n, t) if t.numel() else (0, q) for n, t in enumerate((q, k, v))]
    boxes = ((Params.q, tile_m), (Params.k, piece), (Params.v, piece))
    call = Call(
        image=image,
        symbol="xattn_forward",
        device=x.q.device,
        shape=Shape(
            (min(forward.tiles, sms) if q.numel() else 0, 1, 1),
            (128 * (groups + 1), 1, 1),
            shared_bytes(fields),
        ),
        params=params,
        slots=forward.slots(base),
        outputs=tuple(replace(o, offset=base + o.offset) for o in forward.outputs),
        aligned=3,
        maps=tuple(_map(field.offset, n, t, rows) for (field, rows), (n, t) in zip(boxes, numbered, strict=True)),
        other_image=another,
        queue=Params.queue.offset if forward.tiles > sms else None,
    )
    return call, forward.tensors


def shared_bytes(sizes: Fields) -> int:
    """Shared memory of a configuration, kSharedBytes of csrc_cuda/arch/sm90/forward.h."""
    c = {name: int(value) for name, value in sizes if not isinstance(value, str)}
    panels, panels_v = (-(-c[n] // 64) for n in ("head_dim", "head_dim_v"))
    panel_q = 128 * 64 * c["num_warpgroups"]
    tensors = c["q_stages"] * panels * panel_q + 128 * c["num_stages"] * c["tile_n"] * (panels + panels_v)
    fitting = min(panels_v, (226 * 1024 - tensors) // panel_q)
    if fitting == panels_v or not (c["keep_q"] or c["q_stages"] == 2):
        tensors += fitting * panel_q  # of the output
    return tensors + _WORKS * _WORK_BYTES + 8 * (2 * c["q_stages"] + 4 * c["num_stages"])


def _section(x: Inputs) -> int:
    """Heads whose tiles are worked on together (kernels/scheduler.h)."""
    bounded = x.causal or x.window_right is not None
    return 32 // (x.num_heads_q // x.num_heads_kv) if bounded else 1


def _number(value: object) -> int | bool:
    assert isinstance(value, int)
    return value


def _map(offset: int, number: int, t: Tensor, rows: int) -> TensorMap:
    """(head_dim, row, head, sequence) in boxes of 64 columns and ``rows`` rows, swizzled by 128 bytes."""
    if t.dim() == 3:
        t = t[None]
    order = (3, 1, 2, 0)
    sizes = tuple(max(1, t.shape[n]) for n in order)
    strides = tuple(2 if n == 3 else 2 * t.stride(n) if t.shape[n] > 1 else 16 for n in order)
    element = 6 if t.dtype == torch.float16 else 9
    return TensorMap(offset, number, element, sizes, strides, (64, rows, 1, 1), swizzle=3, l2_promotion=3)


def _direct(t: Tensor) -> Tensor:
    """The tensor, or a copy of it that TMA can read: rows at multiples of 16 bytes, no stride 0."""
    moves = all(s > 0 or n <= 1 for s, n in zip(t.stride(), t.shape, strict=True))
    return t if moves and is_direct(t) else t.clone(memory_format=torch.contiguous_format)


def _images(arch: str) -> Iterator[ImageSpec]:
    if arch != _ARCH:
        return
    yield from BACKWARD.images(arch)
    for d, dv in product(_DIMS, _DIMS):
        for row in rows(d, dv):
            for paged in (False, True):
                for name, chosen in forward_call.variants(paged):
                    # The scale's sign is not part of a problem: every row must serve both.
                    plain = not paged and _is_plain(tuple(c for c in chosen if c[0] != "any_scale"))
                    if plain or not row.plain:
                        yield ImageSpec(_ENTRY, _fields(("element", name), row.sizes(d, dv), paged, chosen), arch)


def _too_large(problem: Problem, size: SizeBucket) -> tuple[Refusal, ...]:
    tile_m = 64 * tile(problem, size).num_warpgroups
    own = forward_call.too_large(problem, size, tile_m, forward_call.MOST_TILES, -(-size.rows // tile_m))
    return own or BACKWARD.too_large(problem, size)


def _missing(device: Device) -> str:
    return launch.missing() or jit.missing(_ARCH)


def _config(problem: Problem, size: SizeBucket, device: Device) -> Config:
    dims = problem.head_dim, problem.head_dim_v
    if decode_call.serves(problem, size):
        return forward_call.plan_config((("kernel", "decode"), *decode_call.NVIDIA.tile(*dims)), problem)
    row = tile(problem, size)
    config = forward_call.plan_config(row.sizes(*dims), problem)
    measured = (("measured", row.reason),) if row.reason else ()
    return (*config, *measured, *BACKWARD.plan(problem))


BACKEND = Backend(
    "sm90",
    native=True,
    capabilities=lambda: (CAPABILITY,),
    prepare=_prepare,
    config=_config,
    backward=BACKWARD.backward,
    missing=_missing,
    too_large=_too_large,
    images=_images,
    append=append_call.NVIDIA,
)
