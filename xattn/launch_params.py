"""The parameter blocks of kernels as the host packs them: the fields of params.h, backward_params.h and append.h in
csrc_cuda/kernels, in their order."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

_S32, _S64, _F32, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Operand(ctypes.Structure):
    """A tensor of (batch, row, head, head_dim), or packed (row, head, head_dim): address, and strides in elements. A
    paged cache is (page, slot, head, head_dim)."""

    _fields_ = (("data", _PTR), ("batch_stride", _S64), ("row_stride", _S64), ("head_stride", _S64))

    @classmethod
    def of(cls, t: Tensor) -> Operand:
        batch, row, head = (0, *t.stride()[:2]) if t.dim() == 3 else t.stride()[:3]
        return cls(t.data_ptr(), batch, row, head)

    @classmethod
    def dense(cls, shape: Sequence[int]) -> Operand:
        """A dense tensor of that shape, without an address."""
        head = shape[-1]
        row = head * shape[-2]
        return cls(None, row * shape[-3] if len(shape) == 4 else 0, row, head)


class Divisor(ctypes.Structure):
    """A number by which kernels divide numbers below 2^31."""

    _fields_ = (("value", ctypes.c_uint32), ("multiplier", ctypes.c_uint32), ("shift", ctypes.c_uint32))

    @classmethod
    def of(cls, value: int) -> Divisor:
        shift = 31 + (value - 1).bit_length()
        return cls(value, (1 << shift) // value + 1, shift)


class Scale(ctypes.Structure):
    """Factors by sequence and key head: address, and strides in elements, 0 where there is one for all."""

    _fields_ = (("data", _PTR), ("batch_stride", _S64), ("head_stride", _S64))

    @classmethod
    def of(cls, t: Tensor) -> Scale:
        """One number, or (batch, heads_kv)."""
        return cls(t.data_ptr(), *(t.stride() if t.dim() == 2 else (0, 0)))


def order_sections(tiles: ForwardParams | KeyTiles, heads_in_section: int) -> None:
    """Sets what csrc_cuda/kernels/scheduler.h divides by, from the sequences, heads and blocks that are there."""
    heads = tiles.sequences * tiles.heads_q
    section = max(1, min(heads_in_section, heads))
    tiles.section_tiles = Divisor.of(max(1, section * tiles.m_blocks))
    tiles.section_heads = Divisor.of(section)
    tiles.last_heads = Divisor.of(heads % section or section)
    tiles.heads = Divisor.of(max(1, tiles.heads_q))


class ForwardParams(ctypes.Structure):
    """See csrc_cuda/kernels/params.h for the meaning of each field."""

    _fields_ = (
        ("q", Operand),
        ("k", Operand),
        ("v", Operand),
        ("out", Operand),
        ("lse", _PTR),
        ("lse_batch_stride", _S64),
        ("lse_head_stride", _S64),
        ("mask", _PTR),
        ("mask_batch_stride", _S64),
        ("mask_head_stride", _S64),
        ("mask_row_stride", _S64),
        ("mask_col_stride", _S64),
        ("alibi", _PTR),
        ("alibi_batch_stride", _S64),
        ("sinks", _PTR),
        ("cu_seqlens_q", _PTR),
        ("cu_seqlens_k", _PTR),
        ("seqused_k", _PTR),
        ("status", _PTR),
        ("index64", _S32),
        ("batch", _S32),
        ("sequences", _S32),
        ("heads_q", _S32),
        ("heads_kv", _S32),
        ("seqlen_q", _S32),
        ("seqlen_k", _S32),
        ("total_q", _S64),
        ("total_k", _S64),
        ("head_dim", _S32),
        ("head_dim_v", _S32),
        ("scale", _F32),
        ("softcap", _F32),
        ("causal", _S32),
        ("window_left", _S32),
        ("window_right", _S32),
        ("m_blocks", _S32),
        ("section_tiles", Divisor),
        ("section_heads", Divisor),
        ("last_heads", Divisor),
        ("heads", Divisor),
        ("gqa_ratio", Divisor),
        ("page_table", _PTR),
        ("page_table_stride", _S64),
        ("num_pages", _S32),
        ("page_size", Divisor),
        ("partials", _PTR),
        ("num_splits", _S32),
        ("queue", _S32),
        ("q_scale", Scale),
        ("k_scale", Scale),
        ("v_scale", Scale),
        ("dropout_rng", _PTR),
        ("dropout_threshold", ctypes.c_uint32),
        ("dropout_scale", _F32),
    )

    def order_tiles(self, heads_in_section: int) -> None:
        """Heads of all sequences are worked on in sections of that many; the other fields are there."""
        order_sections(self, heads_in_section)
        self.gqa_ratio = Divisor.of(max(1, self.heads_q // max(1, self.heads_kv)))


class KeyTiles(ctypes.Structure):
    """See csrc_cuda/kernels/backward_params.h."""

    _fields_ = (
        ("m_blocks", _S32),
        ("sequences", _S32),
        ("heads_q", _S32),
        ("causal", _S32),
        ("window_right", _S32),
        ("section_tiles", Divisor),
        ("section_heads", Divisor),
        ("last_heads", Divisor),
        ("heads", Divisor),
    )


class BackwardParams(ctypes.Structure):
    """See csrc_cuda/kernels/backward_params.h for the meaning of each field."""

    _fields_ = (
        ("p", ForwardParams),
        ("dout", Operand),
        ("dq", Operand),
        ("dk", Operand),
        ("dv", Operand),
        ("dlse", _PTR),
        ("delta", _PTR),
        ("scale", _F32),
        ("part", _S32),
        ("keys", KeyTiles),
    )


class AppendParams(ctypes.Structure):
    """See csrc_cuda/kernels/append.h for the meaning of each field."""

    _fields_ = (
        ("k_cache", Operand),
        ("v_cache", Operand),
        ("k_new", Operand),
        ("v_new", Operand),
        ("q", Operand),
        ("q_out", Operand),
        ("page_table", _PTR),
        ("page_table_stride", _S64),
        ("seqlens_k", _PTR),
        ("cu_seqlens_new", _PTR),
        ("cu_seqlens_q", _PTR),
        ("lengths", _PTR),
        ("status", _PTR),
        ("cos", _PTR),
        ("sin", _PTR),
        ("cos_stride", _S64),
        ("sin_stride", _S64),
        ("k_scale", _PTR),
        ("v_scale", _PTR),
        ("k_scale_batch_stride", _S64),
        ("k_scale_head_stride", _S64),
        ("v_scale_batch_stride", _S64),
        ("v_scale_head_stride", _S64),
        ("index64", _S32),
        ("batch", _S32),
        ("heads_q", _S32),
        ("heads_kv", _S32),
        ("head_dim", _S32),
        ("head_dim_v", _S32),
        ("num_pages", _S32),
        ("page_size", Divisor),
        ("room", _S32),
        ("appends", _S32),
        ("new_tokens", _S32),
        ("q_tokens", _S32),
        ("new_each", Divisor),
        ("q_each", Divisor),
        ("new_parts", Divisor),
        ("q_parts", Divisor),
        ("positions", _S32),
        ("width", _S32),
        ("interleaved", _S32),
        ("narrow_tables", _S32),
        ("causal", _S32),
    )
