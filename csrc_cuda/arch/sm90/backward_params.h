// What Hopper's backward kernels are told, and where a tile of queries has what they tell each other.
//
// Three launches. The first (backward_rows.h) makes of every row what its scores' gradients need, and clears the sums;
// the second (backward.h) makes dk and dv and adds to the sums what each tile of keys brings to dq; the last
// (backward_queries.h) rounds the sums to dq.
#pragma once

#include "arch/sm90/tma.h"
#include "arch/sm90/wgmma.h"
#include "kernels/backward_params.h"
#include "kernels/sequence.h"

namespace xattn {

struct Sm90BackwardParams {
    TensorMap q, k, v, dout;  // (head_dim, row, head, sequence); boxes of 128 bytes and the rows of a tile
    BackwardParams b;
    // Tiles of queries: of each sequence and head one after the other, from a boundary on. See QueryTile.
    float* numbers;
    float* sums;
    s32 head_tiles;  // of a head, in all sequences where q is packed, otherwise in one
    s32 tiles;       // places for tiles of queries; behind their numbers stands how many tiles of keys are taken
    s32 key_tiles;
};

// kTileM queries of a head. Their numbers are lse, in log2, and then delta, each in the order of `number_of`; a row
// that is not there, or that sees no key, has lse +infinity and delta 0. Their sums are dq but for softmax_scale, in
// float32, as the lanes of two warpgroups hold it (backward.h): 16 bytes of a lane beside those of its neighbour.
template <int kTileM, int kWidth>
struct QueryTile {
    static constexpr int kNumbers = 2 * kTileM, kSums = kTileM * kWidth;

    // The first of a sequence and head.
    XATTN_DEVICE static s64 first(const Sm90BackwardParams& params, const Sequence& seq, s32 sequence, s32 head) {
        const ForwardParams& p = params.b.p;
        if (p.cu_seqlens_q) return s64(head) * params.head_tiles + seq.start_q / kTileM + sequence;
        return (s64(sequence) * p.heads_q + head) * params.head_tiles;
    }
    XATTN_DEVICE static u32* taken(const Sm90BackwardParams& params) {
        return reinterpret_cast<u32*>(params.numbers + s64(params.tiles) * kNumbers);
    }
    // A lane finds the numbers of the columns that it holds of 16 side by side.
    XATTN_DEVICE static int number_of(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2; }
    XATTN_DEVICE static int row_of(int number) {
        return number / 16 * 16 + number % 16 / 4 * 2 + number % 4 / 2 * 8 + number % 2;
    }
};

}  // namespace xattn
