// wgmma: the asynchronous matrix product of a warpgroup. acc (64 x n, float32) += A (64 x 16) B (16 x n) in 16-bit
// elements, or A (64 x 32) B (32 x n) in 8-bit ones, B in shared memory, A in shared memory or registers. PTX ISA,
// "wgmma.mma_async". In bytes, 8-bit operands lie as 16-bit ones do; B has its sums along its rows always.
//
// A warp's 16 rows of the accumulator lie in its lanes as two mma.m16n8k16 accumulators do, 16 columns to an
// Accumulator, and A in registers as its operand A: arch/sm80/arch.h states both.
#pragma once

#include "arch/sm80/arch.h"
#include "arch/sm80/isa.h"

namespace xattn {

using Accumulator = Sm80<IsaSm80>::Accumulator;
using OperandA = Sm80<IsaSm80>::OperandA;

// A matrix in shared memory, in panels of 64 columns whose rows are 128 bytes, swizzled as TMA does (128B). Addresses
// count in 16 bytes.
struct Matrix {
    u64 descriptor;
    static constexpr u64 kSwizzle128 = u64(1) << 62;

    // Rows of the matrix are rows of the product (Q, K): the next 8 rows lie 1024 bytes on.
    XATTN_DEVICE static Matrix rows(u32 address) {
        return {kSwizzle128 | u64(1024 >> 4) << 32 | u64(1) << 16 | address >> 4};
    }
    // Rows of the matrix are summed over (V): the next 64 columns lie a panel on.
    XATTN_DEVICE static Matrix summed(u32 address, u32 panel_bytes) {
        return {kSwizzle128 | u64(1024 >> 4) << 32 | u64(panel_bytes >> 4) << 16 | address >> 4};
    }
    XATTN_DEVICE Matrix moved(u32 bytes) const { return {descriptor + (bytes >> 4)}; }
};

XATTN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
XATTN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int n>
XATTN_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}

// Nothing moves accumulators across this line: they are written behind the compiler's back.
template <int n>
XATTN_DEVICE void hold(Accumulator (&acc)[n]) {
    XATTN_UNROLL
    for (int k = 0; k < n; ++k) XATTN_UNROLL
    for (int e = 0; e < 8; ++e) asm volatile("" : "+f"(acc[k].x[e])::"memory");
}

// What accumulators held is not wanted any more: a product that overwrites them is issued behind this line.
template <int n>
XATTN_DEVICE void renew(Accumulator (&acc)[n]) {
    XATTN_UNROLL
    for (int k = 0; k < n; ++k) XATTN_UNROLL
    for (int e = 0; e < 8; ++e) asm volatile("" : "=f"(acc[k].x[e])::"memory");
}
template <int n>
XATTN_DEVICE void hold(OperandA (&a)[n]) {
    XATTN_UNROLL
    for (int k = 0; k < n; ++k) XATTN_UNROLL
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[k].x[i])::"memory");
}

// Wgmma<Element, n>::ss(acc, a, b, add) and ::rs<transposed>(acc, a, b, add); add 0: acc = A B. ss_summed: rows of b
// are summed over.
template <class Element, int n>
struct Wgmma;

#define XATTN_REGS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define XATTN_REGS_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define XATTN_REGS_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define XATTN_REGS_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define XATTN_REGS_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define XATTN_REGS_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define XATTN_REGS_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define XATTN_REGS_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define XATTN_REGS_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define XATTN_REGS_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define XATTN_REGS_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define XATTN_REGS_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define XATTN_REGS_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define XATTN_REGS_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define XATTN_REGS_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define XATTN_REGS_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define XATTN_ACC(k)                                                                                      \
    "+f"(d[k].x[0]), "+f"(d[k].x[1]), "+f"(d[k].x[2]), "+f"(d[k].x[3]), "+f"(d[k].x[4]), "+f"(d[k].x[5]), \
        "+f"(d[k].x[6]), "+f"(d[k].x[7])

