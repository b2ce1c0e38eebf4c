// Ampere and later without wgmma: mma.sync m16n8k16, ldmatrix, cp.async, behind the interface that the shared bodies
// use.
//
// Interface of an Arch (the same in arch/host and csrc_hip/arch/cdna):
//   kWarpSize, kRowsPerLane, kElements     lanes; rows of a 16 x 16 accumulator that a lane holds; elements that it
//   holds row_slot(e), row_of(lane, slot), col_of(lane, e)   which: element e lies in row row_of(lane, row_slot(e)),
//   column col_of(lane, e), one of kColsPerLane: col_slot(e), of which 2 n and 2 n + 1 are neighbours
//   OperandA (16 rows x 16), OperandB (16 keys x 16, or 16 keys x 16 channels),
//   Accumulator{x[kElements]} rows_pointer, keys_pointer, values_pointer, load_rows, load_keys, load_values   from a
//   tile in shared memory; multiply: acc += A B weights(acc) -> OperandA               a tile of weights as it stands
//   in the accumulator row_max, row_sum                       over the lanes that share a row; first_of_row(lane): one
//   lane of each row copy_async, copy_commit, copy_wait<n>, barrier, warp_barrier, any
//   narrow_keys_pointer, narrow_values_pointer, load_narrow_keys, load_narrow_values   two operands, of 32 columns,
//   from a tile of 8-bit floats, whose layout counts in pairs of them; copy_query: the rows that such keys are
//   multiplied by; narrow_col_of(lane, e): the column of an accumulator over such values
//
// The instructions themselves are an Isa (isa.h here, arch/host/isa_nvidia.h on the CPU), so that every address and
// lane map below runs in both places.
//
// Layouts: PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type": lane = 4 g + t holds accumulator rows
// g, g + 8 and columns 2t, 2t + 1 of each 8. A 16 x 16 accumulator is two of 16 x 8: elements 0-3 of the left, 4-7 of
// the right.
#pragma once

#include "kernels/arch_base.h"

namespace xattn {

template <class Isa>
struct Sm80 : ArchBase<Isa, 8, 1, 2> {
    using Base = ArchBase<Isa, 8, 1, 2>;
    using Base::kElements;
    using typename Base::Accumulator;
    using typename Base::Shared;
    static constexpr int kWarpSize = 32;
    static constexpr int kRowsPerLane = 2;
    static constexpr int kColsPerLane = 4;

    struct OperandA {
        u32 x[4];
    };
    struct OperandB {
        u32 x[4];  // [column half][k half]
    };

    XATTN_DEVICE static constexpr int row_slot(int e) { return (e >> 1) & 1; }
    XATTN_DEVICE static int row_of(int lane, int slot) { return (lane >> 2) + 8 * slot; }
    XATTN_DEVICE static int col_of(int lane, int e) { return 8 * (e >> 2) + 2 * (lane & 3) + (e & 1); }
    XATTN_DEVICE static constexpr int col_slot(int e) { return 2 * (e >> 2) + (e & 1); }
    XATTN_DEVICE static bool first_of_row(int lane) { return (lane & 3) == 0; }

    // ---- global to shared
    XATTN_DEVICE static void copy_async(Shared tile, u32 offset, const void* source, bool valid) {
        Isa::cp_async(tile + offset, source, valid);
    }
    XATTN_DEVICE static void copy_commit() { Isa::cp_async_commit(); }
    template <int n>
    XATTN_DEVICE static void copy_wait() {
        Isa::template cp_async_wait<n>();
    }

    // ---- shared to fragments: a pointer of the lane into a tile, and fragments at multiples of 16 from there
    template <class Layout>
    XATTN_DEVICE static Shared rows_pointer(Shared tile, int row, int lane) {
        return tile + row * Layout::width * 2 + Layout::chunk_at(lane & 15, (lane >> 4) * 8);
    }
    template <class Layout>
    XATTN_DEVICE static Shared keys_pointer(Shared tile, int lane) {
        return tile + Layout::chunk_at((lane >> 4) * 8 + (lane & 7), ((lane >> 3) & 1) * 8);
    }
    template <class Layout>
    XATTN_DEVICE static Shared values_pointer(Shared tile, int lane) {
        return tile + Layout::chunk_at(lane & 15, (lane >> 4) * 8);
    }
    template <class Layout>
    XATTN_DEVICE static OperandA load_rows(Shared pointer, int row, int col) {
        OperandA a;
        Isa::ldmatrix(a.x, Layout::moved(pointer, row, col));
        return a;
    }
    template <class Layout>
    XATTN_DEVICE static OperandB load_keys(Shared pointer, int key, int col) {
        OperandB b;
        Isa::ldmatrix(b.x, Layout::moved(pointer, key, col));
        return b;
    }
    template <class Layout>
    XATTN_DEVICE static OperandB load_values(Shared pointer, int key, int col) {
        OperandB b;
        Isa::ldmatrix_trans(b.x, Layout::moved(pointer, key, col));
        return b;
    }

