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
    static constexpr int kGroups = kTileN / 16 / kWarps, kAtOnce = kGroups <= 3 ? kGroups : 2;  // as registers allow

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
                if (XATTN_RARELY((p.seqused_k || p.cu_seqlens_k) && valid < kTileN)) {
                    Forward::clear_rows(buffers.landed(landed.stage()), max_of(valid, 0), lane, 32);
                    __syncwarp();
                }
                turn(buffers.landed(landed.stage()), buffers.v(turned.stage()));
                fence_async_proxy();
                __syncwarp();
                if (elected()) buffers.landed_empty(landed.stage()).arrive(), buffers.v_full(turned.stage()).arrive();
                landed.next(), turned.next();
            }
        }
    }

  private:
    // 16 keys and 32 channels at a time, every second 16 keys. kAtOnce are read before they are written, as each of the
    // two takes its time.
    XATTN_DEVICE void turn(u32 from, u32 to) const {
        u32 write = to + lane * 128 + (warp ^ (lane & 7)) * 16;
#pragma unroll 1
        for (int c = 0; c < kDimV / 32; ++c) {
            const u32 read = from + warp * 16 * 128 + (lane & 15) * 128 + c / 4 * Forward::kPanelK +
                             (u32((2 * c + (lane >> 4)) & 7) ^ u32(lane & 7)) * 16;
            XATTN_UNROLL
            for (int first = 0; first < kGroups; first += kAtOnce) {
                u32 x[kAtOnce][4];
                XATTN_UNROLL
                for (int i = 0; i < kAtOnce && first + i < kGroups; ++i)
                    IsaSm80::ldmatrix_trans(x[i], read + (first + i) * kWarps * 16 * 128);
                XATTN_UNROLL
                for (int i = 0; i < kAtOnce && first + i < kGroups; ++i) {
                    const int group = kWarps * (first + i);  // and `warp`
                    arrange(x[i]);
                    stmatrix((write ^ (group & 7) * 16) + group / 8 * Forward::kPanelT, x[i]);
                }
            }
            write += 32 * 128;
        }
    }
    // Two matrices of 16 x 16, in place.
    XATTN_DEVICE static void arrange(u32 (&x)[4]) {
        XATTN_UNROLL
        for (int i = 0; i < 4; i += 2) {
            const u32 even = __byte_perm(x[i], x[i + 1], 0x6420), odd = __byte_perm(x[i], x[i + 1], 0x7531);
            x[i] = even, x[i + 1] = odd;
        }
    }
};

}  // namespace xattn
