// The instructions of arch/sm80/isa.h on the CPU, by their documentation: PTX ISA, "Matrix fragments for mma.m16n8k16"
// and "ldmatrix".
#pragma once

#include <cmath>

#include "arch/host/fibres.h"
#include "arch/host/floats.h"

namespace xattn {

struct IsaHostNvidia {
    using Block = host::Block;
    static constexpr int kWarp = 32;

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
            float old[kWarp];
            for (int l = 0; l < kWarp; ++l) old[l] = *static_cast<float*>(lanes[l]);
            for (int l = 0; l < kWarp; ++l) *static_cast<float*>(lanes[l]) = old[l ^ mask];
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

    static void cp_async(u32 target, const u16* source, bool valid) {
        Block::current->copy_async(target, valid ? source : nullptr);
    }
    static void cp_async_commit() { Block::current->copy_commit(); }
    template <int n>
    static void cp_async_wait() {
        Block::current->copy_wait(n);
    }
    static void store_shared(u32 at, u32 x) { std::memcpy(Block::current->at(at, 4), &x, 4); }
    static Chunk load_shared(u32 at) {
        Chunk c;
        std::memcpy(&c, Block::current->at(at, 16), 16);
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
        Block::current->in_warp(&mine, [](std::vector<void*>& lanes) {
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
        Block::current->in_warp(&mine, [transposed](std::vector<void*>& lanes) {
            for (int m = 0; m < 4; ++m) {
                u16 rows[8][8];
                for (int r = 0; r < 8; ++r)
                    std::memcpy(rows[r], Block::current->at(static_cast<Lane*>(lanes[8 * m + r])->at, 16), 16);
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
