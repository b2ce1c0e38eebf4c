"""The shared forward body as backends use it: from the inputs of a call to one launch (csrc_cuda/kernels/params.h)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from . import jit, launch, rng, status, user_functions
from .capability import Capability, HeadDims, Refusal
from .device import Device
from .device import of as device_of
from .images import ConfigValue, Image, ImageSpec
from .inputs import TENSORS, Inputs, dtype_name, is_direct, present
from .kernel_call import Call, Output, Shape, slot
from .launch_params import Divisor, ForwardParams, Operand, Scale
from .problem import Problem, SizeBucket

TILE_NAMES = ("tile_m", "tile_n", "num_warps", "min_blocks")
# Fields of the parameter block that have other names.
_PARAMS = {"attn_mask": "mask", "alibi_slopes": "alibi", "seqlens_k": "seqused_k"}
# Values that only the device can see, by their bits in index64.
_INDEX_BITS = {"cu_seqlens_q": 0, "cu_seqlens_k": 1, "seqused_k": 2, "seqlens_k": 2, "page_table": 3}
ELEMENTS = ("bf16", "fp16")
CACHES = {torch.float8_e4m3fn: "e4m3", torch.float8_e4m3fnuz: "e4m3fnuz"}  # of 8 bits, as kernels name them
_MASKS = ("none", "boolean", "added16", "added32")
_PAGED_MASKS = ("none", "tree")


# What every kernel with ForwardParams answers of dense and packed calls; a backend adds its vendors and architectures.
CAPABILITY = Capability(
    kinds=frozenset({"attention", "varlen"}),
    dtypes=frozenset({("bf16", "bf16"), ("fp16", "fp16")}),
    head_dim=HeadDims(largest=256, multiple_of=8),
    head_dim_v=HeadDims(largest=256, multiple_of=8),
    features=frozenset(
        {
            "causal",
            "window",
            "softcap",
            "score_mod",
            "alibi_slopes",
            "attn_mask_bool",
            "attn_mask_additive",
            "mask_mod",
            "seqused_k",
            "sinks",
            "dropout",
            "epilogue",
            "return_lse",
            "gqa",
        }
    ),
    dtypes_out=frozenset(dtype_name(dtype) for dtype in user_functions.OUTPUTS),
    lowers=True,
)

# What the shared body and its decode kernel answer. A cache is not copied to be read: it is as large as the memory.
SHARED_CAPABILITY = replace(
    CAPABILITY,
    kinds=CAPABILITY.kinds | {"paged"},
    features=CAPABILITY.features | {"attn_mask_tree"},
    as_it_lies=frozenset({"paged"}),
)


def gradients(capability: Capability) -> Capability:
    """What ``capability`` answers together with the gradients of backward_call.py."""
    return replace(
        capability,
        kinds=frozenset({"attention", "varlen"}),
        features=capability.features - {"score_mod", "mask_mod", "epilogue"},
        dtypes_out=frozenset(),
        lowers=False,
        grads=frozenset({"q", "k", "v", "sinks"}),
    )


_FUSED = frozenset({"causal", "gqa", "attn_mask_bool", "attn_mask_additive"})


def yields(problem: Problem) -> str:
    """``Backend.yields``: gradients that torch's fused backward has, in five matrix products; ours takes seven."""
    plain = problem.kind == "attention" and not problem.deterministic and _FUSED.issuperset(problem.features())
    return "sdpa" if problem.grads and plain else ""


def fp8_cache(capability: Capability, cache: str, archs: frozenset[str] | None = None) -> Capability:
    """What the decode kernel answers of caches of 8 bits, ``cache`` by its name in inputs.DTYPES, on the devices of
    ``capability``, or ``archs`` of them."""
    dims = HeadDims(largest=256, multiple_of=16)
    return replace(
        capability,
        archs=capability.archs if archs is None else archs,
        kinds=frozenset({"paged"}),
        dtypes=frozenset((element, cache) for element in ELEMENTS),
        head_dim=dims,
        head_dim_v=dims,
        features=capability.features | {"scales", "attn_mask_tree"},
        as_it_lies=frozenset({"paged"}),
        page_size_multiple_of=1,
    )


# What the 32-bit numbers of csrc_cuda hold. Blocks that take tile after tile count beyond the last one by two grids at
# most (arch/sm90/tiles.h); a row or key, a tile and a window's distance (below 2^30) add up to less than 2^31.
MOST_TILES = 2**31 - 2**12
_MOST_ROWS = 2**30 - 2**10
_MOST_STRIDE = 2**31 - 1  # from one row to the next, in elements (kernels/tile_copy.h)

Fields = tuple[tuple[str, ConfigValue], ...]  # of a kernel's Config struct; their order is part of an image's address


