// What the backward kernels share: a warp's products over tiles in shared memory, the gradients of a tile of scores,
// and how results are stored. Tiles lie as tile_copy.h says.
#pragma once

#include "kernels/score_gradient.h"
#include "kernels/tile_copy.h"

namespace xattn {

XATTN_DEVICE const u16* first_row(const Operand& x, const void* packed, s32 sequence, s64 row, s32 head) {
    return static_cast<const u16*>(x.data) + (packed ? row * x.row_stride : sequence * x.batch_stride) +
           head * x.head_stride;
}
XATTN_DEVICE u16* target_row(const Operand& x, const void* packed, s32 sequence, s64 row, s32 head) {
    return const_cast<u16*>(first_row(x, packed, sequence, row, head));
}

// Where lse and delta hold a sequence's first row.
XATTN_DEVICE s64 row_numbers(const ForwardParams& p, const Sequence& seq, s32 sequence, s32 head) {
    return head * p.lse_head_stride + (p.cu_seqlens_q ? seq.start_q : sequence * p.lse_batch_stride);
}

// kGroups 16-row groups of a warp against kCols 16-column groups.
template <class Arch, class Element, int kGroups, int kCols>
struct WarpProducts {
    using Accumulator = typename Arch::Accumulator;
    using OperandA = typename Arch::OperandA;
    using OperandB = typename Arch::OperandB;
    using Shared = typename Arch::Shared;

    // acc = A B^T: rows of one tile against rows of another, from its row `col` on, over kDim.
    template <int kDim, class LayoutA, class LayoutB>
    XATTN_DEVICE static void rows_by_rows(Accumulator (&acc)[kGroups][kCols], Shared pa, Shared pb, int col) {
        XATTN_UNROLL
        for (int g = 0; g < kGroups; ++g) XATTN_UNROLL
        for (int n = 0; n < kCols; ++n) acc[g][n].clear();
        XATTN_UNROLL
        for (int c = 0; c < kDim / 16; ++c) {
            OperandA a[kGroups];
            XATTN_UNROLL
            for (int g = 0; g < kGroups; ++g) a[g] = Arch::template load_rows<LayoutA>(pa, g * 16, c * 16);
            XATTN_UNROLL
            for (int n = 0; n < kCols; ++n) {
                const OperandB b = Arch::template load_keys<LayoutB>(pb, col + n * 16, c * 16);
                XATTN_UNROLL
                for (int g = 0; g < kGroups; ++g) Arch::template multiply<Element>(acc[g][n], a[g], b);
            }
        }
    }

    // acc += W B: weights as they stand against the rows of a tile, from its row `row` on.
    template <int kDim, class LayoutB>
    XATTN_DEVICE static void weights_by_tile(Accumulator (&acc)[kGroups][kDim / 16],
                                             const Accumulator (&w)[kGroups][kCols], Shared pb, int row) {
        XATTN_UNROLL
        for (int n = 0; n < kCols; ++n) {
            OperandA a[kGroups];
            XATTN_UNROLL
            for (int g = 0; g < kGroups; ++g) a[g] = Arch::template weights<Element>(w[g][n]);
            XATTN_UNROLL
            for (int d = 0; d < kDim / 16; ++d) {
                const OperandB b = Arch::template load_values<LayoutB>(pb, row + n * 16, d * 16);
                XATTN_UNROLL
                for (int g = 0; g < kGroups; ++g) Arch::template multiply<Element>(acc[g][d], a[g], b);
            }
        }
    }
};

template <class Arch, class Layout, int kDim>
XATTN_DEVICE void clear_row(typename Arch::Shared tile, int row) {
    for (int col = 0; col < kDim; col += 8) XATTN_UNROLL
    for (int byte = 0; byte < 16; byte += 4) Arch::store_float(tile + Layout::chunk_at(row, col) + byte, 0.0f);
}

// Stores a warp's rows, `scale` times the accumulators: rounded into shared memory where the warp alone reads, then
// 16 bytes at a time to global memory. Row r of the tile goes to `target`, of which `rows` exist from the tile's first.
template <class Arch, class Element, class Layout, int kGroups, int kDim>
XATTN_DEVICE void store_gradient(typename Arch::Accumulator (&acc)[kGroups][kDim / 16], float scale,
                                 typename Arch::Shared tile, int warp_row, int lane, u16* target, const Operand& x,
                                 s32 rows, s32 cols) {
    XATTN_UNROLL
    for (int g = 0; g < kGroups; ++g) XATTN_UNROLL
    for (int d = 0; d < kDim / 16; ++d) {
        XATTN_UNROLL
        for (int e = 0; e < Arch::kElements; ++e) acc[g][d].x[e] *= scale;
        Arch::template store_rows<Element, Layout>(tile, acc[g][d], warp_row + g * 16, d * 16, lane);
    }
    Arch::warp_barrier();
    constexpr int per_row = kDim / 8, total = 16 * kGroups * per_row;
    XATTN_UNROLL
    for (int n = 0; n < (total + Arch::kWarpSize - 1) / Arch::kWarpSize; ++n) {
        const int index = n * Arch::kWarpSize + lane;
        const int row = warp_row + index / per_row, col = index % per_row * 8;
        if (index < total && row < rows && col < cols) {
            Arch::store_chunk(target + s64(row) * x.row_stride + col, tile, Layout::chunk_at(row, col));
        }
    }
}

// Rows of a packed tensor that belong to no sequence have no gradient; the tiles of a head share them.
template <int kThreads>
XATTN_DEVICE void clear_rows(u16* target, const Operand& x, s64 rows, s32 cols, s32 first, s32 step, int thread) {
    for (s64 row = first; row < rows; row += step) {
        for (s32 c = thread; c < cols / 8; c += kThreads) {
            *reinterpret_cast<Chunk*>(target + row * x.row_stride + c * 8) = Chunk{{0, 0, 0, 0}};
        }
    }
}

}  // namespace xattn
