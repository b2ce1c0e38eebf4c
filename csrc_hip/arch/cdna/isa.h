// The instructions of gfx90a, gfx942 and gfx950 that kernels use, one function each, over clang's builtins.
#pragma once

#include "kernels/fp8.h"

namespace xattn {

struct IsaCdna {
    static constexpr int kWave = 64;

    XATTN_DEVICE static int thread_index() { return int(__builtin_amdgcn_workitem_id_x()); }
    XATTN_DEVICE static u32 block_index() { return __builtin_amdgcn_workgroup_id_x(); }
    XATTN_DEVICE static void barrier() {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
        __builtin_amdgcn_s_barrier();
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    }
    XATTN_DEVICE static void warp_barrier() {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
        __builtin_amdgcn_wave_barrier();
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
    }
    XATTN_DEVICE static bool any(bool x) { return __builtin_amdgcn_ballot_w64(x) != 0; }
    XATTN_DEVICE static s32 shuffle(s32 x, int lane) { return __builtin_amdgcn_ds_bpermute(lane << 2, x); }
    XATTN_DEVICE static float shuffle_xor(float x, int mask) {
        const int lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
        return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((lane ^ mask) << 2, __builtin_bit_cast(int, x)));
    }
    XATTN_DEVICE static s32 fresh(s32 x) {
        asm volatile("" : "+v"(x));
        return x;
    }
    XATTN_DEVICE static u32 fresh_uniform(u32 x) {
        x = u32(__builtin_amdgcn_readfirstlane(s32(x)));
        asm volatile("" : "+s"(x));
        return x;
    }

    XATTN_DEVICE static float infinity() { return __builtin_inff(); }
    XATTN_DEVICE static float max(float a, float b) { return __builtin_fmaxf(a, b); }
    XATTN_DEVICE static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
    XATTN_DEVICE static float product(float a, float b) {
#pragma clang fp contract(off)
        return a * b;
    }
    XATTN_DEVICE static float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
    XATTN_DEVICE static float divide(float a, float b) { return a * reciprocal(b); }
    XATTN_DEVICE static float exact_quotient(float a, float b) { return a / b; }  // clang's default for HIP
    XATTN_DEVICE static float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
    XATTN_DEVICE static float log2(float x) { return __builtin_amdgcn_logf(x); }
    XATTN_DEVICE static u32 pack(fp16, float low, float high) {
        typedef _Float16 half2 __attribute__((ext_vector_type(2)));
        return __builtin_bit_cast(u32, half2{_Float16(low), _Float16(high)});
    }
    XATTN_DEVICE static u32 pack(bf16, float low, float high) { return rounded(low) | rounded(high) << 16; }
    XATTN_DEVICE static float widen(bf16 x) { return __builtin_bit_cast(float, u32(x.bits) << 16); }
    XATTN_DEVICE static float widen(fp16 x) { return float(__builtin_bit_cast(_Float16, x.bits)); }

    // ---- bits, and 8-bit floats
    XATTN_DEVICE static u32 bits(float x) { return __builtin_bit_cast(u32, x); }
    XATTN_DEVICE static float number(u32 bits) { return __builtin_bit_cast(float, bits); }
    XATTN_DEVICE static u32 rounded_pair(float low, float high) { return rounded_pair_in_software<IsaCdna>(low, high); }
    // A digit of `which` for each byte of the result, the lowest first: 0-3 of `low`, 4-7 of `high`.
    XATTN_DEVICE static u32 bytes(u32 low, u32 high, u32 which) {
        const u32 apart = (which & 0xf) | (which & 0xf0) << 4 | (which & 0xf00) << 8 | (which & 0xf000) << 12;
        return __builtin_amdgcn_perm(high, low, apart);
    }
    XATTN_DEVICE static u32 multiply_pair(fp16, u32 x, u32 factor) {
        typedef _Float16 half2 __attribute__((ext_vector_type(2)));
        return __builtin_bit_cast(u32, __builtin_bit_cast(half2, x) * __builtin_bit_cast(half2, factor));
    }
    XATTN_DEVICE static u32 multiply_pair(bf16, u32 x, u32 factor) {
        const float low = widen(bf16{u16(x)}) * widen(bf16{u16(factor)});
        const float high = widen(bf16{u16(x >> 16)}) * widen(bf16{u16(factor >> 16)});
        return upper_halves(low, high);
    }
    // Four bytes to two words of 16-bit elements. gfx942's instruction takes e4m3fnuz, gfx950's e4m3 (AMD CDNA3 and
    // CDNA4 ISA, V_CVT_PK_F32_FP8); gfx90a has none.
#if defined(__gfx942__)
    using Native = e4m3fnuz;
#elif defined(__gfx950__)
    using Native = e4m3;
#endif
#if defined(__gfx942__) || defined(__gfx950__)
    template <class Element>
    XATTN_DEVICE static void widen(Element, Native, u32 word, u32 (&x)[2]) {
        const auto low = __builtin_amdgcn_cvt_pk_f32_fp8(int(word), false);
        const auto high = __builtin_amdgcn_cvt_pk_f32_fp8(int(word), true);
        x[0] = exactly(Element{}, low[0], low[1]), x[1] = exactly(Element{}, high[0], high[1]);
    }
#endif
    template <class Element, class Cache>
    XATTN_DEVICE static void widen(Element, Cache, u32 word, u32 (&x)[2]) {
        widen_in_software<IsaCdna, Element, Cache>(word, x);
    }

