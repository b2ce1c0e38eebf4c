// The instructions of sm_80 that kernels use, one function each. PTX ISA 7.0 and later.
#pragma once

#include "kernels/fp8.h"

namespace xattn {

struct IsaSm80 {
    XATTN_DEVICE static int thread_index() { return int(threadIdx.x); }
    // Costs no register in between.
    XATTN_DEVICE static int thread_index_again() {
        int x;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
        return x;
    }
    XATTN_DEVICE static u32 block_index() { return blockIdx.x; }
    XATTN_DEVICE static void barrier() { __syncthreads(); }
    XATTN_DEVICE static void warp_barrier() { __syncwarp(); }
    XATTN_DEVICE static bool any(bool x) { return __any_sync(0xffffffffu, x); }
    XATTN_DEVICE static s32 shuffle(s32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
    XATTN_DEVICE static float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
    XATTN_DEVICE static s32 fresh(s32 x) {
        asm volatile("" : "+r"(x));
        return x;
    }
    XATTN_DEVICE static u32 fresh_uniform(u32 x) { return u32(fresh(s32(x))); }

    // ---- arithmetic
    XATTN_DEVICE static float infinity() { return __int_as_float(0x7f800000); }
    XATTN_DEVICE static float max(float a, float b) { return fmaxf(a, b); }
    XATTN_DEVICE static float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
    XATTN_DEVICE static float product(float a, float b) { return __fmul_rn(a, b); }
    XATTN_DEVICE static float divide(float a, float b) { return __fdividef(a, b); }
    XATTN_DEVICE static float reciprocal(float x) {
        float y;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
    XATTN_DEVICE static float exact_quotient(float a, float b) { return __fdiv_rn(a, b); }
    XATTN_DEVICE static float exp2(float x) {
        float y;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
    XATTN_DEVICE static float log2(float x) {
        float y;
        asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
    XATTN_DEVICE static u32 pack(bf16, float low, float high) {
        u32 y;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
    }
    XATTN_DEVICE static u32 pack(fp16, float low, float high) {
        u32 y;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
        return y;
    }
    XATTN_DEVICE static float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
    XATTN_DEVICE static float widen(fp16 x) {
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
        return y;
    }

    // ---- bits, and 8-bit floats
    XATTN_DEVICE static u32 bits(float x) { return __float_as_uint(x); }
    XATTN_DEVICE static float number(u32 bits) { return __uint_as_float(bits); }
    // A digit of `which` for each byte of the result, the lowest first: 0-3 of `low`, 4-7 of `high`.
    XATTN_DEVICE static u32 bytes(u32 low, u32 high, u32 which) { return __byte_perm(low, high, which); }
    XATTN_DEVICE static u32 multiply_pair(fp16, u32 x, u32 factor) {
        u32 y;
        asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(factor));
        return y;
    }
    // Four bytes to two words.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    XATTN_DEVICE static void widen(fp16, e4m3, u32 word, u32 (&x)[2]) {
        asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, low;\n\t"
            "cvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
            : "=r"(x[0]), "=r"(x[1])
            : "r"(word));
    }
    XATTN_DEVICE static u32 rounded_pair(float low, float high) {
        u16 y;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
        return y;
    }
#else
    XATTN_DEVICE static u32 rounded_pair(float low, float high) { return rounded_pair_in_software<IsaSm80>(low, high); }
    XATTN_DEVICE static void widen(fp16, e4m3, u32 word, u32 (&x)[2]) {
        widen_in_software<IsaSm80, fp16, e4m3>(word, x);
    }
#endif

    // ---- memory: addresses of shared memory are 32-bit
    XATTN_DEVICE static void cp_async(u32 target, const void* source, bool valid) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
                     : "memory");
    }
    // 16 bytes at once, which the compiler else may take apart.
    XATTN_DEVICE static void store_global(u16* target, const u32 (&x)[4]) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(x[0]), "r"(x[1]), "r"(x[2]),
                     "r"(x[3])
                     : "memory");
    }
    XATTN_DEVICE static void load_global(u32 (&x)[4], const void* at) {
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "l"(at)
                     : "memory");
    }
    XATTN_DEVICE static void load_global(float (&x)[4], const void* at) {
        asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "l"(at)
                     : "memory");
    }
    XATTN_DEVICE static void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    template <int n>
    XATTN_DEVICE static void cp_async_wait() {
        asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
    }
    XATTN_DEVICE static void store_shared(u32 at, u32 x) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
    }
    XATTN_DEVICE static void store_shared8(u32 at, u32 x) {
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"(x) : "memory");
    }
    XATTN_DEVICE static void store_shared(u32 at, const Chunk& c) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(c.word[0]), "r"(c.word[1]),
                     "r"(c.word[2]), "r"(c.word[3])
                     : "memory");
    }
    XATTN_DEVICE static Chunk load_shared(u32 at) {
        Chunk c;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
                     : "r"(at)
                     : "memory");
        return c;
    }

    XATTN_DEVICE static void store_shared(u32 at, float x) {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
    }
    XATTN_DEVICE static float load_shared_float(u32 at) {
        float x;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
        return x;
    }
    XATTN_DEVICE static void load_shared_floats(float (&x)[4], u32 at) {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(at)
                     : "memory");
    }

    // ---- between thread blocks; loads do not look into the first-level cache
    XATTN_DEVICE static void device_fence() { __threadfence(); }
    XATTN_DEVICE static u32 atomic_add(u32* at, u32 x) { return atomicAdd(at, x); }
    XATTN_DEVICE static void store_global(float* at, const float (&x)[4]) {
        asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                     : "memory");
    }
    XATTN_DEVICE static float load_fresh(const float* at) {
        float x;
        asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
        return x;
    }
    XATTN_DEVICE static void load_fresh(float (&x)[4], const float* at) {
        asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "l"(at)
                     : "memory");
    }

    // ---- matrices: four 8 x 8 of 16-bit elements; lane 8 m + r gives the address of row r of matrix m
    XATTN_DEVICE static void ldmatrix(u32 (&x)[4], u32 at) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at)
                     : "memory");
    }
    XATTN_DEVICE static void ldmatrix_trans(u32 (&x)[4], u32 at) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at)
                     : "memory");
    }
    XATTN_DEVICE static void mma(bf16, float* d, const u32* a, const u32* b) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
            "%1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    XATTN_DEVICE static void mma(fp16, float* d, const u32* a, const u32* b) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
            "%2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
};

}  // namespace xattn