    // ---- keys and values of 8 bits
    //
    // ldmatrix moves pairs of them as if each were an element. Of keys a lane then holds four columns side by side, 4t
    // to 4t + 3, where the product wants 2t, 2t + 1, 2t + 8, 2t + 9: the order of the columns is free, if rows have the
    // same. Of values, transposed, it holds two columns of two keys: column j of the product's left half is column 2j,
    // of its right half 2j + 1.
    //
    // Products are of fp16, whatever the elements are: what widens does so at a third of the cost of bf16.
    template <class Element>
    using NarrowProduct = fp16;
    XATTN_DEVICE static int narrow_col_of(int lane, int e) { return 4 * (lane & 3) + 2 * (e & 1) + (e >> 2); }
    template <class Layout>
    XATTN_DEVICE static Shared narrow_keys_pointer(Shared tile, int lane) {
        return keys_pointer<Layout>(tile, lane);
    }
    template <class Layout>
    XATTN_DEVICE static Shared narrow_values_pointer(Shared tile, int lane) {
        return values_pointer<Layout>(tile, lane);
    }
    // 16 elements of a row, from a multiple of 16 on: each pair of words goes to the two halves.
    template <class Layout>
    XATTN_DEVICE static void store_query(Shared tile, int row, int col, const u32 (&x)[8]) {
        XATTN_UNROLL
        for (int n = 0; n < 2; ++n)
            Isa::store_shared(tile + Layout::chunk_at(row, col + 8 * n), Chunk{{x[n], x[n + 2], x[n + 4], x[n + 6]}});
    }
    template <class Element, class Cache, class Layout>
    XATTN_DEVICE static void load_narrow_keys(OperandB (&b)[2], Shared pointer, int key, int col) {
        u32 x[4];
        Isa::ldmatrix(x, Layout::moved(pointer, key, col / 2));
        XATTN_UNROLL
        for (int i = 0; i < 4; ++i) {
            u32 two[2];
            Isa::widen(Element{}, Cache{}, x[i], two);
            b[i % 2].x[i / 2 * 2] = two[0], b[i % 2].x[i / 2 * 2 + 1] = two[1];
        }
    }
    template <class Element, class Cache, class Layout>
    XATTN_DEVICE static void load_narrow_values(OperandB (&b)[2], Shared pointer, int key, int col) {
        u32 x[4];
        Isa::ldmatrix_trans(x, Layout::moved(pointer, key, col / 2));
        XATTN_UNROLL
        for (int i = 0; i < 4; ++i) {
            u32 two[2];  // of the left column, and of the right one
            Isa::widen(Element{}, Cache{}, Isa::bytes(x[i], 0, 0x3120), two);
            b[i / 2].x[i % 2] = two[0], b[i / 2].x[2 + i % 2] = two[1];
        }
    }

    // ---- the product
    template <class Element>
    XATTN_DEVICE static void multiply(Accumulator& acc, const OperandA& a, const OperandB& b) {
        XATTN_UNROLL
        for (int half = 0; half < 2; ++half) Isa::mma(Element{}, acc.x + 4 * half, a.x, b.x + 2 * half);
    }
    template <class Element>
    XATTN_DEVICE static OperandA weights(const Accumulator& acc) {
        return {{Isa::pack(Element{}, acc.x[0], acc.x[1]), Isa::pack(Element{}, acc.x[2], acc.x[3]),
                 Isa::pack(Element{}, acc.x[4], acc.x[5]), Isa::pack(Element{}, acc.x[6], acc.x[7])}};
    }

    // ---- the output
    template <class Element, class Layout>
    XATTN_DEVICE static void store_rows(Shared tile, const Accumulator& acc, int row, int col, int lane) {
        XATTN_UNROLL
        for (int e = 0; e < kElements; e += 2) {
            const u32 at =
                tile + Layout::chunk_at(row + row_of(lane, row_slot(e)), col + 8 * (e >> 2)) + 4 * (lane & 3);
            Isa::store_shared(at, Isa::pack(Element{}, acc.x[e], acc.x[e + 1]));
        }
    }
    XATTN_DEVICE static void store_chunk(u16* target, Shared tile, u32 offset) {
        *reinterpret_cast<Chunk*>(target) = Isa::load_shared(tile + offset);
    }
};

}  // namespace xattn
