"""Ampere and later without Hopper's own instructions: the shared forward body over mma.sync, ldmatrix and cp.async.

An image of the device's own architecture is compiled where a compiler is there; otherwise that of sm_80 serves all of
8.x, and PTX of compute_80 whatever came later.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from .. import jit, status
from ..capability import Capability, HeadDims
from ..device import Device
from ..device import of as device_of
from ..images import Image, ImageSpec, Store
from ..inputs import Inputs, is_direct
from ..kernel_call import Call, Output, Shape, slot
from ..launch_params import ForwardParams, Operand
from ..problem import Problem, SizeBucket
from .base import Backend, Config

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
_SIZE_NAMES = ("head_dim", "head_dim_v", "tile_m", "tile_n", "num_warps")
_FIELDS = {"attn_mask": "mask", "alibi_slopes": "alibi"}  # of the parameter block, where the words differ

# Keys and values of this many bytes are worked on at once: a part of the L2 cache of every architecture served.
_SECTION_BYTES = 32 << 20


def _config(problem: Problem, size: SizeBucket, device: Device) -> Config:
    dims = [(n + 31) // 32 * 32 for n in (problem.head_dim, problem.head_dim_v)]
    tile = next(row[1:] for row in _TILES if max(dims) <= row[0])
    mask = {"": "none", "bool": "boolean", "additive": "added"}[problem.attn_mask]
    config: Config = (
        ("head_dim", dims[0]),
        ("head_dim_v", dims[1]),
        *zip(_TILE_NAMES, tile, strict=True),
        ("attn_mask", mask),
    )
    return config if problem.direct else (*config, ("copies", "what is not aligned to 16 bytes"))


_STATUS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")  # values that only the device can see


def _prepare(inputs: Inputs, config: Config) -> tuple[Call, dict[str, Tensor]]:
    x, options = inputs, dict(config)
    tensors = {name: _direct(t) for name, t in (("q", x.q), ("k", x.k), ("v", x.v))}
    q, k, v = tensors.values()
    aligned = len(tensors)
    head_dim, head_dim_v, tile_m, tile_n, warps = (int(str(options[n])) for n in _SIZE_NAMES)
    sequences = x.batch + x.packed
    m_blocks = max(-(-x.seqlen_q // tile_m), int(x.packed))
    p = ForwardParams(
        q=Operand.of(q),
        k=Operand.of(k),
        v=Operand.of(v),
        batch=x.batch,
        sequences=sequences,
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
    outputs = [Output(slot(ForwardParams, "out"), x.out_shape, x.dtype_out)]
    p.out = Operand.dense(x.out_shape)
    if x.return_lse:
        outputs.append(Output(slot(ForwardParams, "lse"), x.lse_shape, torch.float32))
        p.lse_head_stride = x.lse_shape[-1]
        p.lse_batch_stride = 0 if x.packed else math.prod(x.lse_shape[1:])
    mask = "none"
    if x.attn_mask is not None:
        t = x.attn_mask
        if t.dtype != torch.bool and t.dtype not in (q.dtype, torch.float32):
            t = t.float()
        mask = "boolean" if t.dtype == torch.bool else "added32" if t.dtype == torch.float32 else "added16"
        tensors["attn_mask"] = t
        strides = t.expand(x.batch, x.num_heads_q, x.seqlen_q, x.seqlen_k).stride()
        p.mask_batch_stride, p.mask_head_stride, p.mask_row_stride, p.mask_col_stride = strides
    if x.alibi_slopes is not None:
        tensors["alibi_slopes"] = t = _floats(x.alibi_slopes)
        p.alibi_batch_stride = t.stride(0) if t.dim() == 2 else 0
    if x.sinks is not None:
        tensors["sinks"] = _floats(x.sinks)
    for bit, name in enumerate(_STATUS):
        t = getattr(x, name)
        if t is not None:
            tensors[name] = t if t.is_contiguous() else t.contiguous()
            p.index64 |= (t.dtype == torch.int64) << bit
            p.status = status.word(x.q.device).data_ptr()
    per_head = max(1, x.seqlen_k * (x.head_dim + x.head_dim_v) * 2)
    heads = max(1, _SECTION_BYTES // per_head) * (x.num_heads_q // x.num_heads_kv)
    p.heads_in_section = min(heads, max(1, sequences * x.num_heads_q))

    image = _image(
        x.q.dtype == torch.float16,
        tuple((n, int(str(options[n]))) for n in ("head_dim", "head_dim_v", *_TILE_NAMES)),
        x.softcap != 0.0,
        x.alibi_slopes is not None,
        mask,
        device_of(x.q.device).arch,
    )
    shared = 2 * (tile_m * max(head_dim, head_dim_v) + tile_n * (head_dim + head_dim_v))
    shape = Shape((sequences * x.num_heads_q * m_blocks, 1, 1), (32 * warps, 1, 1), shared)
    slots = tuple(slot(ForwardParams, _FIELDS.get(name, name)) for name in tensors)
    return Call(image, "xattn_forward", x.q.device, shape, p, slots, tuple(outputs), aligned), tensors


@lru_cache(maxsize=1024)
def _image(half: bool, tile: tuple[tuple[str, int], ...], softcap: bool, alibi: bool, mask: str, arch: str) -> Image:
    config = (
        ("element", "fp16" if half else "bf16"),
        *tile,
        ("keep_q", False),
        ("softcap", softcap),
        ("alibi", alibi),
        ("attn_mask", mask),
    )
    store, entry = Store(), "arch/sm80/forward.cu"
    if jit.COMPILERS[0].missing():
        number = int(arch.removeprefix("sm_"))
        spec = ImageSpec(entry, config, "sm_80" if number < 90 else "compute_80")
    else:
        spec = ImageSpec(entry, config, arch)
    return jit.get(spec, store)


def _direct(t: Tensor) -> Tensor:
    """The tensor, or a copy of it whose rows start at multiples of 16 bytes."""
    return t if is_direct(t) and t.stride(-3) < 2**31 else t.clone(memory_format=torch.contiguous_format)


def _floats(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float32 and t.is_contiguous() else t.float().contiguous()


def _distance(side: int | None) -> int:
    return -1 if side is None else min(side, 2**30 - 1)


BACKEND = Backend(
    "sm80",
    native=True,
    capabilities=lambda: (CAPABILITY,),
    prepare=_prepare,
    config=_config,
)
