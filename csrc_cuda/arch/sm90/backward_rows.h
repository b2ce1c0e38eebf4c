// Backward on Hopper, first: the numbers of every row and, where delta is asked for, delta itself: the sum of dout *
// out, less the gradient of lse. The sums of dq become 0. A thread block has a tile of queries, eight lanes share a
// row.
#pragma once

#include "arch/sm90/backward_params.h"
#include "kernels/backward_tile.h"
#include "kernels/scheduler.h"

namespace xattn {

template <class Config>
struct Sm90BackwardRows {
    using Arch = Sm80<IsaSm80>;
    using Element = typename Config::Element;
    static constexpr int kTileM = Config::tile_m, kThreads = 256, kLanes = 8, kAtOnce = kThreads / kLanes;
    using Rows = QueryTile<kTileM, (Config::head_dim + 63) / 64 * 64>;
    static_assert(kTileM % kAtOnce == 0, "every lane takes part in every exchange");

    XATTN_DEVICE static void run(const Sm90BackwardParams& params) {
        const BackwardParams& b = params.b;
        const ForwardParams& p = b.p;
        if (Arch::block_index() == 0 && Arch::thread_index() == 0) *Rows::taken(params) = 0;
        const Tile t = tile_at(p, Arch::block_index());
        if (t.sequence == p.batch) return;  // rows behind the last offset: nobody reads their numbers
        const Sequence seq = Sequence::of(p, t.sequence);
        const s32 row0 = t.m_block * kTileM;
        if (row0 >= seq.seqlen_q) return;
        const int thread = Arch::thread_index();
        const u16* out = first_row(p.out, p.cu_seqlens_q, t.sequence, seq.start_q, t.head);
        const u16* dout = first_row(b.dout, p.cu_seqlens_q, t.sequence, seq.start_q, t.head);
        const s64 at = row_numbers(p, seq, t.sequence, t.head), tile = Rows::first(params, seq, t.sequence, t.head);
        float* numbers = params.numbers + (tile + t.m_block) * Rows::kNumbers;
        Chunk* sums = reinterpret_cast<Chunk*>(params.sums + (tile + t.m_block) * Rows::kSums);
        for (int n = thread; n < Rows::kSums / 4; n += kThreads) sums[n] = Chunk{{0, 0, 0, 0}};
        XATTN_UNROLL
        for (int r = thread / kLanes; r < kTileM; r += kAtOnce) {
            const s32 row = row0 + r;
            const bool valid = row < seq.seqlen_q;
            float sum = 0.0f;
            for (s32 col = thread % kLanes * 8; valid && col < p.head_dim_v; col += kLanes * 8) {
                u32 x[4], y[4];
                Arch::load_global(x, out + row * p.out.row_stride + col);
                Arch::load_global(y, dout + row * b.dout.row_stride + col);
                XATTN_UNROLL
                for (int n = 0; n < 4; ++n) {
                    sum = Arch::fma(low(x[n]), low(y[n]), sum);
                    sum = Arch::fma(high(x[n]), high(y[n]), sum);
                }
            }
            XATTN_UNROLL
            for (int mask = 1; mask < kLanes; mask *= 2) sum += Arch::shuffle_xor(sum, mask);
            if (thread % kLanes == 0) {
                float lse = valid ? p.lse[at + row] : Arch::infinity();
                if (lse == -Arch::infinity()) lse = Arch::infinity();
                if (valid && b.dlse) sum -= b.dlse[at + row];
                if (lse == Arch::infinity()) sum = 0.0f;
                if (valid) b.delta[at + row] = sum;
                numbers[Rows::number_of(r)] = lse * kLog2e;
                numbers[kTileM + Rows::number_of(r)] = sum;
            }
        }
    }

  private:
    XATTN_DEVICE static float low(u32 word) { return Arch::template to_float<Element>(u16(word)); }
    XATTN_DEVICE static float high(u32 word) { return Arch::template to_float<Element>(u16(word >> 16)); }
};

}  // namespace xattn
