// The instructions of csrc_hip/arch/cdna/isa.h on the CPU: 64 lanes, MFMA by its documented layouts (AMD CDNA3 ISA).
#pragma once

#include <cmath>

#include "arch/host/fibres.h"
#include "arch/host/floats.h"

namespace xattn {

struct IsaHostAmd {
    using Block = host::Block;
    static constexpr int kWave = 64;

    static int thread_index() { return Block::current->fibre->index; }
    static u32 block_index() { return Block::current->block_index; }
    static void barrier() { Block::current->barrier(); }
    static void warp_barrier() {
        Block::current->in_warp(nullptr, [](auto&) {});
    }
    static bool any(bool x) {
        bool mine = x;
        Block::current->in_warp(&mine, [](std::vector<void*>& lanes) {
            bool all = false;
            for (void* l : lanes) all |= *static_cast<bool*>(l);
            for (void* l : lanes) *static_cast<bool*>(l) = all;
        });
        return mine;
    }
    static float shuffle_xor(float x, int mask) {
        float mine = x;
        Block::current->in_warp(&mine, [mask](std::vector<void*>& lanes) {
            float old[kWave];
            for (int l = 0; l < kWave; ++l) old[l] = *static_cast<float*>(lanes[l]);
            for (int l = 0; l < kWave; ++l) *static_cast<float*>(lanes[l]) = old[l ^ mask];
        });
        return mine;
    }
    static s32 fresh(s32 x) { return x; }

    static float infinity() { return INFINITY; }
    static float fma(float a, float b, float c) { return std::fmaf(a, b, c); }
    static float divide(float a, float b) { return a / b; }
    static float exp2(float x) { return std::exp2f(x); }
    static float log2(float x) { return std::log2f(x); }
    template <class Element>
    static u32 pack(Element, float low, float high) {
        return u32(host::round_to<Element>(low)) | u32(host::round_to<Element>(high)) << 16;
    }
    template <class Element>
    static float widen(Element x) {
        return host::to_float(x);
    }

    static void store_shared(u32 at, const Chunk& c) { std::memcpy(Block::current->at(at, 16), &c, 16); }
    static void store_shared(u32 at, u32 x) { std::memcpy(Block::current->at(at, 4), &x, 4); }
    static void load_shared(u32 (&x)[2], u32 at) { std::memcpy(x, Block::current->at(at, 8), 8); }
    static u32 load_shared16(u32 at) {
        u16 x;
        std::memcpy(&x, Block::current->at(at, 2), 2);
        return x;
    }
    static Chunk load_shared_chunk(u32 at) {
        Chunk c;
        std::memcpy(&c, Block::current->at(at, 16), 16);
        return c;
    }

    template <class Element>
    static void mfma_16x16x16(Element, float* d, const u32* a, const u32* b) {
        struct Lane {
            float* d;
            const u32 *a, *b;
        } mine{d, a, b};
        Block::current->in_warp(&mine, [](std::vector<void*>& lanes) {
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
