"""A forward kernel on the CPU: compiled by the host's C++ compiler, run lane by lane (csrc_cuda/arch/host)."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from xattn import jit
from xattn.images import ImageSpec, Store
from xattn.launch_params import ForwardParams, Operand

LOG2E = math.log2(math.e)

# The layers under test, by the matrix instruction that stands in for theirs.
LAYERS = {"mma.m16n8k16": "sm80", "mfma.16x16x16": "cdna"}
DEFAULTS = {
    "element": "bf16",
    "head_dim": 64,
    "head_dim_v": 64,
    "tile_m": 64,
    "tile_n": 64,
    "num_warps": 4,
    "min_blocks": 1,
    "keep_q": False,
    "paged": False,
    "any_scale": False,
    "softcap": False,
    "alibi": False,
    "attn_mask": "none",
}


class HostKernel:
    """A configuration of the forward body for one layer, compiled; call it with the arguments of xattn.attention."""

    def __init__(self, layer: str, folder: Path, **config):
        self.config = {**DEFAULTS, **config}
        name = LAYERS[layer]
        self.spec = ImageSpec(f"arch/host/forward_{name}.cpp", tuple(self.config.items()), f"host-{name}")
        image = jit.get(self.spec, Store(shipped=(), cache=folder))
        self.path = folder / f"{image.key}.so"
        if not self.path.exists():
            self.path.write_bytes(image.code)
        self.run = ctypes.CDLL(str(self.path)).xattn_forward
        self.run.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        attn_mask: Tensor | None = None,
        seqused_k: Tensor | None = None,
        cu_seqlens: tuple[Tensor, Tensor] | None = None,
        longest: tuple[int, int] | None = None,
        status: Tensor | None = None,
        seed: int = 0,
        softmax_scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        c = self.config
        packed = cu_seqlens is not None
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        heads, d, dv = q.shape[-2], q.shape[-1], v.shape[-1]
        batch = len(cu_seqlens[0]) - 1 if packed else q.shape[0]
        seqlen_q, seqlen_k = (int(x.diff().max()) for x in cu_seqlens) if packed else (q.shape[1], k.shape[1])
        if longest is not None:
            seqlen_q, seqlen_k = longest
        out = torch.full((*q.shape[:-1], dv), math.nan, dtype=q.dtype)
        lse = torch.full((heads, q.shape[0]) if packed else (batch, heads, seqlen_q), math.nan)
        m_blocks = -(-seqlen_q // c["tile_m"])
        left, right = window or (None, None)
        p = ForwardParams(
            q=Operand.of(q),
            k=Operand.of(k),
            v=Operand.of(v),
            out=Operand.of(out),
            lse=lse.data_ptr(),
            lse_batch_stride=0 if packed else lse.stride(0),
            lse_head_stride=lse.stride(0) if packed else lse.stride(1),
            batch=batch,
            sequences=batch + packed,
            heads_q=heads,
            heads_kv=k.shape[-2],
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            total_q=q.shape[0],
            total_k=k.shape[0],
            head_dim=d,
            head_dim_v=dv,
            scale=scale / softcap if softcap else scale * LOG2E,
            softcap=softcap * LOG2E,
            causal=causal,
            window_left=-1 if left is None else left,
            window_right=-1 if right is None else right,
            m_blocks=m_blocks,
        )
        p.order_tiles(3)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(batch, heads, seqlen_q, seqlen_k)
            p.mask = attn_mask.data_ptr()
            p.mask_batch_stride, p.mask_head_stride, p.mask_row_stride, p.mask_col_stride = attn_mask.stride()
        if alibi_slopes is not None:
            p.alibi, p.alibi_batch_stride = alibi_slopes.data_ptr(), heads if alibi_slopes.dim() == 2 else 0
        if sinks is not None:
            p.sinks = sinks.data_ptr()
        if seqused_k is not None:
            p.seqused_k, p.index64 = seqused_k.data_ptr(), (seqused_k.dtype == torch.int64) << 2
        if packed:
            p.cu_seqlens_q, p.cu_seqlens_k = (x.data_ptr() for x in cu_seqlens)
            p.index64 |= sum((x.dtype == torch.int64) << n for n, x in enumerate(cu_seqlens))
        if status is not None:
            p.status = status.data_ptr()
        message = ctypes.create_string_buffer(512)
        if self.run(ctypes.addressof(p), m_blocks * p.sequences * heads, seed, message, len(message)):
            raise RuntimeError(message.value.decode())
        return out, lse