Tiles = tuple[tuple[int, ...], ...]  # rows (largest head dimension, numbers that have names)


def chosen_tile(
    tiles: Tiles, names: tuple[str, ...], head_dim: int, head_dim_v: int, multiple: int = 32
) -> tuple[tuple[str, int], ...]:
    """The part of a configuration that the head dimensions decide; images exist for multiples of ``multiple``."""
    dims = [-(-n // multiple) * multiple for n in (head_dim, head_dim_v)]
    row = next(row for row in tiles if max(dims) <= row[0])
    return (("head_dim", dims[0]), ("head_dim_v", dims[1]), *zip(names, row[1:], strict=True))


def padded_dims(tiles: Tiles, multiple: int = 32) -> Iterator[tuple[int, int]]:
    """(head_dim, head_dim_v) of all images."""
    dims = range(multiple, tiles[-1][0] + 1, multiple)
    return product(dims, dims)


@dataclass(frozen=True)
class ForwardBody:
    """A layer of the shared body. ``tiles``: rows (largest head dimension, *TILE_NAMES). Keys and values of
    ``section_bytes`` are worked on at once, a part of the L2 cache; a launch has ``most_threads`` at most, where there
    is a bound."""

    entry: str
    warp_size: int
    tiles: Tiles
    section_bytes: int
    most_threads: int | None = None

    def tile(self, head_dim: int, head_dim_v: int, dropout: bool = False) -> tuple[tuple[str, int], ...]:
        """With dropout tiles have 64 keys at most, those of one evaluation of its numbers, which need registers."""
        found = chosen_tile(self.tiles, TILE_NAMES, head_dim, head_dim_v)
        return tuple((n, min(64, size) if dropout and n == "tile_n" else size) for n, size in found)

    def images(self, arch: str) -> Iterator[ImageSpec]:
        """Every configuration for an architecture."""
        for (d, dv), paged in product(padded_dims(self.tiles), (False, True)):
            for name, chosen in variants(paged):
                sizes = self.tile(d, dv, drops(chosen))
                yield ImageSpec(self.entry, self.fields(("element", name), sizes, paged, chosen), arch)

    def fields(self, element: tuple[str, str], sizes: Fields, paged: bool, chosen: Fields) -> Fields:
        return (element, *sizes, ("keep_q", False), ("paged", paged), *chosen)

    def too_large(self, problem: Problem, size: SizeBucket) -> tuple[Refusal, ...]:
        """``Backend.too_large``."""
        tile = dict(self.tile(problem.head_dim, problem.head_dim_v))
        threads = self.warp_size * tile["num_warps"]
        most = MOST_TILES if self.most_threads is None else min(MOST_TILES, self.most_threads // threads)
        return too_large(problem, size, tile["tile_m"], most)

    def missing(self, device: Device) -> str:
        """``Backend.missing``."""
        return launch.missing() or jit.missing(device.arch)


def plan_config(tile: Fields, problem: Problem) -> tuple[tuple[str, object], ...]:
    """What a plan prints of a native forward: its tile, its mask, and that something is copied."""
    mask = {"": "none", "bool": "boolean", "additive": "added", "tree": "tree"}[problem.attn_mask]
    config = (*tile, ("attn_mask", mask))
    return config if problem.direct else (*config, ("copies", "what is not aligned to 16 bytes"))


def too_large(
    problem: Problem, size: SizeBucket, tile_m: int, most_tiles: int, spare_blocks: int = 0
) -> tuple[Refusal, ...]:
    """What of a problem the kernels have no 32-bit number for. Strides other than that of rows have 64 bits.

    ``spare_blocks``: row blocks that the rows behind the last offset of a packed q may need; fewer than those of a
    sequence are taken as many.
    """
    m_blocks = max(1, -(-size.seqlen_q // tile_m))
    tiles = size.batch * m_blocks
    if problem.kind == "varlen":
        tiles += max(m_blocks, spare_blocks)
    counts = (
        ("seqlen_q", size.seqlen_q, _MOST_ROWS),
        ("seqlen_k", size.seqlen_k, _MOST_ROWS),
        ("rows of a packed q or k", size.rows, _MOST_ROWS),
        ("heads * head_dim", size.num_heads_q * max(problem.head_dim, problem.head_dim_v), _MOST_STRIDE),
        (f"tiles of {tile_m} rows", tiles * size.num_heads_q, most_tiles),
    )
    return tuple(Refusal("large", name, got, (f"up to {most}",)) for name, got, most in counts if got > most)


@dataclass(frozen=True)
class Forward:
    """A call in the terms of the kernels: the parameter block without addresses, the tensors in the order of
    inputs.TENSORS and the outputs, whose offsets are those in ForwardParams; ``mask``: the image's attn_mask."""

    params: ForwardParams
    tensors: dict[str, Tensor]
    outputs: tuple[Output, ...]
    mask: str

    @property
    def tiles(self) -> int:
        return self.params.sequences * self.params.heads_q * self.params.m_blocks

    def slots(self, base: int = 0) -> tuple[int, ...]:
        """Where the tensors' addresses go, for a block that holds ForwardParams at offset ``base``."""
        return tuple(base + slot_of(name, type(self.params)) for name in self.tensors)


def slot_of(name: str, params: type[ForwardParams] = ForwardParams) -> int:
    """Where the address of a tensor of a call goes in the parameter block."""
    return slot(params, _PARAMS.get(name, name))


def describe(x: Inputs, tile_m: int, heads_at_once: int, direct: Callable[[Tensor], Tensor]) -> Forward:
    """What every kernel with ForwardParams is told. ``heads_at_once``: key heads whose keys and values should fill the
    L2 cache together; ``direct`` copies what a kernel cannot read as it lies."""
    paged = x.kind == "paged"
    tensors = {"q": direct(x.q), **{n: t if paged else direct(t) for n, t in (("k", x.k), ("v", x.v))}}
    q, k, v = tensors.values()
    if x.kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    sequences = x.batch + x.packed
    p = user_functions.params_of(x)(
        q=Operand.of(q),
        k=Operand.of(k),
        v=Operand.of(v),
        out=Operand.dense(x.out_shape),
        batch=x.batch,
        sequences=sequences,
        heads_q=x.num_heads_q,
        heads_kv=x.num_heads_kv,
        seqlen_q=x.seqlen_q,
        seqlen_k=x.seqlen_k,
        total_q=q.shape[0],
        total_k=present(x.page_table).shape[1] * x.page_size if paged else k.shape[0],
        head_dim=x.head_dim,
        head_dim_v=x.head_dim_v,
        scale=_finite(x.scale / x.softcap) if x.softcap else x.scale * math.log2(math.e),
        softcap=x.softcap * math.log2(math.e),
        causal=int(x.causal),
        window_left=_distance(x.window_left),
        window_right=_distance(x.window_right),
        m_blocks=max(-(-x.seqlen_q // tile_m), int(x.packed)),
    )
    outputs = [Output(slot(ForwardParams, "out"), x.out_shape, x.dtype_out)]
    if x.return_lse:
        outputs.append(Output(slot(ForwardParams, "lse"), x.lse_shape, torch.float32))
        p.lse_head_stride = x.lse_shape[-1]
        p.lse_batch_stride = 0 if x.packed else math.prod(x.lse_shape[1:])
    mask = "none"
    if x.attn_mask is not None:
        t = x.attn_mask
        if t.dtype not in (torch.bool, torch.float32, torch.bfloat16 if q.element_size() == 1 else q.dtype):
            t = _narrowed(t)
        mask = "boolean" if t.dtype == torch.bool else "added32" if t.dtype == torch.float32 else "added16"
        mask = "tree" if paged else mask
        tensors["attn_mask"] = t
        strides = (0, 0, *t.stride()) if paged else t.expand(x.batch, x.num_heads_q, x.seqlen_q, x.seqlen_k).stride()
        p.mask_batch_stride, p.mask_head_stride, p.mask_row_stride, p.mask_col_stride = strides
    if x.alibi_slopes is not None:
        tensors["alibi_slopes"] = t = _floats(x.alibi_slopes)
        p.alibi_batch_stride = t.stride(0) if t.dim() == 2 else 0
    if x.sinks is not None:
        tensors["sinks"] = _floats(x.sinks)
    for name in ("q_scale", "k_scale", "v_scale"):
        t = getattr(x, name)
        if t is not None:
            tensors[name] = t if t.dtype == torch.float32 else t.float()
            setattr(p, name, Scale.of(tensors[name]))
    for name, bit in _INDEX_BITS.items():
        t = getattr(x, name)
        if t is not None:
            rows = name == "page_table" and (t.stride(1) == 1 or t.shape[1] < 2)  # which may lie apart
            tensors[name] = t if rows or t.is_contiguous() else t.contiguous()
            p.index64 |= (t.dtype == torch.int64) << bit
            p.status = status.word(x.q.device).data_ptr()
    if paged:
        p.page_table_stride = tensors["page_table"].stride(0)
        p.num_pages = x.k.shape[0]
        p.page_size = Divisor.of(x.page_size)
    p.order_tiles(max(1, heads_at_once) * (x.num_heads_q // x.num_heads_kv))
    ordered = {name: tensors[name] for name in TENSORS[x.kind] if name in tensors}
    if x.dropout_p:
        below = rng.threshold(x.dropout_p)
        all_of_them = below == 1 << 16
        p.dropout_threshold = (below - all_of_them) << 16
        p.dropout_scale = 0.0 if all_of_them else 1 / (1 - x.dropout_p)
        ordered["dropout_rng"] = present(x.dropout_rng).contiguous()
    if captured := user_functions.fill(p, x):
        p.status = status.word(x.q.device).data_ptr()
    return Forward(p, ordered | captured, tuple(outputs), mask)


def switches(x: Inputs, mask: str, scaled: bool = False) -> Fields:
    """The part of an image's configuration that the features of a call decide. ``scaled``: scores have a factor that
    only the device knows."""
    modifies = x.softcap != 0.0 or x.score_mod is not None
    any_scale = (scaled or x.scale <= 0.0) and not modifies
    chosen = _switches(x.softcap != 0.0, x.alibi_slopes is not None, mask, any_scale, x.dropout_p > 0.0)
    functions = user_functions.source_of(x)
    return chosen if functions is None else (*chosen, ("functions", functions))


def _switches(
    softcap: bool = False,
    alibi: bool = False,
    attn_mask: str = "none",
    any_scale: bool = False,
    dropout: bool = False,
) -> Fields:
    plain = not (softcap or alibi or attn_mask != "none")
    last: Fields = (("dropout", True),) if dropout else ()
    fixed: Fields = (("any_scale", any_scale and plain), ("softcap", softcap), ("alibi", alibi))
    return (*fixed, ("attn_mask", attn_mask), *last)


def drops(switches: Fields) -> bool:
    """Whether the image has dropout."""
    return ("dropout", True) in switches


def variants(
    paged: bool = False, scaled: bool = False, elements: tuple[str, ...] = ELEMENTS
) -> Iterator[tuple[str, Fields]]:
    """(element, switches) of every image of a tile."""
    for element, dropout in product(elements, (False, True)):
        if not scaled:
            yield element, _switches(any_scale=True, dropout=dropout)
        for softcap, alibi, mask in product((False, True), (False, True), _PAGED_MASKS if paged else _MASKS):
            yield element, _switches(softcap, alibi, mask, scaled, dropout)


def element(x: Inputs) -> tuple[str, str]:
    return ("element", {torch.float16: "fp16", torch.float8_e4m3fn: "e4m3"}.get(x.q.dtype, "bf16"))


def choose(entry: str, fields: Fields, arch: str) -> tuple[Image, Callable[[Image], Image]]:
    """An image, and what gives another where the driver refuses it."""

    def another(refused: Image) -> Image:
        jit.refuse(refused)
        return jit.choose(entry, fields, arch)

    return jit.choose(entry, fields, arch), another


def prepare(
    body: ForwardBody, inputs: Inputs, config: tuple[tuple[str, object], ...]
) -> tuple[Call, dict[str, Tensor]]:
    """``Backend.prepare`` for a layer of the shared body."""
    x, options = inputs, dict(config)
    sizes = tuple((n, int(str(options[n]))) for n in ("head_dim", "head_dim_v", *TILE_NAMES))
    head_dim, head_dim_v, tile_m, tile_n, num_warps, _ = (n for _, n in sizes)
    per_head = max(1, x.seqlen_k * (x.head_dim + x.head_dim_v) * 2)
    forward = describe(x, tile_m, body.section_bytes // per_head, direct)
    fields = body.fields(element(x), sizes, x.kind == "paged", switches(x, forward.mask))
    image, another = choose(body.entry, fields, device_of(x.q.device).arch)
    shared = 2 * (tile_m * max(head_dim, head_dim_v) + tile_n * (head_dim + head_dim_v))
    call = Call(
        image=image,
        symbol="xattn_forward",
        device=x.q.device,
        shape=Shape((forward.tiles, 1, 1), (body.warp_size * num_warps, 1, 1), shared),
        params=forward.params,
        slots=forward.slots(),
        outputs=forward.outputs,
        aligned=3,
        other_image=another,
    )
    return call, forward.tensors


def direct(t: Tensor) -> Tensor:
    """The tensor, or a copy of it whose rows start at multiples of 16 bytes."""
    return t if is_direct(t) and t.stride(-3) < 2**31 else t.clone(memory_format=torch.contiguous_format)


def _finite(x: float) -> float:
    """As kernels hold it: 0 times it is 0."""
    most = torch.finfo(torch.float32).max
    return max(-most, min(x, most))


def _floats(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float32 and t.is_contiguous() else t.float().contiguous()


def _narrowed(mask: Tensor) -> Tensor:
    """An added mask as float32: what is finite stays so, however low."""
    if mask.dtype == torch.float64:
        most = torch.finfo(torch.float32).max
        mask = torch.where(mask.isfinite(), mask.clamp(-most, most), mask)
    return mask.float()


def _distance(side: int | None) -> int:
    return -1 if side is None else min(side, 2**30 - 1)
