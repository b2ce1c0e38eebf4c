// The parameter block of the forward kernels: what a launch is told. The host side packs the same fields in the same
// order (xattn/launch_params.py); kParamsVersion is part of every image's address.
#pragma once

#include "kernels/platform.h"

namespace xattn {

constexpr int kParamsVersion = 6;

// A tensor of (batch, row, head, head_dim); strides in elements. Packed tensors have no batch stride. A paged cache is
// (page, slot, head, head_dim).
struct Operand {
    void* data;
    s64 batch_stride;
    s64 row_stride;
    s64 head_stride;
};

// A number below 2^31 is divided by `value` with a multiplication and a shift (Granlund and Montgomery, 1994).
struct Divisor {
    u32 value;
    u32 multiplier;  // floor(2^shift / value) + 1
    u32 shift;       // 31 + ceil(log2(value))
};

XATTN_DEVICE u32 quotient(u32 n, const Divisor& d) { return u32((u64(n) * d.multiplier) >> d.shift); }

// Bad values that only the device can see, by their place in the status words (xattn/status.py).
enum class Status { cu_seqlens, max_seqlen, seqlens_k, page_table, rotary, no_room, captured };

// Factors by sequence and key head; null: 1.
struct Scale {
    const float* data;
    s64 batch_stride;
    s64 head_stride;
    XATTN_DEVICE float of(s32 sequence, s32 head) const {
        return data ? data[sequence * batch_stride + head * head_stride] : 1.0f;
    }
};

struct ForwardParams {
    Operand q, k, v, out;
    float* lse;  // (batch, heads_q, seqlen_q), or (heads_q, total_q) where q is packed; null: not wanted
    s64 lse_batch_stride;
    s64 lse_head_stride;

    const void*
        mask;  // attn_mask: bool (1 byte) or 16-bit or float elements, by the image; strides 0 where it broadcasts
    s64 mask_batch_stride;
    s64 mask_head_stride;
    s64 mask_row_stride;
    s64 mask_col_stride;

    const float* alibi;  // slopes (heads_q,) or (batch, heads_q); null: none
    s64 alibi_batch_stride;
    const float* sinks;  // (heads_q,); null: none

    const void* cu_seqlens_q;  // (batch + 1,); null: dense
    const void* cu_seqlens_k;
    const void* seqused_k;  // (batch,); null: all
    s32* status;            // one word for each Status; null: bad values are not reported
    s32 index64;            // bit 0: cu_seqlens_q, bit 1: cu_seqlens_k, bit 2: seqused_k, bit 3: page_table hold 64-bit
                            // numbers

    s32 batch;
    s32 sequences;  // batch, and where q is packed one more: the rows behind the last offset
    s32 heads_q;
    s32 heads_kv;
    s32 seqlen_q;  // rows of a dense q, otherwise the longest sequence
    s32 seqlen_k;
    s64 total_q;  // rows of a packed q and k; of a paged cache total_k is what a row of the page table has room for
    s64 total_k;
    s32 head_dim;  // as it is, up to the image's padded one
    s32 head_dim_v;

    float scale;      // scores times this are in log2: softmax_scale * log2(e), or with softcap softmax_scale / softcap
    float softcap;    // softcap * log2(e); 0: none
    s32 causal;       // 1: keys up to the diagonal
    s32 window_left;  // -1: unbounded
    s32 window_right;  // -1: unbounded
    s32 m_blocks;      // tiles along seqlen_q
    // Tile order: see scheduler.h.
    Divisor section_tiles;  // tiles of a section
    Divisor section_heads;  // heads of a section, and of the last one
    Divisor last_heads;
    Divisor heads;      // heads_q
    Divisor gqa_ratio;  // heads_q / heads_kv

    const void* page_table;  // (batch, pages of a sequence); null: keys are not paged. seqused_k holds the lengths then
    s64 page_table_stride;   // from one sequence to the next
    s32 num_pages;
    Divisor page_size;
    // See attention_decode.h.
    float* partials;
    s32 num_splits;
    s32 queue;  // number of the launch's counters; -1: none
    // Of caches of 8 bits.
    Scale q_scale, k_scale, v_scale;
    // See dropout.h.
    const s64* dropout_rng;  // (seed, offset)
    u32 dropout_threshold;   // a number below which a weight is dropped, of 16 bits, in the upper half
    float dropout_scale;     // of weights that are kept: 1 / (1 - dropout_p), 0 where all are dropped
};

// A call without functions of the user's. What stands in its place otherwise is made by xattn/user_functions.py:
// Params has more fields then. A ScoreMod or MaskMod loads what is the same for a head, and is asked about each score;
// both note that they asked for an element that a captured tensor has not got. kReadsEach: one reads captured tensors
// for each score. An epilogue gets a run of channels. Out: the element of the output; void: the usual one.
struct NoFunctions {
    using Params = ForwardParams;
    using Out = void;
    static constexpr bool kScoreMod = false, kMaskMod = false, kReads = false, kReadsEach = false, kEpilogue = false;
    template <class A>
    struct ScoreMod {};
    template <class A>
    struct MaskMod {};
};

}  // namespace xattn
