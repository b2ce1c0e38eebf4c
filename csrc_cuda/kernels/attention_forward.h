// Attention forward, one pass: the body shared by every architecture without asynchronous matrix products.
//
// A thread block works on kTileM query rows of one head, a warp on 16 * kRowGroups of them. It walks the keys from the
// last visible block to the first:
//
//   K of a block is in shared memory;  copying of its V starts;  S = Q K^T;  copying of the next K starts (V has
//   arrived); mask and softmax;  O += P V.
//
// So one copy is always under way behind the matrix products, and two thread blocks on a multiprocessor hide each
// other's softmax. Q, K, V and the output are staged in shared memory as tile_copy.h lays them out. All masks, the
// softmax and the epilogue know only logical rows and columns; which lane holds which element is the Arch's business
// (arch/sm80/arch.h states the interface).
#pragma once

#include "kernels/output.h"
#include "kernels/paging.h"
#include "kernels/params.h"
#include "kernels/scheduler.h"
#include "kernels/scores.h"
#include "kernels/sequence.h"
#include "kernels/tile_copy.h"
#include "kernels/warp_tile.h"

namespace xattn {

template <class Arch, class Config>
struct AttentionForward {
    using Element = typename Config::Element;
    using Shared = typename Arch::Shared;

    static constexpr int kTileM = Config::tile_m, kTileN = Config::tile_n;
    static constexpr int kDim = Config::head_dim, kDimV = Config::head_dim_v;
    static constexpr int kThreads = Config::num_warps * Arch::kWarpSize;
    static constexpr int kRowGroups = kTileM / (16 * Config::num_warps);  // 16-row groups of a warp
    static constexpr int kRows = Arch::kRowsPerLane;                      // rows a lane holds of a group
    static_assert(kTileM == 16 * Config::num_warps * kRowGroups && kTileN % 16 == 0, "tiles are made of 16 x 16 tiles");

    using LayoutQ = TileLayout<kTileM, kDim>;
    using LayoutO = TileLayout<kTileM, kDimV>;
    using LayoutK = TileLayout<kTileN, kDim>;
    using LayoutV = TileLayout<kTileN, kDimV>;
    static constexpr int kQ = 0;
    static constexpr int kK = max_of(LayoutQ::bytes, LayoutO::bytes);  // the output is staged where Q was
    static constexpr int kV = kK + LayoutK::bytes;
    static constexpr int kSharedBytes = kV + LayoutV::bytes;
    static constexpr bool kKeepQ = Config::keep_q;

    using S = Scores<Arch, Config>;
    using Out = Output<Arch, Config>;
    using State = WarpTile<Arch, Config, S, kRowGroups, LayoutQ, LayoutK, LayoutV>;
    using CopyK = KeyCopy<Arch, Config, kThreads, kTileN, kDim>;
    using CopyV = KeyCopy<Arch, Config, kThreads, kTileN, kDimV>;

