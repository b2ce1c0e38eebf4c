// Backward on Hopper, last: the sums of a tile of queries, times softmax_scale, rounded to dq. A thread block has a
// tile; its two warpgroups hold what those of backward.h held: 64 rows and 64 columns each.
#pragma once

#include "arch/sm90/backward_params.h"
#include "kernels/backward_tile.h"
#include "kernels/scheduler.h"

namespace xattn {

template <class Config>
struct Sm90BackwardQueries {
    using Arch = Sm80<IsaSm80>;
    using Element = typename Config::Element;
    static constexpr int kTileM = Config::tile_m, kThreads = 256, kPanels = (Config::head_dim + 63) / 64;
    using Rows = QueryTile<kTileM, kPanels * 64>;
    static constexpr int kSharedBytes = 2 * 64 * 128;

    XATTN_DEVICE static void run(const Sm90BackwardParams& params, u32 shared) {
        const BackwardParams& b = params.b;
        const ForwardParams& p = b.p;
        const Tile t = tile_at(p, Arch::block_index());
        const int thread = Arch::thread_index(), warp = thread / 32 % 4, lane = thread % 32, group = thread / 128;
        if (t.sequence == p.batch) {
            const Sequence rest = Sequence::rest(p);
            u16* dq = target_row(b.dq, p.cu_seqlens_q, 0, rest.start_q, t.head);
            return clear_rows<kThreads>(dq, b.dq, rest.seqlen_q, p.head_dim, t.m_block, p.m_blocks, thread);
        }
        const Sequence seq = Sequence::of(p, t.sequence);
        const s32 row0 = t.m_block * kTileM;
        if (row0 >= seq.seqlen_q) return;
        const s64 tile = Rows::first(params, seq, t.sequence, t.head) + t.m_block;
        const float* numbers = params.numbers + tile * Rows::kNumbers;
        const float* sums = params.sums + tile * Rows::kSums + group * 64 * 64 + (thread % 128) * 4;
        const int row = (kPanels == 1 ? group * 64 : 0) + warp * 16, col = kPanels == 1 ? 0 : group * 64;
        // A row that sees no key has no gradient, whatever stands in k.
        float factor[2];
        XATTN_UNROLL
        for (int r = 0; r < 2; ++r)
            factor[r] = numbers[Rows::number_of(row + Arch::row_of(lane, r))] == Arch::infinity() ? 0.0f : b.scale;
        const u32 at = shared + group * 64 * 128 + warp * 16 * 128;
        float x[8][4];
        XATTN_UNROLL
        for (int n = 0; n < 8; ++n) Arch::load_global(x[n], sums + n * 512);
        XATTN_UNROLL
        for (int g = 0; g < 4; ++g) {
            OperandA packed;
            XATTN_UNROLL
            for (int i = 0; i < 4; ++i) {
                const float* pair = x[2 * g + i / 2] + i % 2 * 2;
                const u32 word = Arch::template pack<Element>(pair[0] * factor[i % 2], pair[1] * factor[i % 2]);
                packed.x[i] = factor[i % 2] == 0.0f ? 0 : word;
            }
            stmatrix(at + (lane & 15) * 128 + (u32(g * 2 + (lane >> 4)) ^ u32(lane & 7)) * 16, packed.x);
        }
        Arch::warp_barrier();
        u16* dq = target_row(b.dq, p.cu_seqlens_q, t.sequence, seq.start_q, t.head) + s64(row0) * b.dq.row_stride;
        XATTN_UNROLL
        for (int n = 0; n < 4; ++n) {
            const int index = n * 32 + lane, r = index / 8, c = index % 8;
            if (row0 + row + r < seq.seqlen_q && col + c * 8 < p.head_dim)
                *reinterpret_cast<Chunk*>(dq + s64(row + r) * b.dq.row_stride + col + c * 8) =
                    IsaSm80::load_shared(at + r * 128 + (u32(c) ^ u32(r & 7)) * 16);
        }
    }
};

}  // namespace xattn
