"""Hopper (sm_90): TMA and wgmma, warp-specialised (csrc_cuda/arch/sm90)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from .. import append_call, backward_call, decode_call, forward_call, jit, launch
from ..capability import HeadDims, Refusal
from ..device import Device
from ..device import of as device_of
from ..forward_call import Fields
from ..images import ImageSpec, Source
from ..inputs import Inputs
from ..kernel_call import Call, Shape
from ..launch_params import ForwardParams
from ..problem import Problem, SizeBucket
from ..tensor_maps import mapped, tensor_map
from ..wgmma_backward import WgmmaBackward
from .base import Backend, Config

CAPABILITY = replace(
    forward_call.SHARED_CAPABILITY, vendors=frozenset({"nvidia"}), archs=frozenset({"sm_90"}), page_size_multiple_of=8
)
GRADIENTS = forward_call.gradients(CAPABILITY)

# All of q, k and v in 8 bits.
FP8 = replace(
    CAPABILITY,
    kinds=frozenset({"attention", "varlen"}),
    dtypes=frozenset({("fp8_e4m3", "fp8_e4m3")}),
    head_dim=HeadDims(largest=256, multiple_of=16),
    head_dim_v=HeadDims(largest=256, multiple_of=16),
    features=forward_call.CAPABILITY.features | {"scales"},
    as_it_lies=frozenset(),
    page_size_multiple_of=1,
)
# The decode kernel reads them, whatever the number of queries: TMA would bring 8 bits to where wgmma wants 16.
FP8_CACHE = forward_call.fp8_cache(CAPABILITY, "fp8_e4m3")

_ENTRY, _ARCH = "arch/sm90/forward.cu", "sm_90a"  # Hopper's own instructions are in sm_90a only
# Beside the kernels of Hopper's own, sm80's, compiled for it.
BACKWARD = WgmmaBackward(shared=replace(backward_call.NVIDIA, arch=_ARCH))
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

    def dropping(self) -> Tile:
        """For calls with dropout: keys in multiples of 64, those of one evaluation of its numbers."""
        whole = self.tile_n // 64 * 64
        return self if whole == self.tile_n else self._replace(tile_n=whole, reason="")


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
# Of 8-bit elements, whose products are half as long: more keys to a block.
NARROW_TILES = (
    Tile(64, 160, 3, 2, False, 2, plain=True),
    Tile(64, 128, 2, 3, True, 1),
    Tile(96, 128, 2, 2, True, 1),
    Tile(
        128,
        96,
        3,
        2,
        False,
        1,
        plain=True,
        reason="e4m3 s8192 876 with 3 warpgroups of 96 keys, 842 with 2 of 160; causal 827, 771",
    ),
    Tile(128, 128, 2, 2, True, 1),
    Tile(192, 128, 2, 2, False, 1),
    Tile(256, 96, 2, 2, False, 1),
)
_WORKS = 4  # kWorks, and the bytes of a Work and its two barriers
_WORK_BYTES = 64 + 16
_SIZE_NAMES = ("head_dim", "head_dim_v", *_TILE_NAMES)


class Maps(ctypes.Structure):
    """What Sm90Params begins with."""

    _fields_ = (("q", ctypes.c_uint64 * 16), ("k", ctypes.c_uint64 * 16), ("v", ctypes.c_uint64 * 16))


@lru_cache(maxsize=256)
def params_with(forward: type[ForwardParams]) -> Any:
    """Sm90Params<forward> of csrc_cuda/arch/sm90/forward.h, which is a multiple of 64 bytes."""
    size = ctypes.sizeof(forward)
    fields = [("p", forward), *((name, ctypes.c_int32) for name in ("tiles", "queue", "piece"))]
    fields.append(("padding", ctypes.c_byte * (-(size + 12) % 64)))
    return type("Params", (Maps,), {"_fields_": fields})


Params = params_with(ForwardParams)  # without user functions


def rows(head_dim: int, head_dim_v: int, narrow: bool = False) -> list[Tile]:
    """The rows of the table that can be chosen for head dimensions; ``narrow``: of 8-bit elements."""
    found = [row for row in (NARROW_TILES if narrow else TILES) if max(head_dim, head_dim_v) <= row.largest]
    return found[: next(n for n, row in enumerate(found) if not row.plain) + 1]


def tile(problem: Problem, size: SizeBucket) -> Tile:
    """The configuration for a call."""
    p = problem
    plain = not (p.softcap or p.score_mod or p.alibi_slopes or p.attn_mask or p.mask_mod or p.dropout)
    whole = plain and not problem.window and problem.kind == "attention"  # what the rows were measured on
    length = min(size.seqlen_q, size.seqlen_k)

    def serves(row: Tile) -> bool:
        least = row.least[problem.causal]
        return not row.plain or (whole and least is not None and length >= least)

    narrow = problem.dtype.startswith("fp8")
    found = next(row for row in rows(problem.head_dim, problem.head_dim_v, narrow) if serves(row))
    return found.dropping() if problem.dropout else found


def _is_plain(switches: Fields) -> bool:
    return all(not value.scores if isinstance(value, Source) else value in (False, "none") for _, value in switches)


def _fields(element: tuple[str, str], sizes: Fields, paged: bool, switches: Fields) -> Fields:
    """An image's configuration. Where a score is more than a product its lanes need registers: Q stays in shared memory
    then, unless it is small."""
    if not _is_plain(tuple(s for s in switches if s[0] != "dropout")) and dict(sizes)["head_dim"] != 64:
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
    forward = forward_call.describe(x, tile_m, _section(x), mapped)
    fields = _fields(forward_call.element(x), sizes, paged, forward_call.switches(x, forward.mask))
    image, another = forward_call.choose(_ENTRY, fields, _ARCH)
    made = params_with(type(forward.params))
    base = made.p.offset
    piece = math.gcd(tile_n, x.page_size) if paged else tile_n
    params = made(p=forward.params, tiles=forward.tiles, queue=-1, piece=piece)
    q, k, v = (forward.tensors[n] for n in "qkv")
    if x.kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    sms = device_of(x.q.device).sm_count
    # Without keys nothing is loaded: Q stands for what has no address.
    numbered = [(n, t) if t.numel() else (0, q) for n, t in enumerate((q, k, v))]
    boxes = ((Maps.q, tile_m), (Maps.k, piece), (Maps.v, piece))
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
        maps=tuple(tensor_map(field.offset, n, t, rows) for (field, rows), (n, t) in zip(boxes, numbered, strict=True)),
        other_image=another,
        queue=made.queue.offset if forward.tiles > sms else None,
    )
    return call, forward.tensors


def shared_bytes(sizes: Fields) -> int:
    """Shared memory of a configuration, kSharedBytes of csrc_cuda/arch/sm90/forward.h."""
    c = {name: int(value) for name, value in sizes if not isinstance(value, str)}
    narrow = dict(sizes)["element"] == "e4m3"
    columns = 128 if narrow else 64
    panels, panels_v = (-(-c[n] // columns) for n in ("head_dim", "head_dim_v"))
    panels_out = -(-c["head_dim_v"] // 64)
    panel_q = 128 * 64 * c["num_warpgroups"]
    block = 128 * c["tile_n"] * (panels + panels_v)
    if narrow:  # V once more, turned
        block += -(-c["tile_n"] // 128) * 128 * c["head_dim_v"]
    tensors = c["q_stages"] * panels * panel_q + c["num_stages"] * block
    fitting = min(panels_out, (226 * 1024 - tensors) // panel_q)
    if fitting == panels_out or not (c["keep_q"] or c["q_stages"] == 2):
        tensors += fitting * panel_q  # of the output
    barriers = 2 * c["q_stages"] + (6 if narrow else 4) * c["num_stages"]
    return tensors + _WORKS * _WORK_BYTES + 8 * barriers


def _section(x: Inputs) -> int:
    """Heads whose tiles are worked on together (kernels/scheduler.h)."""
    bounded = x.causal or x.window_right is not None
    return 32 // (x.num_heads_q // x.num_heads_kv) if bounded else 1


def _number(value: object) -> int | bool:
    assert isinstance(value, int)
    return value


def _images(arch: str) -> Iterator[ImageSpec]:
    if arch != _ARCH:
        return
    yield from BACKWARD.images(arch)
    for d, dv, narrow in product(_DIMS, _DIMS, (False, True)):
        for row in rows(d, dv, narrow):
            for paged in (False,) if narrow else (False, True):
                elements = ("e4m3",) if narrow else forward_call.ELEMENTS
                for name, chosen in forward_call.variants(paged, elements=elements):
                    # The scale's sign is not part of a problem: every row must serve both.
                    plain = not paged and _is_plain(tuple(c for c in chosen if c[0] != "any_scale"))
                    if plain or not row.plain:
                        sizes = (row.dropping() if forward_call.drops(chosen) else row).sizes(d, dv)
                        yield ImageSpec(_ENTRY, _fields(("element", name), sizes, paged, chosen), arch)
    yield from decode_call.NVIDIA.narrow_images(_ARCH)  # jit.choose takes them before PTX, which widens by other means


def _too_large(problem: Problem, size: SizeBucket) -> tuple[Refusal, ...]:
    tile_m = 64 * tile(problem, size).num_warpgroups
    own = forward_call.too_large(problem, size, tile_m, forward_call.MOST_TILES, -(-size.rows // tile_m))
    return own or BACKWARD.too_large(problem, size)


def _missing(device: Device) -> str:
    return launch.missing() or jit.missing(_ARCH)


def _config(problem: Problem, size: SizeBucket, device: Device) -> Config:
    if decode_call.serves(problem, size):
        return decode_call.decode_config(decode_call.NVIDIA, problem)
    row = tile(problem, size)
    config = forward_call.plan_config(row.sizes(problem.head_dim, problem.head_dim_v), problem)
    measured = (("measured", row.reason),) if row.reason else ()
    return (*config, *measured, *BACKWARD.plan(problem))


def _yields(problem: Problem) -> str:
    """To torch's backward where Hopper's own does not answer (csrc_cuda/arch/sm90/NOTES.md)."""
    return "" if BACKWARD.serves(problem) else forward_call.yields(problem)


BACKEND = Backend(
    "sm90",
    native=True,
    capabilities=lambda: (CAPABILITY, GRADIENTS, FP8, FP8_CACHE),
    prepare=_prepare,
    config=_config,
    backward=BACKWARD.backward,
    yields=_yields,
    missing=_missing,
    too_large=_too_large,
    images=_images,
    append=append_call.NVIDIA,
)