    // One thread block, one tile.
    XATTN_DEVICE static void run(const ForwardParams& p, Shared shared) {
        const Tile t = tile_at(p, Arch::block_index());
        const int thread = Arch::thread_index(), warp = thread / Arch::kWarpSize, lane = thread % Arch::kWarpSize;
        if (t.sequence == p.batch) return clear_rest(p, t, thread);
        if (p.status && t.head == 0 && t.m_block == 0 && thread == 0) Sequence::report(p, t.sequence);
        const Sequence seq = Sequence::of(p, t.sequence);
        const s32 row0 = t.m_block * kTileM;
        if (row0 >= seq.seqlen_q) return;
        const Visible visible = Visible::of(p, seq);
        const s32 kv_head = s32(quotient(u32(t.head), p.gqa_ratio));
        const u16* q = start(p.q, p.cu_seqlens_q, t.sequence, seq.start_q, t.head);
        const s32 batch = Config::paged ? 0 : t.sequence;  // the page table finds a sequence's keys
        const u16* k = start(p.k, p.cu_seqlens_k, batch, seq.start_k, kv_head);
        const u16* v = start(p.v, p.cu_seqlens_k, batch, seq.start_k, kv_head);
        const Shared sq = shared + kQ, sk = shared + kK, sv = shared + kV;
        const Shared pq = Arch::template rows_pointer<LayoutQ>(sq, warp * 16 * kRowGroups, lane);
        const Shared pk = Arch::template keys_pointer<LayoutK>(sk, lane);
        const Shared pv = Arch::template values_pointer<LayoutV>(sv, lane);

        // Key blocks that some row of the tile sees: [n_first, n_last]; those that every row sees whole need no mask.
        const s32 last_row = min_of(row0 + kTileM, seq.seqlen_q) - 1;
        const s32 key_first = visible.first(row0), key_last = visible.last(last_row);
        const s32 n_first = key_first / kTileN, n_last = key_last < key_first ? n_first - 1 : key_last / kTileN;
        const s32 whole_from = visible.first(last_row), whole_to = visible.last(row0) + 1;

        TileCopy<Arch, kThreads, kTileM, kDim>(q, p.q, row0, p.head_dim, thread).start(sq, seq.seqlen_q - row0);
        CopyK copy_k(k, p.k, n_last * kTileN, p.head_dim, thread);
        CopyV copy_v(v, p.v, n_last * kTileN, p.head_dim_v, thread);
        if constexpr (Config::paged) copy_k.table = copy_v.table = PageTable::of(p, t.sequence);
        if (n_first <= n_last) copy_k.start(sk, seq.seqlen_k - n_last * kTileN);
        Arch::copy_commit();

        State s;
        s.softmax_reset();
        s.clear_output();
        if constexpr (Config::dropout) s.dropout = Dropout::of(p);
        const s64 first_query = p.cu_seqlens_q ? seq.start_q : s64(t.sequence) * p.seqlen_q;
        const S scores(p, visible, t.sequence, t.head, row0 + warp * 16 * kRowGroups, lane, first_query);

        for (s32 n = n_last; n >= n_first; --n) {
            Arch::template copy_wait<0>();
            Arch::barrier();  // K of this block is there for all, and V's buffer is free
            if (kKeepQ && n == n_last) s.keep_q(pq);
            copy_v.start(sv, seq.seqlen_k - n * kTileN);
            copy_v.move(-kTileN);
            Arch::copy_commit();
            s.multiply_qk(pq, pk);
            Arch::template copy_wait<0>();
            Arch::barrier();  // V is there for all, and K's buffer is free
            if (n > n_first) {
                copy_k.move(-kTileN);
                copy_k.start(sk, kTileN);
                Arch::copy_commit();
            }
            const s32 key0 = n * kTileN;
            const bool whole = key0 >= whole_from && key0 + kTileN <= whole_to;
            s.softmax(scores, key0, whole);
            s.multiply_pv(pv);
        }
        Arch::template copy_wait<0>();
        finish(s, p, scores, t, seq, row0, sq, warp, lane);
    }

  private:
    // Rows of a packed q that belong to no sequence come out as empty rows; the tiles of a head share them.
    XATTN_DEVICE static void clear_rest(const ForwardParams& p, const Tile& t, int thread) {
        const Sequence rest = Sequence::rest(p);
        auto* out = Out::at(p.out, rest.start_q * p.out.row_stride + t.head * p.out.head_stride);
        const s32 chunks = p.head_dim_v / 8;
        for (s32 row = t.m_block; row < rest.seqlen_q; row += p.m_blocks) {
            for (s32 c = thread; c < chunks; c += kThreads)
                Out::template clear<8>(out + row * p.out.row_stride + c * 8);
            if (p.lse && thread == 0) {
                p.lse[t.head * p.lse_head_stride + rest.start_q + row] = -Arch::infinity();
            }
        }
    }

    XATTN_DEVICE static const u16* start(const Operand& x, const void* packed, s32 sequence, s64 row, s32 head) {
        return static_cast<const u16*>(x.data) + (packed ? row * x.row_stride : sequence * x.batch_stride) +
               head * x.head_stride;
    }

