"""Ampere and later without Hopper's own instructions: the shared forward body over mma.sync, ldmatrix and cp.async.

Its images: one of sm_80 serves all of 8.x, one of its own each later architecture, and PTX of compute_80 those that no
compiler at hand knows (jit.choose).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from .. import jit, launch
from ..capability import Capability, HeadDims
from ..device import Device
from ..device import of as device_of
from ..errors import UnsupportedError
from ..images import ConfigValue, Image, ImageSpec
from ..inputs import Inputs, is_direct
from ..launch_params import ForwardParams, Operand
from ..problem import Problem, SizeBucket
from .base import Backend, Config, Unavailable

CAPABILITY = Capability(
    vendors=frozenset({"nvidia"}),
    least_arch="sm_80",
    kinds=frozenset({"attention", "varlen"}),
    dtypes=frozenset({("bf16", "bf16"), ("fp16", "fp16")}),
    head_dim=HeadDims(largest=256, multiple_of=8),
    head_dim_v=HeadDims(largest=256, multiple_of=8),
    features=frozenset(
        {
            "causal",
            "window",
            "softcap",
            "alibi_slopes",
            "attn_mask_bool",
            "attn_mask_additive",
            "seqused_k",
            "sinks",
            "return_lse",
            "gqa",
        }
    ),
    needs=frozenset({"cuda.bindings"}),
)

# Tiles by the larger head dimension: (up to, tile_m, tile_n, num_warps, min_blocks). Measured on an H200 beside smaller
# and larger tiles, see NOTES.md in csrc_cuda/arch/sm80.
_TILES = ((64, 128, 128, 4, 2), (128, 128, 64, 4, 2), (256, 64, 64, 4, 2))
_TILE_NAMES = ("tile_m", "tile_n", "num_warps", "min_blocks")

_ENTRY = "arch/sm80/forward.cu"
_ELEMENTS = ("bf16", "fp16")
_MASKS = ("none", "boolean", "added16", "added32")

# Keys and values of this many bytes are worked on at once: a part of the L2 cache of every architecture served.
_SECTION_BYTES = 32 << 20


def _config(problem: Problem, size: SizeBucket, device: Device) -> Config:
    dims = [(n + 31) // 32 * 32 for n in (problem.head_dim, problem.head_dim_v)]
    mask = {"": "none", "bool": "boolean", "additive": "added"}[problem.attn_mask]
    config: Config = (*_tile(*dims), ("attn_mask", mask))
    return config if problem.direct else (*config, ("copies", "what is not aligned to 16 bytes"))


def _tile(head_dim: int, head_dim_v: int) -> tuple[tuple[str, int], ...]:
    """The part of a configuration that the padded head dimensions decide."""
    row = next(row for row in _TILES if max(head_dim, head_dim_v) <= row[0])
    return (("head_dim", head_dim), ("head_dim_v", head_dim_v), *zip(_TILE_NAMES, row[1:], strict=True))


def _image_config(
    element: str, tile: tuple[tuple[str, int], ...], softcap: bool, alibi: bool, attn_mask: str
) -> tuple[tuple[str, ConfigValue], ...]:
    """The fields of the kernel's Config struct; their order is part of an image's address."""
    options = (("keep_q", False), ("softcap", softcap), ("alibi", alibi), ("attn_mask", attn_mask))
    return (("element", element), *tile, *options)


def _images(arch: str) -> Iterator[ImageSpec]:
    """Every configuration, for NVIDIA's architectures from 8.0 on."""
    vendor, _, number = arch.rstrip("af").partition("_")
    if vendor not in ("sm", "compute") or not number.isdigit() or int(number) < 80:
        return
    dims = range(32, 256 + 1, 32)
    for element, d, dv, softcap, alibi, mask in product(_ELEMENTS, dims, dims, (False, True), (False, True), _MASKS):
        yield ImageSpec(_ENTRY, _image_config(element, _tile(d, dv), softcap, alibi, mask), arch)


