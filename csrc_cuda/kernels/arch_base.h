// What every Arch has alike: its Isa under the names that the bodies use, an accumulator, and sums over the lanes of a
// row.
#pragma once

#include "kernels/fp8.h"

namespace xattn {

// Four lanes share a row of a 16 x 16 accumulator: those whose numbers differ in the bits kLaneA and kLaneB.
template <class Isa, int kElementCount, int kLaneA, int kLaneB>
struct ArchBase {
    static constexpr int kElements = kElementCount;
    using Shared = u32;  // an address in shared memory

    struct Accumulator {
        float x[kElements];
        XATTN_DEVICE void clear() {
            XATTN_UNROLL
            for (int e = 0; e < kElements; ++e) x[e] = 0.0f;
        }
    };

    XATTN_DEVICE static int thread_index() { return Isa::thread_index(); }
    XATTN_DEVICE static u32 block_index() { return Isa::block_index(); }
    XATTN_DEVICE static void barrier() { Isa::barrier(); }
    XATTN_DEVICE static void warp_barrier() { Isa::warp_barrier(); }
    XATTN_DEVICE static bool any(bool x) { return Isa::any(x); }
    XATTN_DEVICE static s32 shuffle(s32 x, int lane) { return Isa::shuffle(x, lane); }  // what that lane holds

    XATTN_DEVICE static float shuffle_xor(float x, int mask) { return Isa::shuffle_xor(x, mask); }

    // The same number, of which the compiler knows nothing: what depends on it is computed here, not ahead of the loop,
    // where it would cost registers.
    XATTN_DEVICE static s32 fresh(s32 x) { return Isa::fresh(x); }
    XATTN_DEVICE static u32 fresh_uniform(u32 x) { return Isa::fresh_uniform(x); }  // the same in all lanes

    XATTN_DEVICE static float infinity() { return Isa::infinity(); }
    // One instruction, which a comparison and a choice are not; of a number and a NaN it is the number.
    XATTN_DEVICE static float max(float a, float b) { return Isa::max(a, b); }
    XATTN_DEVICE static float fma(float a, float b, float c) { return Isa::fma(a, b, c); }
    // Within 2 ulp, for denominators below 2^126.
    XATTN_DEVICE static float divide(float a, float b) { return Isa::divide(a, b); }
    // Within 1 ulp, of 2^-126 to 2^126.
    XATTN_DEVICE static float reciprocal(float x) { return Isa::reciprocal(x); }
    // Rounded to nearest.
    XATTN_DEVICE static float exact_quotient(float a, float b) { return Isa::exact_quotient(a, b); }
    XATTN_DEVICE static float exp2(float x) { return Isa::exp2(x); }
    XATTN_DEVICE static float log2(float x) { return Isa::log2(x); }
    // Rounded for itself, which a compiler may not fuse with what is added to it.
    XATTN_DEVICE static float product(float a, float b) { return Isa::product(a, b); }
    // (1 - e) / (1 + e) with e = exp(-2 |x|): exact to the rounding of the exponential, which approximations are not.
    // For small numbers, where 1 - e is not, the series x - x^3 / 3 + 2 x^5 / 15.
    XATTN_DEVICE static float tanh(float x) {
        const float e = exp2(-2.0f * kLog2e * fabsf(x)), y = (1.0f - e) * Isa::reciprocal(1.0f + e);
        return x * x < 0.0025f ? series(x) : copysignf(y, x);
    }
    // The same past what is not needed: slower, and in fewer registers.
    XATTN_DEVICE static float tanh_by_jumps(float x) {
        if (x * x < 0.0025f) return series(x);
        const float e = exp2(-2.0f * kLog2e * (x < 0.0f ? -x : x)), y = Isa::divide(1.0f - e, 1.0f + e);
        return x < 0.0f ? -y : y;
    }
    template <class Element>
    XATTN_DEVICE static float to_float(u16 bits) {
        return Isa::widen(Element{bits});
    }

    // Two floats as one word of 16-bit elements.
    template <class Element>
    XATTN_DEVICE static u32 pack(float low, float high) {
        return Isa::pack(Element{}, low, high);
    }

    XATTN_DEVICE static float number(u32 bits) { return Isa::number(bits); }
    XATTN_DEVICE static u32 bits(float x) { return Isa::bits(x); }
    // The code of an 8-bit float (fp8.h).
    template <class Cache>
    XATTN_DEVICE static u32 rounded(float x) {
        return rounded_fp8<Isa, Cache>(x);
    }

    // Two of e4m3 in 16 bits.
    XATTN_DEVICE static u32 rounded_pair(float low, float high) { return Isa::rounded_pair(low, high); }

    // ---- floats in shared memory
    XATTN_DEVICE static void store_float(Shared at, float x) { Isa::store_shared(at, x); }
    XATTN_DEVICE static float load_float(Shared at) { return Isa::load_shared_float(at); }
    XATTN_DEVICE static void load_floats(float (&x)[4], Shared at) { Isa::load_shared_floats(x, at); }
    // ---- and other numbers
    XATTN_DEVICE static void store_byte(Shared at, u32 x) { Isa::store_shared8(at, x); }
    XATTN_DEVICE static u32 load_word(Shared at) { return Isa::bits(Isa::load_shared_float(at)); }

    // ---- 16 bytes of global memory at once, from where 16 divides the address
    template <class Word>
    XATTN_DEVICE static void load_global(Word (&x)[4], const void* at) {
        Isa::load_global(x, at);
    }
    XATTN_DEVICE static void store_global(u16* at, const u32 (&x)[4]) { Isa::store_global(at, x); }

    // ---- what thread blocks tell each other: writes before a fence are seen behind the fence of whoever learned of
    // them by an atomic operation, if it reads them fresh
    XATTN_DEVICE static void device_fence() { Isa::device_fence(); }
    XATTN_DEVICE static u32 atomic_add(u32* at, u32 x) { return Isa::atomic_add(at, x); }
    XATTN_DEVICE static void store_floats(float* at, const float (&x)[4]) { Isa::store_global(at, x); }
    XATTN_DEVICE static float load_fresh(const float* at) { return Isa::load_fresh(at); }
    XATTN_DEVICE static void load_fresh(float (&x)[4], const float* at) { Isa::load_fresh(x, at); }

    XATTN_DEVICE static float row_max(float x) {
        x = max(x, Isa::shuffle_xor(x, kLaneA));
        return max(x, Isa::shuffle_xor(x, kLaneB));
    }
    XATTN_DEVICE static float row_sum(float x) {
        x += Isa::shuffle_xor(x, kLaneA);
        return x + Isa::shuffle_xor(x, kLaneB);
    }

  private:
    // tanh(x), to x^5.
    XATTN_DEVICE static float series(float x) { return x * fma(x * x, fma(x * x, 2.0f / 15, -1.0f / 3), 1.0f); }
};

}  // namespace xattn