    // Divides by the row sums, and stores the output and lse. Each warp stages its own rows where its part of Q was.
    XATTN_DEVICE static void finish(State& s, const ForwardParams& p, const S& scores, const Tile& t,
                                    const Sequence& seq, s32 row0, Shared so, int warp, int lane) {
        const int warp_row = warp * 16 * kRowGroups;
        if (!kKeepQ || kDim != kDimV) Arch::barrier();  // other warps may still read Q, or the panels differ
        XATTN_UNROLL
        for (int g = 0; g < kRowGroups; ++g) {
            float inverse[kRows];
            XATTN_UNROLL
            for (int r = 0; r < kRows; ++r) {
                const s32 row = row0 + warp_row + g * 16 + Arch::row_of(lane, r);
                float sum = Arch::row_sum(s.soft[g].row_sum[r]);
                float base = s.soft[g].base(r);
                if (p.sinks)
                    scores.add_sink(p.sinks[t.head], base, sum, inverse[r]);
                else
                    inverse[r] = sum == 0.0f ? 0.0f : Arch::divide(1.0f, sum);
                if constexpr (Config::dropout) inverse[r] *= p.dropout_scale;
                if (p.lse && row < seq.seqlen_q && Arch::first_of_row(lane)) {
                    const s64 at = p.cu_seqlens_q ? t.head * p.lse_head_stride + seq.start_q + row
                                                  : t.sequence * p.lse_batch_stride + t.head * p.lse_head_stride + row;
                    p.lse[at] = scores.lse(base, sum);
                }
            }
            s.clear_empty(g, inverse);
            XATTN_UNROLL
            for (int d = 0; d < kDimV / 16; ++d) {
                XATTN_UNROLL
                for (int e = 0; e < Arch::kElements; ++e) s.acc_o[g][d].x[e] *= inverse[Arch::row_slot(e)];
                if constexpr (!Out::kChanged)
                    Arch::template store_rows<Element, LayoutO>(so, s.acc_o[g][d], warp_row + g * 16, d * 16, lane);
            }
        }
        if constexpr (Out::kChanged) {
            XATTN_UNROLL
            for (int half = 0; half < 2; ++half) store_changed(s, p, scores, t, seq, row0, warp_row, half, so, lane);
            return;
        }
        Arch::warp_barrier();
        u16* out = static_cast<u16*>(p.out.data) + t.head * p.out.head_stride +
                   (p.cu_seqlens_q ? seq.start_q * p.out.row_stride : t.sequence * p.out.batch_stride);
        constexpr int per_row = kDimV / 8, total = 16 * kRowGroups * per_row;
        XATTN_UNROLL
        for (int n = 0; n < (total + Arch::kWarpSize - 1) / Arch::kWarpSize; ++n) {
            const int index = n * Arch::kWarpSize + lane;
            const int row = warp_row + index / per_row, col = index % per_row * 8;
            if (index < total && row0 + row < seq.seqlen_q && col < p.head_dim_v) {
                Arch::store_chunk(out + s64(row0 + row) * p.out.row_stride + col, so, LayoutO::chunk_at(row, col));
            }
        }
    }

    // Half of the columns go through shared memory as float32, where all of them fit as 16 bits.
    XATTN_DEVICE static void store_changed(State& s, const ForwardParams& p, const S& scores, const Tile& t,
                                           const Sequence& seq, s32 row0, int warp_row, int half, Shared so, int lane) {
        constexpr int kCols = kDimV / 2, per_row = kCols / 8, total = 16 * kRowGroups * per_row;
        XATTN_UNROLL
        for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
        for (int d = 0; d < kCols / 16; ++d) XATTN_UNROLL
        for (int e = 0; e < Arch::kElements; ++e) {
            const int row = warp_row + g * 16 + Arch::row_of(lane, Arch::row_slot(e)),
                      col = d * 16 + Arch::col_of(lane, e);
            Arch::store_float(so + LayoutO::chunk_at(row, col / 4 * 8) + col % 4 * 4,
                              s.acc_o[g][half * (kCols / 16) + d].x[e]);
        }
        Arch::warp_barrier();
        auto* out = Out::at(p.out, t.head * p.out.head_stride + (p.cu_seqlens_q ? seq.start_q * p.out.row_stride
                                                                                : t.sequence * p.out.batch_stride));
        const s32 shift = Config::paged ? scores.visible.shift : 0;
        bool found = true;
        for (int index = lane; index < total; index += Arch::kWarpSize) {
            const int row = warp_row + index / per_row, part = index % per_row, col = half * kCols + 8 * part;
            if (row0 + row >= seq.seqlen_q || col >= p.head_dim_v) continue;
            float low[4], high[4];
            Arch::load_floats(low, so + LayoutO::chunk_at(row, 16 * part));
            Arch::load_floats(high, so + LayoutO::chunk_at(row, 16 * part + 8));
            float x[8] = {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
            Out::apply(p, x, t.sequence, t.head, row0 + row + shift, col, found);
            Out::store(out + s64(row0 + row) * p.out.row_stride + col, x);
        }
        Out::report(p, found);
        Arch::warp_barrier();
    }
};

}  // namespace xattn
