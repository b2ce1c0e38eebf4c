// CDNA: MFMA 16x16x16, the plain baseline. The interface is that of csrc_cuda/arch/sm80/arch.h.
//
// The products are swapped, S^T = K Q^T and O^T = V^T P^T: a lane then owns one query (column lane % 16 of the result),
// the softmax of a row is almost all in the lane, and the weights are an operand as they stand.
//
// Layouts of v_mfma_f32_16x16x16 (AMD CDNA3 ISA, "Dense matrix fused multiply-add"): lane l, element i of 4: operand A
// row l % 16, k 4 (l / 16) + i; operand B column l % 16, the same k; result row 4 (l / 16) + i, column l % 16.
#pragma once

#include "kernels/platform.h"

namespace xattn {

template <class Isa>
struct Cdna {
    static constexpr int kWarpSize = 64;
    static constexpr int kRowsPerLane = 1;
    static constexpr int kElements = 4;
    using Shared = u32;

    struct OperandA {
        u32 x[2];
    };
    struct OperandB {
        u32 x[2];
    };
    struct Accumulator {
        float x[kElements];
        XATTN_DEVICE void clear() {
            XATTN_UNROLL
            for (int e = 0; e < kElements; ++e) x[e] = 0.0f;
        }
    };

    XATTN_DEVICE static constexpr int row_slot(int) { return 0; }
    XATTN_DEVICE static int row_of(int lane, int) { return lane & 15; }
    XATTN_DEVICE static int col_of(int lane, int e) { return 4 * (lane >> 4) + e; }
    XATTN_DEVICE static bool first_of_row(int lane) { return lane < 16; }

    XATTN_DEVICE static int thread_index() { return Isa::thread_index(); }
    XATTN_DEVICE static u32 block_index() { return Isa::block_index(); }
    XATTN_DEVICE static void barrier() { Isa::barrier(); }
    XATTN_DEVICE static void warp_barrier() { Isa::warp_barrier(); }
    XATTN_DEVICE static bool any(bool x) { return Isa::any(x); }
    XATTN_DEVICE static s32 fresh(s32 x) { return Isa::fresh(x); }

    XATTN_DEVICE static float infinity() { return Isa::infinity(); }
    XATTN_DEVICE static float fma(float a, float b, float c) { return Isa::fma(a, b, c); }
    XATTN_DEVICE static float exp2(float x) { return Isa::exp2(x); }
    XATTN_DEVICE static float log2(float x) { return Isa::log2(x); }
    XATTN_DEVICE static float tanh(float x) {
        const float e = exp2(-2.0f * kLog2e * (x < 0.0f ? -x : x));
        const float y = Isa::divide(1.0f - e, 1.0f + e);
        return x < 0.0f ? -y : y;
    }
    XATTN_DEVICE static float row_max(float x) {
        x = max_of(x, Isa::shuffle_xor(x, 16));
        return max_of(x, Isa::shuffle_xor(x, 32));
    }
    XATTN_DEVICE static float row_sum(float x) {
        x += Isa::shuffle_xor(x, 16);
        return x + Isa::shuffle_xor(x, 32);
    }

    // ---- global to shared: through registers, at once
    XATTN_DEVICE static void copy_async(Shared tile, u32 offset, const u16* source, bool valid) {
        Chunk c{};
        if (valid) c = *reinterpret_cast<const Chunk*>(source);
        Isa::store_shared(tile + offset, c);
    }
    XATTN_DEVICE static void copy_commit() {}
    template <int n>
    XATTN_DEVICE static void copy_wait() {}

    // ---- shared to fragments
    template <class Layout>
    XATTN_DEVICE static Shared rows_pointer(Shared tile, int row, int lane) {
        return tile + row * Layout::width * 2 + quarter<Layout>(lane);
    }
    template <class Layout>
    XATTN_DEVICE static Shared keys_pointer(Shared tile, int lane) {
        return tile + quarter<Layout>(lane);
    }
    template <class Layout>
    XATTN_DEVICE static Shared values_pointer(Shared tile, int lane) {
        return tile + Layout::chunk_at(4 * (lane >> 4), lane & 8) + 2 * (lane & 7);
    }
    template <class Layout>
    XATTN_DEVICE static OperandA load_rows(Shared pointer, int row, int col) {
        OperandA a;
        Isa::load_shared(a.x, Layout::moved(pointer, row, col));
        return a;
    }
    template <class Layout>
    XATTN_DEVICE static OperandB load_keys(Shared pointer, int key, int col) {
        OperandB b;
        Isa::load_shared(b.x, Layout::moved(pointer, key, col));
        return b;
    }
    // Four keys of one channel: a column of the tile.
    template <class Layout>
    XATTN_DEVICE static OperandB load_values(Shared pointer, int key, int col) {
        u32 x[4];
        XATTN_UNROLL
        for (int i = 0; i < 4; ++i)
            x[i] = Isa::load_shared16(Layout::moved(Layout::below(pointer, i), key, col) + i * Layout::width * 2);
        return {{x[0] | x[1] << 16, x[2] | x[3] << 16}};
    }

    // ---- the product
    template <class Element>
    XATTN_DEVICE static void multiply(Accumulator& acc, const OperandA& rows, const OperandB& keys) {
        Isa::mfma_16x16x16(Element{}, acc.x, keys.x, rows.x);
    }
    template <class Element>
    XATTN_DEVICE static OperandA weights(const Accumulator& acc) {
        return {{Isa::pack(Element{}, acc.x[0], acc.x[1]), Isa::pack(Element{}, acc.x[2], acc.x[3])}};
    }

    // ---- the output
    template <class Element, class Layout>
    XATTN_DEVICE static void store_rows(Shared tile, const Accumulator& acc, int row, int col, int lane) {
        const u32 at = tile + Layout::chunk_at(row + (lane & 15), col + 8 * (lane >> 5)) + 8 * ((lane >> 4) & 1);
        Isa::store_shared(at, Isa::pack(Element{}, acc.x[0], acc.x[1]));
        Isa::store_shared(at + 4, Isa::pack(Element{}, acc.x[2], acc.x[3]));
    }
    XATTN_DEVICE static void store_chunk(u16* target, Shared tile, u32 offset) {
        *reinterpret_cast<Chunk*>(target) = Isa::load_shared_chunk(tile + offset);
    }

    template <class Element>
    XATTN_DEVICE static float to_float(u16 bits) {
        return Isa::widen(Element{bits});
    }

  private:
    // Row lane % 16, elements 4 (lane / 16) .. + 3.
    template <class Layout>
    XATTN_DEVICE static u32 quarter(int lane) {
        return Layout::chunk_at(lane & 15, 8 * (lane >> 5)) + 8 * ((lane >> 4) & 1);
    }
};

}  // namespace xattn