    // ---- LDS: addresses are 32-bit
    XATTN_DEVICE static void store_shared(u32 at, const Chunk& c) {
        *local<word4>(at) = word4{c.word[0], c.word[1], c.word[2], c.word[3]};
    }
    XATTN_DEVICE static void store_shared(u32 at, u32 x) { *local<u32>(at) = x; }
    XATTN_DEVICE static void load_shared(u32 (&x)[2], u32 at) {
        const u64 both = *local<u64>(at);
        x[0] = u32(both), x[1] = u32(both >> 32);
    }
    XATTN_DEVICE static void store_shared8(u32 at, u32 x) { *local<u8>(at) = u8(x); }
    XATTN_DEVICE static u32 load_shared8(u32 at) { return *local<u8>(at); }
    XATTN_DEVICE static u32 load_shared16(u32 at) { return *local<u16>(at); }
    XATTN_DEVICE static u32 load_shared32(u32 at) { return *local<u32>(at); }
    XATTN_DEVICE static Chunk load_shared_chunk(u32 at) {
        const word4 x = *local<word4>(at);
        return {{x[0], x[1], x[2], x[3]}};
    }

    XATTN_DEVICE static void store_shared(u32 at, float x) { *local<float>(at) = x; }
    XATTN_DEVICE static float load_shared_float(u32 at) { return *local<float>(at); }
    XATTN_DEVICE static void load_shared_floats(float (&x)[4], u32 at) {
        const float4 y = *local<float4>(at);
        x[0] = y[0], x[1] = y[1], x[2] = y[2], x[3] = y[3];
    }

    XATTN_DEVICE static void load_global(u32 (&x)[4], const void* at) {
        const word4 y = *static_cast<const word4*>(at);
        x[0] = y[0], x[1] = y[1], x[2] = y[2], x[3] = y[3];
    }
    XATTN_DEVICE static void load_global(float (&x)[4], const void* at) {
        const float4 y = *static_cast<const float4*>(at);
        x[0] = y[0], x[1] = y[1], x[2] = y[2], x[3] = y[3];
    }
    XATTN_DEVICE static void store_global(u16* at, const u32 (&x)[4]) {
        *reinterpret_cast<word4*>(at) = word4{x[0], x[1], x[2], x[3]};
    }

    // ---- between thread blocks: the fences write back and drop what the caches of a chiplet hold alone
    XATTN_DEVICE static void device_fence() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent"); }
    XATTN_DEVICE static u32 atomic_add(u32* at, u32 x) {
        return __hip_atomic_fetch_add(at, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    }
    XATTN_DEVICE static void store_global(float* at, const float (&x)[4]) {
        *reinterpret_cast<float4*>(at) = float4{x[0], x[1], x[2], x[3]};
    }
    XATTN_DEVICE static float load_fresh(const float* at) { return *at; }
    XATTN_DEVICE static void load_fresh(float (&x)[4], const float* at) {
        const float4 y = *reinterpret_cast<const float4*>(at);
        x[0] = y[0], x[1] = y[1], x[2] = y[2], x[3] = y[3];
    }

    // ---- matrices: d += A B, four 16-bit elements of A and of B a lane
    XATTN_DEVICE static void mfma_16x16x16(fp16, float* d, const u32* a, const u32* b) {
        typedef _Float16 half4 __attribute__((ext_vector_type(4)));
        accumulate(d, __builtin_amdgcn_mfma_f32_16x16x16f16(four<half4>(a), four<half4>(b),
                                                            float4{d[0], d[1], d[2], d[3]}, 0, 0, 0));
    }
    XATTN_DEVICE static void mfma_16x16x16(bf16, float* d, const u32* a, const u32* b) {
        typedef short short4 __attribute__((ext_vector_type(4)));
        accumulate(d, __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(four<short4>(a), four<short4>(b),
                                                                float4{d[0], d[1], d[2], d[3]}, 0, 0, 0));
    }

  private:
    typedef float float4 __attribute__((ext_vector_type(4)));
    typedef u32 word4 __attribute__((ext_vector_type(4)));
    template <class T>
    using Local = __attribute__((address_space(3))) T;

    template <class T>
    XATTN_DEVICE static Local<T>* local(u32 at) {
        return (Local<T>*)at;
    }
    template <class T>
    XATTN_DEVICE static T four(const u32* x) {
        struct {
            u32 word[2];
        } both = {{x[0], x[1]}};
        return __builtin_bit_cast(T, both);
    }
    XATTN_DEVICE static void accumulate(float* d, float4 x) { d[0] = x[0], d[1] = x[1], d[2] = x[2], d[3] = x[3]; }

    // Two words' upper halves: floats as bf16, where those hold them.
    XATTN_DEVICE static u32 upper_halves(float low, float high) {
        return __builtin_amdgcn_perm(bits(high), bits(low), 0x07060302);
    }
    XATTN_DEVICE static u32 exactly(bf16, float low, float high) { return upper_halves(low, high); }
    XATTN_DEVICE static u32 exactly(fp16, float low, float high) { return pack(fp16{}, low, high); }

    // bf16 to nearest even; NaN stays NaN.
    XATTN_DEVICE static u32 rounded(float x) {
        const u32 b = __builtin_bit_cast(u32, x);
        return x != x ? b >> 16 | 0x40 : (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    }
};

}  // namespace xattn
