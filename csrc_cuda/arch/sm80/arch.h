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
    XATTN_DEVICE static void copy_async(Shared tile, u32 offset, const u16* source, bool valid) {
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
