// V of 8 bits, turned. wgmma wants 8-bit operands with their sums along rows, and V's are along columns: two warps of
// the giving warpgroup turn every block that TMA has brought, from one ring of buffers into another, which consumers
// read.
//
// What comes out, in panels of 128 keys, swizzled by 128 bytes: row 16 a + j holds channel 16 a + 2 j, row 16 a + 8 + j
// channel 16 a + 2 j + 1 (j < 8); of each 16 keys, byte 4 t + i of a row is key 2 t + i for i < 2, else 8 + 2 t + i - 2
// (t < 4). Both orders are what ldmatrix.trans and two byte permutations give; the keys' is that in which weights lie
// in an accumulator, and the channels' gives a lane four that follow each other. Neither ldmatrix nor stmatrix meets a
// bank twice.
#pragma once

#include "arch/sm90/tiles.h"
#include "arch/sm90/tma.h"

namespace xattn {

template <class Forward>
struct Transposer {
    static constexpr int kTileN = Forward::kTileN, kDimV = Forward::kDimV, kStages = Forward::kStages;
    static constexpr int kWarps = Forward::kTransposers;
    static constexpr int kAtOnce = Forward::kConsumers == 3 ? 1 : 2;  // as registers allow

    const ForwardParams& p;
    const typename Forward::Buffers buffers;
    const int warp, lane;

    XATTN_DEVICE void run() {
        Ring<Forward::kWorks> works;
        Ring<kStages> landed, turned{1};
        for (;;) {
            buffers.work_full(works.stage()).wait(works.parity());
            const u32 at = buffers.work(works.stage());
            const Work::Rows rows = Work::Rows::at(at);
            if (rows.rows == Work::kEnd) break;
            const Work::Keys keys = Work::Keys::at(at);
            __syncwarp();
            if (elected()) buffers.work_empty(works.stage()).arrive();
            works.next();
            for (s32 n = keys.n_last; n >= keys.n_first; --n) {
                buffers.landed_full(landed.stage()).wait(landed.parity());
                buffers.v_empty(turned.stage()).wait(turned.parity());
                // Keys behind the last one may hold anything, where TMA does not know where a sequence ends; a weight
                // of 0 does not silence a NaN.
                const s32 valid = keys.seqlen_k - n * kTileN;
                if (XATTN_RARELY((p.seqused_k || p.cu_seqlens_k) && valid < kTileN))
                    turn<true>(buffers.landed(landed.stage()), buffers.v(turned.stage()), valid);
                else
                    turn<false>(buffers.landed(landed.stage()), buffers.v(turned.stage()), valid);
                fence_async_proxy();
                __syncwarp();
                if (elected()) buffers.landed_empty(landed.stage()).arrive(), buffers.v_full(turned.stage()).arrive();
                landed.next(), turned.next();
            }
        }
    }

  private:
    // 16 keys and 32 channels at a time; the keys from `valid` on become 0 where `clears`.
    template <bool clears>
    XATTN_DEVICE void turn(u32 from, u32 to, s32 valid) const {
        const u32 source = from + (lane & 15) * 128, target = to + lane * 128;
#pragma unroll 1
        for (int c = 0; c < kDimV / 32; ++c) {
            const u32 read = source + c / 4 * Forward::kPanelK + (u32((2 * c + (lane >> 4)) & 7) ^ u32(lane & 7)) * 16;
#pragma unroll kAtOnce
            for (int k = 0; k < kTileN / 16 / kWarps; ++k) {
                const int group = kWarps * k + warp;
                u32 x[4];
                IsaSm80::ldmatrix_trans(x, read + group * 16 * 128);
                u32 y[4] = {__byte_perm(x[0], x[1], 0x6420), __byte_perm(x[0], x[1], 0x7531),
                            __byte_perm(x[2], x[3], 0x6420), __byte_perm(x[2], x[3], 0x7531)};
                if (clears) {
                    const s32 left = valid - 16 * group - 2 * (lane & 3);  // of this lane's 0, 1, 8 and 9
                    const u32 kept = (left > 0 ? 0xffu : 0) | (left > 1 ? 0xff00u : 0) | (left > 8 ? 0xff0000u : 0) |
                                     (left > 9 ? 0xff000000u : 0);
                    XATTN_UNROLL
                    for (int i = 0; i < 4; ++i) y[i] &= kept;
                }
                stmatrix(target + group / 8 * Forward::kPanelT + c * 32 * 128 + (u32(group & 7) ^ u32(lane & 7)) * 16,
                         y);
            }
        }
    }
};

}  // namespace xattn