// n columns; the type's name; the registers of the accumulator as text and as operands; the numbers of what follows.
#define XATTN_WGMMA(ELEMENT, N, TYPE, TEXT, ACCUMULATORS, A0, A1, A2, A3, A4, A5)                            \
    template <>                                                                                              \
    struct Wgmma<ELEMENT, N> {                                                                               \
        XATTN_DEVICE static void ss(Accumulator (&d)[N / 16], Matrix a, Matrix b, s32 add) {                 \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " A2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                         "k16.f32." TYPE "." TYPE " {" TEXT "}, " A0 ", " A1 ", p, 1, 1, 0, 0;\n}"           \
                         : ACCUMULATORS                                                                      \
                         : "l"(a.descriptor), "l"(b.descriptor), "r"(add));                                  \
        }                                                                                                    \
        XATTN_DEVICE static void ss_summed(Accumulator (&d)[N / 16], Matrix a, Matrix b, s32 add) {          \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " A2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                         "k16.f32." TYPE "." TYPE " {" TEXT "}, " A0 ", " A1 ", p, 1, 1, 0, 1;\n}"           \
                         : ACCUMULATORS                                                                      \
                         : "l"(a.descriptor), "l"(b.descriptor), "r"(add));                                  \
        }                                                                                                    \
        template <int transposed>                                                                            \
        XATTN_DEVICE static void rs(Accumulator (&d)[N / 16], const OperandA& a, Matrix b, s32 add) {        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " A5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                         "k16.f32." TYPE "." TYPE " {" TEXT "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " A4       \
                         ", p, 1, 1, %" XATTN_TRANSPOSED_##N ";\n}"                                          \
                         : ACCUMULATORS                                                                      \
                         : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "l"(b.descriptor), "r"(add),  \
                           "n"(transposed));                                                                 \
        }                                                                                                    \
    };
// The same in 8-bit elements.
#define XATTN_WGMMA_NARROW(N, TEXT, ACCUMULATORS, A0, A1, A2, A3, A4, A5)                                      \
    template <>                                                                                                \
    struct Wgmma<e4m3, N> {                                                                                    \
        XATTN_DEVICE static void ss(Accumulator (&d)[N / 16], Matrix a, Matrix b, s32 add) {                   \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " A2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N   \
                         "k32.f32.e4m3.e4m3 {" TEXT "}, " A0 ", " A1 ", p, 1, 1;\n}"                           \
                         : ACCUMULATORS                                                                        \
                         : "l"(a.descriptor), "l"(b.descriptor), "r"(add));                                    \
        }                                                                                                      \
        XATTN_DEVICE static void rs(Accumulator (&d)[N / 16], const OperandA& a, Matrix b, s32 add) {          \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " A5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N   \
                         "k32.f32.e4m3.e4m3 {" TEXT "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " A4 ", p, 1, 1;\n}" \
                         : ACCUMULATORS                                                                        \
                         : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "l"(b.descriptor), "r"(add));   \
        }                                                                                                      \
    };
#define XATTN_TRANSPOSED_64 "38"
#define XATTN_TRANSPOSED_80 "46"
#define XATTN_TRANSPOSED_96 "54"
#define XATTN_TRANSPOSED_112 "62"
#define XATTN_TRANSPOSED_128 "70"
#define XATTN_TRANSPOSED_160 "86"
#define XATTN_TRANSPOSED_176 "94"
#define XATTN_TRANSPOSED_192 "102"
#define XATTN_TRANSPOSED_256 "134"
#define XATTN_TEXT_64 XATTN_REGS_0 ", " XATTN_REGS_1 ", " XATTN_REGS_2 ", " XATTN_REGS_3
#define XATTN_ACC_64 XATTN_ACC(0), XATTN_ACC(1), XATTN_ACC(2), XATTN_ACC(3)
#define XATTN_TEXT_80 XATTN_REGS_0 ", " XATTN_REGS_1 ", " XATTN_REGS_2 ", " XATTN_REGS_3 ", " XATTN_REGS_4
#define XATTN_ACC_80 XATTN_ACC(0), XATTN_ACC(1), XATTN_ACC(2), XATTN_ACC(3), XATTN_ACC(4)
#define XATTN_TEXT_96 \
    XATTN_REGS_0 ", " XATTN_REGS_1 ", " XATTN_REGS_2 ", " XATTN_REGS_3 ", " XATTN_REGS_4 ", " XATTN_REGS_5
