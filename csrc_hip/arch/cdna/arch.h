// CDNA: MFMA 16x16x16, the plain baseline. The interface is that of csrc_cuda/arch/sm80/arch.h.
//
// The products are swapped, S^T = K Q^T and O^T = V^T P^T: a lane then owns one query (column lane % 16 of the result),
// the softmax of a row is almost all in the lane, and the weights are an operand as they stand.
//
// Layouts of v_mfma_f32_16x16x16 (AMD CDNA3 ISA, "Dense matrix fused multiply-add"): lane l, element i of 4: operand A
// row l % 16, k 4 (l / 16) + i; operand B column l % 16, the same k; result row 4 (l / 16) + i, column l % 16.
#pragma once

#include "kernels/arch_base.h"

namespace xattn {

template <class Isa>
struct Cdna : ArchBase<Isa, 4, 16, 32> {
    using Base = ArchBase<Isa, 4, 16, 32>;
    using Base::kElements;
    using typename Base::Accumulator;
    using typename Base::Shared;
    static constexpr int kWarpSize = 64;
    static constexpr int kRowsPerLane = 1;
    static constexpr int kColsPerLane = 4;

    struct OperandA {
        u32 x[2];
    };
    struct OperandB {
        u32 x[2];
    };

    XATTN_DEVICE static constexpr int row_slot(int) { return 0; }
    XATTN_DEVICE static int row_of(int lane, int) { return lane & 15; }
    XATTN_DEVICE static int col_of(int lane, int e) { return 4 * (lane >> 4) + e; }
    XATTN_DEVICE static constexpr int col_slot(int e) { return e; }
    XATTN_DEVICE static bool first_of_row(int lane) { return lane < 16; }

    // ---- global to shared: through registers, at once
    XATTN_DEVICE static void copy_async(Shared tile, u32 offset, const void* source, bool valid) {
        Chunk c{};
        // Word by word here and in the Isa: a chunk copied whole goes through scratch memory (clang 22).
        if (valid) {
            XATTN_UNROLL
            for (int i = 0; i < 4; ++i) c.word[i] = static_cast<const Chunk*>(source)->word[i];
        }
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

    // ---- keys and values of 8 bits, in the order of those of 16
    template <class Element>
    using NarrowProduct = Element;
    XATTN_DEVICE static int narrow_col_of(int lane, int e) { return col_of(lane, e); }
    template <class Layout>
    XATTN_DEVICE static Shared narrow_keys_pointer(Shared tile, int lane) {
        return tile + Layout::chunk_at(lane & 15, 0) + 4 * (lane >> 4);
    }
    template <class Layout>
    XATTN_DEVICE static Shared narrow_values_pointer(Shared tile, int lane) {
        return tile + Layout::chunk_at(4 * (lane >> 4), 0) + (lane & 15);
    }
    template <class Layout>
    XATTN_DEVICE static void store_query(Shared tile, int row, int col, const u32 (&x)[8]) {
        XATTN_UNROLL
        for (int n = 0; n < 8; n += 4)
            Isa::store_shared(tile + Layout::chunk_at(row, col + 2 * n), Chunk{{x[n], x[n + 1], x[n + 2], x[n + 3]}});
    }
    template <class Element, class Cache, class Layout>
    XATTN_DEVICE static void load_narrow_keys(OperandB (&b)[2], Shared pointer, int key, int col) {
        const Shared at = Layout::moved(pointer, key, col / 2);
        Isa::widen(Element{}, Cache{}, Isa::load_shared32(at), b[0].x);
        Isa::widen(Element{}, Cache{}, Isa::load_shared32(Layout::beside(at)), b[1].x);
    }
    template <class Element, class Cache, class Layout>
    XATTN_DEVICE static void load_narrow_values(OperandB (&b)[2], Shared pointer, int key, int col) {
        u32 words[2] = {};
        XATTN_UNROLL
        for (int i = 0; i < 4; ++i) {
            const Shared at = Layout::moved(Layout::below(pointer, i), key, col / 2) + i * Layout::width * 2;
            words[0] |= Isa::load_shared8(at) << (8 * i);
            words[1] |= Isa::load_shared8(Layout::beside(at)) << (8 * i);
        }
        XATTN_UNROLL
        for (int n = 0; n < 2; ++n) Isa::widen(Element{}, Cache{}, words[n], b[n].x);
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

  private:
    // Row lane % 16, elements 4 (lane / 16) .. + 3.
    template <class Layout>
    XATTN_DEVICE static u32 quarter(int lane) {
        return Layout::chunk_at(lane & 15, 8 * (lane >> 5)) + 8 * ((lane >> 4) & 1);
    }
};

}  // namespace xattn
