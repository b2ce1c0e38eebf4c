// The instructions that do not depend on the matrix unit, on the CPU, for warps or waves of kLanes: what isa_nvidia.h
// and isa_amd.h share.
#pragma once

#include "arch/host/fibres.h"
#include "arch/host/floats.h"
#include "kernels/fp8.h"

namespace xattn {

template <int kLanes>
struct IsaHostLanes {
    using Block = host::Block;

    static int thread_index() { return Block::current->fibre->index; }
    static u32 block_index() { return Block::current->block_index; }
    static void barrier() { Block::current->barrier(); }
    static void warp_barrier() {
        Block::current->in_warp(nullptr, [](auto&) {});
    }
    static bool any(bool x) {
        bool mine = x;
        Block::current->in_warp(&mine, [](void** lanes) {
            bool all = false;
            for (int l = 0; l < kLanes; ++l) all |= *static_cast<bool*>(lanes[l]);
            for (int l = 0; l < kLanes; ++l) *static_cast<bool*>(lanes[l]) = all;
        });
        return mine;
    }
    static float shuffle_xor(float x, int mask) { return exchange(x, thread_index() % kLanes ^ mask); }
    static s32 shuffle(s32 x, int lane) { return exchange(x, lane); }
    static s32 fresh(s32 x) { return x; }
    static u32 fresh_uniform(u32 x) { return x; }

    static float infinity() { return __builtin_inff(); }
    static float max(float a, float b) { return __builtin_fmaxf(a, b); }
    static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
    static float product(float a, float b) { return a * b; }
    static float divide(float a, float b) { return a / b; }
    static float reciprocal(float x) { return 1.0f / x; }
    static float exact_quotient(float a, float b) { return a / b; }
    static float exp2(float x) { return __builtin_exp2f(x); }
    static float log2(float x) { return __builtin_log2f(x); }
    template <class Element>
    static u32 pack(Element, float low, float high) {
        return u32(host::round_to<Element>(low)) | u32(host::round_to<Element>(high)) << 16;
    }
    static u32 bits(float x) { return host::bits_of(x); }
    static float number(u32 bits) { return host::float_of(bits); }
    static u32 bytes(u32 low, u32 high, u32 which) {
        const u64 all = low | u64(high) << 32;
        u32 found = 0;
        for (int i = 0; i < 4; ++i) found |= u32(all >> (which >> (4 * i) & 7) * 8 & 255) << (8 * i);
        return found;
    }
    template <class Element>
    static u32 multiply_pair(Element e, u32 x, u32 factor) {
        float y[2];
        for (int i = 0; i < 2; ++i)
            y[i] = host::to_float(Element{u16(x >> (16 * i))}) * host::to_float(Element{u16(factor >> (16 * i))});
        return pack(e, y[0], y[1]);
    }
    // No instruction stands in for those of a GPU: what is tested is the way without.
    template <class Element, class Cache>
    static void widen(Element, Cache, u32 word, u32 (&x)[2]) {
        widen_in_software<IsaHostLanes, Element, Cache>(word, x);
    }
    static void store_shared8(u32 at, u32 x) { *Block::current->at(at, 1) = static_cast<unsigned char>(x); }
    static u32 rounded_pair(float low, float high) { return rounded_pair_in_software<IsaHostLanes>(low, high); }
    static void store_shared(u32 at, float x) { memcpy(Block::current->at(at, 4), &x, 4); }
    static float load_shared_float(u32 at) {
        float x;
        memcpy(&x, Block::current->at(at, 4), 4);
        return x;
    }
    static void load_shared_floats(float (&x)[4], u32 at) { memcpy(x, Block::current->at(at, 16), 16); }

    template <class Word>
    static void load_global(Word (&x)[4], const void* at) {
        memcpy(x, at, 16);
    }
    static void store_global(u16* at, const u32 (&x)[4]) { memcpy(at, x, 16); }

    // Thread blocks run one after the other.
    static void device_fence() {}
    static u32 atomic_add(u32* at, u32 x) {
        const u32 old = *at;
        *at += x;
        return old;
    }
    static void store_global(float* at, const float (&x)[4]) { memcpy(at, x, 16); }
    static float load_fresh(const float* at) { return *at; }
    static void load_fresh(float (&x)[4], const float* at) { memcpy(x, at, 16); }

    template <class Element>
    static float widen(Element x) {
        return host::to_float(x);
    }

  private:
    // What the lane `from` holds.
    template <class T>
    static T exchange(T x, int from) {
        struct Lane {
            T x;
            int from;
        } mine{x, from};
        Block::current->in_warp(&mine, [](void** lanes) {
            T old[kLanes];
            for (int l = 0; l < kLanes; ++l) old[l] = static_cast<Lane*>(lanes[l])->x;
            for (int l = 0; l < kLanes; ++l) static_cast<Lane*>(lanes[l])->x = old[static_cast<Lane*>(lanes[l])->from];
        });
        return mine.x;
    }
};

}  // namespace xattn
