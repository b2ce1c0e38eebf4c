// The instructions of arch/sm80/isa.h on the CPU, by their documentation: PTX ISA, "Matrix fragments for mma.m16n8k16"
// and "ldmatrix".
#pragma once

#include "arch/host/isa_lanes.h"

namespace xattn {

struct IsaHostNvidia : IsaHostLanes<32> {
    static constexpr int kWarp = 32;

    static void cp_async(u32 target, const void* source, bool valid) {
        Block::current->copy_async(target, valid ? source : nullptr);
    }
    static void cp_async_commit() { Block::current->copy_commit(); }
    template <int n>
    static void cp_async_wait() {
        Block::current->copy_wait(n);
    }
    using IsaHostLanes::store_shared;
    static void store_shared(u32 at, u32 x) { memcpy(Block::current->at(at, 4), &x, 4); }
    static void store_shared(u32 at, const Chunk& c) { memcpy(Block::current->at(at, 16), &c, 16); }
    static Chunk load_shared(u32 at) {
        Chunk c;
        memcpy(&c, Block::current->at(at, 16), 16);
        return c;
    }

    static void ldmatrix(u32 (&x)[4], u32 at) { matrices(x, at, false); }
    static void ldmatrix_trans(u32 (&x)[4], u32 at) { matrices(x, at, true); }

    template <class Element>
    static void mma(Element, float* d, const u32* a, const u32* b) {
        struct Lane {
            float* d;
            const u32 *a, *b;
        } mine{d, a, b};
        Block::current->in_warp(&mine, [](void** lanes) {
            float A[16][16], B[16][8], D[16][8] = {};
            auto half = [](u32 word, int n) { return host::to_float(Element{u16(word >> (16 * n))}); };
            for (int l = 0; l < kWarp; ++l) {
                const Lane& lane = *static_cast<Lane*>(lanes[l]);
                const int g = l / 4, t = l % 4;
                for (int n = 0; n < 2; ++n) {
                    A[g][2 * t + n] = half(lane.a[0], n), A[g + 8][2 * t + n] = half(lane.a[1], n);
                    A[g][2 * t + 8 + n] = half(lane.a[2], n), A[g + 8][2 * t + 8 + n] = half(lane.a[3], n);
                    B[2 * t + n][g] = half(lane.b[0], n), B[2 * t + 8 + n][g] = half(lane.b[1], n);
                }
            }
            for (int i = 0; i < 16; ++i)
                for (int j = 0; j < 8; ++j)
                    for (int k = 0; k < 16; ++k) D[i][j] += A[i][k] * B[k][j];
            for (int l = 0; l < kWarp; ++l) {
                float* out = static_cast<Lane*>(lanes[l])->d;
                const int g = l / 4, t = l % 4;
                for (int n = 0; n < 2; ++n) out[n] += D[g][2 * t + n], out[2 + n] += D[g + 8][2 * t + n];
            }
        });
    }

  private:
    static void matrices(u32 (&x)[4], u32 at, bool transposed) {
        struct Lane {
            u32* x;
            u32 at;
        } mine{x, at};
        Block::current->in_warp(&mine, [transposed](void** lanes) {
            for (int m = 0; m < 4; ++m) {
                u16 rows[8][8];
                for (int r = 0; r < 8; ++r)
                    memcpy(rows[r], Block::current->at(static_cast<Lane*>(lanes[8 * m + r])->at, 16), 16);
                for (int l = 0; l < kWarp; ++l) {
                    const int g = l / 4, t = l % 4;
                    const u16 low = transposed ? rows[2 * t][g] : rows[g][2 * t],
                              high = transposed ? rows[2 * t + 1][g] : rows[g][2 * t + 1];
                    static_cast<Lane*>(lanes[l])->x[m] = low | u32(high) << 16;
                }
            }
        });
    }
};

}  // namespace xattn