#define XATTN_ACC_96 XATTN_ACC(0), XATTN_ACC(1), XATTN_ACC(2), XATTN_ACC(3), XATTN_ACC(4), XATTN_ACC(5)
#define XATTN_TEXT_112                                                                                     \
    XATTN_REGS_0 ", " XATTN_REGS_1 ", " XATTN_REGS_2 ", " XATTN_REGS_3 ", " XATTN_REGS_4 ", " XATTN_REGS_5 \
                 ", " XATTN_REGS_6
#define XATTN_ACC_112 XATTN_ACC(0), XATTN_ACC(1), XATTN_ACC(2), XATTN_ACC(3), XATTN_ACC(4), XATTN_ACC(5), XATTN_ACC(6)
#define XATTN_TEXT_128                                                                                     \
    XATTN_REGS_0 ", " XATTN_REGS_1 ", " XATTN_REGS_2 ", " XATTN_REGS_3 ", " XATTN_REGS_4 ", " XATTN_REGS_5 \
                 ", " XATTN_REGS_6 ", " XATTN_REGS_7
#define XATTN_ACC_128 \
    XATTN_ACC(0), XATTN_ACC(1), XATTN_ACC(2), XATTN_ACC(3), XATTN_ACC(4), XATTN_ACC(5), XATTN_ACC(6), XATTN_ACC(7)
#define XATTN_TEXT_160                                                                                     \
    XATTN_REGS_0 ", " XATTN_REGS_1 ", " XATTN_REGS_2 ", " XATTN_REGS_3 ", " XATTN_REGS_4 ", " XATTN_REGS_5 \
                 ", " XATTN_REGS_6 ", " XATTN_REGS_7 ", " XATTN_REGS_8 ", " XATTN_REGS_9
#define XATTN_ACC_160                                                                                               \
    XATTN_ACC(0), XATTN_ACC(1), XATTN_ACC(2), XATTN_ACC(3), XATTN_ACC(4), XATTN_ACC(5), XATTN_ACC(6), XATTN_ACC(7), \
        XATTN_ACC(8), XATTN_ACC(9)
#define XATTN_TEXT_176                                                                                     \
    XATTN_REGS_0 ", " XATTN_REGS_1 ", " XATTN_REGS_2 ", " XATTN_REGS_3 ", " XATTN_REGS_4 ", " XATTN_REGS_5 \
                 ", " XATTN_REGS_6 ", " XATTN_REGS_7 ", " XATTN_REGS_8 ", " XATTN_REGS_9 ", " XATTN_REGS_10
#define XATTN_ACC_176                                                                                               \
    XATTN_ACC(0), XATTN_ACC(1), XATTN_ACC(2), XATTN_ACC(3), XATTN_ACC(4), XATTN_ACC(5), XATTN_ACC(6), XATTN_ACC(7), \
        XATTN_ACC(8), XATTN_ACC(9), XATTN_ACC(10)
#define XATTN_TEXT_192                                                                                      \
    XATTN_REGS_0 ", " XATTN_REGS_1 ", " XATTN_REGS_2 ", " XATTN_REGS_3 ", " XATTN_REGS_4 ", " XATTN_REGS_5  \
                 ", " XATTN_REGS_6 ", " XATTN_REGS_7 ", " XATTN_REGS_8 ", " XATTN_REGS_9 ", " XATTN_REGS_10 \
                 ", " XATTN_REGS_11
