// Tiles of 16-bit rows in shared memory: panels of 64 (or 32) elements, 16-byte chunks permuted within each row so that
// neither reading matrix fragments nor writing rows meets a bank twice.
//
//   element (row, col) of a tile of `rows` rows lies in panel col / width, row `row`, chunk ((col % width) / 8) ^
//   swizzle(row)
#pragma once

#include "kernels/params.h"

namespace xattn {

template <int kRows, int kCols>
struct TileLayout {
    static constexpr int width = kCols % 64 == 0 ? 64 : 32;
    static constexpr int chunks = width / 8;  // of a panel's row
    static constexpr int bytes = kRows * kCols * 2;
    static_assert(kCols % 32 == 0, "head dimensions are padded to multiples of 32");

    // Byte offset of the 16-byte chunk that holds columns [col, col + 8).
    XATTN_DEVICE static constexpr u32 chunk_at(int row, int col) {
        const int panel = col / width, chunk = (col % width) / 8;
        const int swizzle = chunks == 8 ? row & 7 : (row >> 1) & 3;
        return u32((panel * kRows + row) * width * 2 + ((chunk ^ swizzle) << 4));
    }

    // What `address` must become, beside being moved down, for the chunk `i` rows (below 4) under one whose row is a
    // multiple of 4.
    XATTN_DEVICE static constexpr u32 below(u32 address, int i) {
        return address ^ u32((chunks == 8 ? i : i >> 1) << 4);
    }

    // What the address of a chunk whose column is a multiple of 16 must become for the next one.
    XATTN_DEVICE static constexpr u32 beside(u32 address) { return address ^ 16u; }

    // The address `row` rows below and `col` columns right of the chunk at `address`, for multiples of 16 that stay
    // within the tile where the chunk's own row is below 16 and its column below 16: one exclusive or and a constant,
    // since the tile is aligned to its rows' bytes.
    XATTN_DEVICE static constexpr u32 moved(u32 address, int row, int col) {
        return (address ^ u32((col % width / 8) << 4)) + u32((col / width * kRows + row) * width * 2);
    }
};

// A thread's part in copying tiles of kRows rows of a matrix: 16-byte chunks of one column, kStep rows apart. Rows from
// `valid_rows` on and columns from `valid_cols` on become 0. Every thread of the block takes part; the copies are those
// of Arch::copy_async.
template <class Arch, int kThreads, int kRows, int kCols>
struct TileCopy {
    using Layout = TileLayout<kRows, kCols>;
    static constexpr int kPerRow = kCols / 8;
    static constexpr int kFit = kThreads / kPerRow;
    static constexpr int kStep = kFit >= 8 ? kFit / 8 * 8 : 4;  // rows that the threads copy at once
    static constexpr int kActive = kStep * kPerRow;             // threads that copy

    static_assert(kFit >= 4, "at least 4 rows at once: then the swizzle of a thread's rows differs in one bit at most");
    const u16* source;  // this thread's first chunk of the next tile
    s32 row_stride;     // the host copies what has longer rows
    u32 target;         // its place in the tile
    int row;            // kRows where it copies nothing
    bool in_cols;

    XATTN_DEVICE TileCopy(const u16* data, const Operand& x, s32 row0, s32 valid_cols, int thread)
        : row_stride(s32(x.row_stride)) {
        const int col = thread % kPerRow * 8;
        row = thread < kActive ? thread / kPerRow : kRows;
        source = data + (row0 + row) * x.row_stride + col;
        target = Layout::chunk_at(row, col);
        in_cols = col < valid_cols;
    }

    // Starts copying the tile, of whose rows the first `valid_rows` exist.
    XATTN_DEVICE void start(typename Arch::Shared tile, s32 valid_rows) const {
        const s32 stride = Arch::fresh(row_stride);
        const s32 left = in_cols ? valid_rows - row : 0;  // rows that exist from this thread's first on
        XATTN_UNROLL
        for (int r = 0; r < kRows; r += kStep) {
            if (ends(r)) break;
            Arch::copy_async(tile, target_at(r), source + s64(r) * stride, r < left);
        }
    }

    // Of this thread's row r below its first: whether it lies behind the tile, and its place in it.
    XATTN_DEVICE bool ends(int r) const { return (kActive != kThreads || kRows % kStep != 0) && row + r >= kRows; }
    XATTN_DEVICE u32 target_at(int r) const {
        const u32 turn = kStep == 4 ? (r & 4) * (Layout::chunks == 8 ? 16 : 8) : 0;
        return (target ^ turn) + r * Layout::width * 2;
    }
    XATTN_DEVICE void move(s32 rows) { source += s64(rows) * row_stride; }
};

}  // namespace xattn