def _run(inputs: Inputs, config: Config) -> tuple[Tensor, Tensor | None]:
    x, options = inputs, dict(config)
    make = torch.zeros if x.packed else torch.empty  # rows of a packed q that belong to no sequence
    out = make(x.out_shape, dtype=x.dtype_out, device=x.q.device)
    lse = None
    if x.return_lse:
        lse = torch.full(x.lse_shape, -math.inf, dtype=torch.float32, device=x.q.device)
    q, k, v = (_direct(t) for t in (x.q, x.k, x.v))
    tile_m, tile_n, warps = (int(str(options[n])) for n in _TILE_NAMES[:3])
    m_blocks = -(-x.seqlen_q // tile_m)
    if not (x.batch and m_blocks):
        return out, lse
    keep: list[Tensor] = [q, k, v]
    p = ForwardParams(
        q=Operand.of(q),
        k=Operand.of(k),
        v=Operand.of(v),
        out=Operand.of(out),
        batch=x.batch,
        heads_q=x.num_heads_q,
        heads_kv=x.num_heads_kv,
        seqlen_q=x.seqlen_q,
        seqlen_k=x.seqlen_k,
        total_q=q.shape[0],
        total_k=k.shape[0],
        head_dim=x.head_dim,
        head_dim_v=x.head_dim_v,
        scale=x.scale / x.softcap if x.softcap else x.scale * math.log2(math.e),
        softcap=x.softcap * math.log2(math.e),
        causal=int(x.causal),
        window_left=_distance(x.window_left),
        window_right=_distance(x.window_right),
        m_blocks=m_blocks,
    )
    if lse is not None:
        p.lse = lse.data_ptr()
        p.lse_batch_stride, p.lse_head_stride = (0, lse.stride(0)) if x.packed else lse.stride()[:2]
    mask = "none"
    if x.attn_mask is not None:
        t = x.attn_mask
        if t.dtype != torch.bool and t.dtype not in (q.dtype, torch.float32):
            t = t.float()
        t = t.expand(x.batch, x.num_heads_q, x.seqlen_q, x.seqlen_k)
        keep.append(t)
        mask = "boolean" if t.dtype == torch.bool else "added32" if t.dtype == torch.float32 else "added16"
        p.mask = t.data_ptr()
        p.mask_batch_stride, p.mask_head_stride, p.mask_row_stride, p.mask_col_stride = t.stride()
    if x.alibi_slopes is not None:
        t = x.alibi_slopes.float().contiguous()
        keep.append(t)
        p.alibi, p.alibi_batch_stride = t.data_ptr(), t.stride(0) if t.dim() == 2 else 0
    if x.sinks is not None:
        t = x.sinks.float().contiguous()
        keep.append(t)
        p.sinks = t.data_ptr()
    for bit, (name, t) in enumerate((n, getattr(x, n)) for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")):
        if t is not None:
            t = t.contiguous()
            keep.append(t)
            setattr(p, name, t.data_ptr())
            p.index64 |= (t.dtype == torch.int64) << bit
    per_head = max(1, x.seqlen_k * (x.head_dim + x.head_dim_v) * 2)
    heads = max(1, _SECTION_BYTES // per_head) * (x.num_heads_q // x.num_heads_kv)
    p.heads_in_section = min(heads, x.batch * x.num_heads_q)

    image = _image(
        _image_config(
            "fp16" if x.q.dtype == torch.float16 else "bf16",
            tuple((n, int(str(options[n]))) for n in ("head_dim", "head_dim_v", *_TILE_NAMES)),
            x.softcap != 0.0,
            x.alibi_slopes is not None,
            mask,
        ),
        device_of(x.q.device).arch,
    )
    head_dim, head_dim_v = (int(str(options[n])) for n in ("head_dim", "head_dim_v"))
    shared = 2 * (tile_m * max(head_dim, head_dim_v) + tile_n * (head_dim + head_dim_v))
    launch.launch(image, "xattn_forward", x.q.device, x.batch * x.num_heads_q * m_blocks, 32 * warps, shared, p)
    del keep  # torch's allocator hands their memory out again only behind this kernel, on the same stream
    return out, lse


def _image(config: tuple[tuple[str, ConfigValue], ...], arch: str) -> Image:
    """The image for a device; Unavailable where none is shipped and none can be compiled: another backend answers
    then."""
    try:
        return jit.choose(_ENTRY, config, arch)
    except (UnsupportedError, jit.CompileError) as error:
        raise Unavailable(" ".join(str(error).split())[:1000]) from error


def _direct(t: Tensor) -> Tensor:
    """The tensor, or a copy of it whose rows start at multiples of 16 bytes."""
    return t if is_direct(t) and t.stride(-3) < 2**31 else t.clone(memory_format=torch.contiguous_format)


def _distance(side: int | None) -> int:
    return -1 if side is None else min(side, 2**30 - 1)


BACKEND = Backend("sm80", native=True, capabilities=lambda: (CAPABILITY,), run=_run, config=_config, images=_images)