#define XATTN_ACC_192                                                                                               \
    XATTN_ACC(0), XATTN_ACC(1), XATTN_ACC(2), XATTN_ACC(3), XATTN_ACC(4), XATTN_ACC(5), XATTN_ACC(6), XATTN_ACC(7), \
        XATTN_ACC(8), XATTN_ACC(9), XATTN_ACC(10), XATTN_ACC(11)
#define XATTN_TEXT_224                                                                                      \
    XATTN_REGS_0 ", " XATTN_REGS_1 ", " XATTN_REGS_2 ", " XATTN_REGS_3 ", " XATTN_REGS_4 ", " XATTN_REGS_5  \
                 ", " XATTN_REGS_6 ", " XATTN_REGS_7 ", " XATTN_REGS_8 ", " XATTN_REGS_9 ", " XATTN_REGS_10 \
                 ", " XATTN_REGS_11 ", " XATTN_REGS_12 ", " XATTN_REGS_13
#define XATTN_ACC_224                                                                                               \
    XATTN_ACC(0), XATTN_ACC(1), XATTN_ACC(2), XATTN_ACC(3), XATTN_ACC(4), XATTN_ACC(5), XATTN_ACC(6), XATTN_ACC(7), \
        XATTN_ACC(8), XATTN_ACC(9), XATTN_ACC(10), XATTN_ACC(11), XATTN_ACC(12), XATTN_ACC(13)
#define XATTN_TEXT_256                                                                                      \
    XATTN_REGS_0 ", " XATTN_REGS_1 ", " XATTN_REGS_2 ", " XATTN_REGS_3 ", " XATTN_REGS_4 ", " XATTN_REGS_5  \
                 ", " XATTN_REGS_6 ", " XATTN_REGS_7 ", " XATTN_REGS_8 ", " XATTN_REGS_9 ", " XATTN_REGS_10 \
                 ", " XATTN_REGS_11 ", " XATTN_REGS_12 ", " XATTN_REGS_13 ", " XATTN_REGS_14 ", " XATTN_REGS_15
#define XATTN_ACC_256                                                                                               \
    XATTN_ACC(0), XATTN_ACC(1), XATTN_ACC(2), XATTN_ACC(3), XATTN_ACC(4), XATTN_ACC(5), XATTN_ACC(6), XATTN_ACC(7), \
        XATTN_ACC(8), XATTN_ACC(9), XATTN_ACC(10), XATTN_ACC(11), XATTN_ACC(12), XATTN_ACC(13), XATTN_ACC(14),      \
        XATTN_ACC(15)

