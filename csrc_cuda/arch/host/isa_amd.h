// The instructions of csrc_hip/arch/cdna/isa.h on the CPU: 64 lanes, MFMA by its documented layouts (AMD CDNA3 ISA).
#pragma once

#include "arch/host/isa_lanes.h"

namespace xattn {

struct IsaHostAmd : IsaHostLanes<64> {
    static constexpr int kWave = 64;

    static void store_shared(u32 at, const Chunk& c) { memcpy(Block::current->at(at, 16), &c, 16); }
    using IsaHostLanes::store_shared;
    static void store_shared(u32 at, u32 x) { memcpy(Block::current->at(at, 4), &x, 4); }
    static void load_shared(u32 (&x)[2], u32 at) { memcpy(x, Block::current->at(at, 8), 8); }
    static u32 load_shared8(u32 at) { return *Block::current->at(at, 1); }
    static u32 load_shared32(u32 at) {
        u32 x;
        memcpy(&x, Block::current->at(at, 4), 4);
        return x;
    }
    static u32 load_shared16(u32 at) {
        u16 x;
        memcpy(&x, Block::current->at(at, 2), 2);
        return x;
    }
    static Chunk load_shared_chunk(u32 at) {
        Chunk c;
        memcpy(&c, Block::current->at(at, 16), 16);
        return c;
    }

    template <class Element>
    static void mfma_16x16x16(Element, float* d, const u32* a, const u32* b) {
        struct Lane {
            float* d;
            const u32 *a, *b;
        } mine{d, a, b};
        Block::current->in_warp(&mine, [](void** lanes) {
            float left[16][16], right[16][16], sum[16][16] = {};
            for (int l = 0; l < kWave; ++l) {
                const Lane& lane = *static_cast<Lane*>(lanes[l]);
                for (int i = 0; i < 4; ++i) {
                    const int k = 4 * (l / 16) + i;
                    left[l % 16][k] = host::to_float(Element{u16(lane.a[i / 2] >> (16 * (i % 2)))});
                    right[k][l % 16] = host::to_float(Element{u16(lane.b[i / 2] >> (16 * (i % 2)))});
                }
            }
            for (int m = 0; m < 16; ++m)
                for (int n = 0; n < 16; ++n)
                    for (int k = 0; k < 16; ++k) sum[m][n] += left[m][k] * right[k][n];
            for (int l = 0; l < kWave; ++l)
                for (int i = 0; i < 4; ++i) static_cast<Lane*>(lanes[l])->d[i] += sum[4 * (l / 16) + i][l % 16];
        });
    }
};

}  // namespace xattn
