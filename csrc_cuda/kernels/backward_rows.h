// Backward, first: what every row brings to the gradients of its scores, delta = sum of dout * out, less the gradient
// of lse. Eight lanes share a row; a thread block has kTileM rows of one head.
#pragma once

#include "kernels/backward_tile.h"
#include "kernels/scheduler.h"

namespace xattn {

template <class Arch, class Config>
struct BackwardRows {
    using Element = typename Config::Element;
    static constexpr int kTileM = Config::tile_m;
    static constexpr int kThreads = Config::num_warps * Arch::kWarpSize;
    static constexpr int kLanes = 8;
    static constexpr int kAtOnce = kThreads / kLanes;  // rows
    static constexpr int kSharedBytes = 0;
    static_assert(kTileM % kAtOnce == 0, "every lane takes part in every exchange");

    XATTN_DEVICE static void run(const BackwardParams& b, typename Arch::Shared) {
        const ForwardParams& p = b.p;
        const Tile t = tile_at(p, Arch::block_index());
        if (t.sequence == p.batch) return;  // rows behind the last offset: nobody reads their delta
        const Sequence seq = Sequence::of(p, t.sequence);
        const int thread = Arch::thread_index();
        const u16* out = first_row(p.out, p.cu_seqlens_q, t.sequence, seq.start_q, t.head);
        const u16* dout = first_row(b.dout, p.cu_seqlens_q, t.sequence, seq.start_q, t.head);
        const s64 at = row_numbers(p, seq, t.sequence, t.head);
        for (int r = thread / kLanes; r < kTileM; r += kAtOnce) {
            const s32 row = t.m_block * kTileM + r;
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
            if (valid && thread % kLanes == 0) {
                const float lse = p.lse[at + row];
                if (b.dlse) sum -= b.dlse[at + row];
                b.delta[at + row] = lse == Arch::infinity() || lse == -Arch::infinity() ? 0.0f : sum;
            }
        }
    }

  private:
    XATTN_DEVICE static float low(u32 word) { return Arch::template to_float<Element>(u16(word)); }
    XATTN_DEVICE static float high(u32 word) { return Arch::template to_float<Element>(u16(word >> 16)); }
};

}  // namespace xattn