XATTN_WGMMA(bf16, 64, "bf16", XATTN_TEXT_64, XATTN_ACC_64, "%32", "%33", "%34", "%35", "%36", "%37")
XATTN_WGMMA(fp16, 64, "f16", XATTN_TEXT_64, XATTN_ACC_64, "%32", "%33", "%34", "%35", "%36", "%37")
XATTN_WGMMA(bf16, 80, "bf16", XATTN_TEXT_80, XATTN_ACC_80, "%40", "%41", "%42", "%43", "%44", "%45")
XATTN_WGMMA(fp16, 80, "f16", XATTN_TEXT_80, XATTN_ACC_80, "%40", "%41", "%42", "%43", "%44", "%45")
XATTN_WGMMA(bf16, 96, "bf16", XATTN_TEXT_96, XATTN_ACC_96, "%48", "%49", "%50", "%51", "%52", "%53")
XATTN_WGMMA(fp16, 96, "f16", XATTN_TEXT_96, XATTN_ACC_96, "%48", "%49", "%50", "%51", "%52", "%53")
XATTN_WGMMA(bf16, 112, "bf16", XATTN_TEXT_112, XATTN_ACC_112, "%56", "%57", "%58", "%59", "%60", "%61")
XATTN_WGMMA(fp16, 112, "f16", XATTN_TEXT_112, XATTN_ACC_112, "%56", "%57", "%58", "%59", "%60", "%61")
XATTN_WGMMA(bf16, 128, "bf16", XATTN_TEXT_128, XATTN_ACC_128, "%64", "%65", "%66", "%67", "%68", "%69")
XATTN_WGMMA(fp16, 128, "f16", XATTN_TEXT_128, XATTN_ACC_128, "%64", "%65", "%66", "%67", "%68", "%69")
XATTN_WGMMA(bf16, 160, "bf16", XATTN_TEXT_160, XATTN_ACC_160, "%80", "%81", "%82", "%83", "%84", "%85")
XATTN_WGMMA(fp16, 160, "f16", XATTN_TEXT_160, XATTN_ACC_160, "%80", "%81", "%82", "%83", "%84", "%85")
XATTN_WGMMA(bf16, 176, "bf16", XATTN_TEXT_176, XATTN_ACC_176, "%88", "%89", "%90", "%91", "%92", "%93")
XATTN_WGMMA(fp16, 176, "f16", XATTN_TEXT_176, XATTN_ACC_176, "%88", "%89", "%90", "%91", "%92", "%93")
XATTN_WGMMA(bf16, 192, "bf16", XATTN_TEXT_192, XATTN_ACC_192, "%96", "%97", "%98", "%99", "%100", "%101")
XATTN_WGMMA(fp16, 192, "f16", XATTN_TEXT_192, XATTN_ACC_192, "%96", "%97", "%98", "%99", "%100", "%101")
XATTN_WGMMA(bf16, 256, "bf16", XATTN_TEXT_256, XATTN_ACC_256, "%128", "%129", "%130", "%131", "%132", "%133")
XATTN_WGMMA(fp16, 256, "f16", XATTN_TEXT_256, XATTN_ACC_256, "%128", "%129", "%130", "%131", "%132", "%133")

XATTN_WGMMA_NARROW(64, XATTN_TEXT_64, XATTN_ACC_64, "%32", "%33", "%34", "%35", "%36", "%37")
XATTN_WGMMA_NARROW(96, XATTN_TEXT_96, XATTN_ACC_96, "%48", "%49", "%50", "%51", "%52", "%53")
XATTN_WGMMA_NARROW(128, XATTN_TEXT_128, XATTN_ACC_128, "%64", "%65", "%66", "%67", "%68", "%69")
XATTN_WGMMA_NARROW(160, XATTN_TEXT_160, XATTN_ACC_160, "%80", "%81", "%82", "%83", "%84", "%85")
XATTN_WGMMA_NARROW(192, XATTN_TEXT_192, XATTN_ACC_192, "%96", "%97", "%98", "%99", "%100", "%101")
XATTN_WGMMA_NARROW(224, XATTN_TEXT_224, XATTN_ACC_224, "%112", "%113", "%114", "%115", "%116", "%117")
XATTN_WGMMA_NARROW(256, XATTN_TEXT_256, XATTN_ACC_256, "%128", "%129", "%130", "%131", "%132", "%133")

// A tile of weights as 8-bit operand A of 32 keys, which are those of two accumulators in another order: of 16 keys,
// operand byte 4 t + i is key 2 t + i for i < 2, else 8 + 2 t + i - 2. V is laid out accordingly (transpose.h).
XATTN_DEVICE u32 narrow_weights(float a, float b, float c, float d) {
    u32 x;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(x)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return x;
}
XATTN_DEVICE OperandA narrow_weights(const Accumulator& first, const Accumulator& second) {
    OperandA a;
    XATTN_UNROLL
    for (int i = 0; i < 4; ++i) {
        const float* x = (i < 2 ? first : second).x + 2 * (i % 2);
        a.x[i] = narrow_weights(x[0], x[1], x[4], x[5]);
    }
    return a;
}

}  // namespace xattn
