// Backward, gradient of q: a thread block has kTileM queries of one head, a warp 16 * kRowGroups of them, and walks the
// keys that they see:
//
//   S = Q K^T;  P = exp(S - lse);  dP = dO V^T;  dS = P (dP - delta);  dQ += dS K.
//
// Queries are the rows of all products: dS is an operand as it stands in the accumulators, lse and delta of a lane's
// rows stay in registers. Q and dO stay in shared memory; K and V of the next tile are copied behind the products of
// this one (num_stages 2). Which weights dropout keeps is made by all threads ahead of a tile, for 64 keys or more at a
// time, and lies in shared memory (KeptTile). Nothing is added up between warps or blocks: the result is the same bit
// for bit.
#pragma once

#include "kernels/backward_tile.h"
#include "kernels/scheduler.h"

namespace xattn {

template <class Arch, class Config>
struct BackwardQueries {
    using Element = typename Config::Element;
    using Shared = typename Arch::Shared;
    using Accumulator = typename Arch::Accumulator;
    using Gradient = ScoreGradient<Arch, Config>;

    static constexpr int kTileM = Config::tile_m, kTileN = Config::tile_n;
    static constexpr int kDim = Config::head_dim, kDimV = Config::head_dim_v;
    static constexpr int kThreads = Config::num_warps * Arch::kWarpSize;
    static constexpr int kRowGroups = kTileM / (16 * Config::num_warps);
    static constexpr int kRows = Arch::kRowsPerLane;
    static constexpr int kAtOnce = Config::tile_at_once / 16;  // 16-key groups whose scores are in registers at once
    static constexpr int kStages = Config::num_stages;
    static_assert(kTileM == 16 * Config::num_warps * kRowGroups && kTileN % (16 * kAtOnce) == 0, "16 x 16 tiles");

    using LayoutQ = TileLayout<kTileM, kDim>;
    using LayoutO = TileLayout<kTileM, kDimV>;
    using LayoutK = TileLayout<kTileN, kDim>;
    using LayoutV = TileLayout<kTileN, kDimV>;
    static constexpr int kQ = 0, kO = kQ + LayoutQ::bytes, kK = kO + LayoutO::bytes;
    static constexpr int kV = kK + kStages * LayoutK::bytes;
    static constexpr int kKept = kV + kStages * LayoutV::bytes;
    static constexpr int kSpan = max_of(64, kTileN);  // keys of a KeptTile, of which there are two
    static_assert(kSpan % kTileN == 0, "a tile of keys lies in one");
    using Kept = KeptTile<Arch, kThreads, kTileM, kSpan>;
    static constexpr int kSharedBytes = kKept + (Config::dropout ? 2 * Kept::bytes : 0);

    using CopyK = TileCopy<Arch, kThreads, kTileN, kDim>;
    using CopyV = TileCopy<Arch, kThreads, kTileN, kDimV>;
    using Products = WarpProducts<Arch, Element, kRowGroups, kAtOnce>;
    using Scores = Accumulator[kRowGroups][kAtOnce];
    using OfQ = Accumulator[kRowGroups][kDim / 16];

    XATTN_DEVICE static void run(const BackwardParams& b, Shared shared) {
        const ForwardParams& p = b.p;
        const Tile t = tile_at(p, Arch::block_index());
        const int thread = Arch::thread_index(), warp = thread / Arch::kWarpSize, lane = thread % Arch::kWarpSize;
        if (t.sequence == p.batch) {
            const Sequence rest = Sequence::rest(p);
            u16* dq = target_row(b.dq, p.cu_seqlens_q, 0, rest.start_q, t.head);
            return clear_rows<kThreads>(dq, b.dq, rest.seqlen_q, p.head_dim, t.m_block, p.m_blocks, thread);
        }
        const Sequence seq = Sequence::of(p, t.sequence);
        const s32 row0 = t.m_block * kTileM;
        if (row0 >= seq.seqlen_q) return;
        const Visible visible = Visible::of(p, seq);
        const s32 kv_head = s32(quotient(u32(t.head), p.gqa_ratio));
        const u16* q = first_row(p.q, p.cu_seqlens_q, t.sequence, seq.start_q, t.head);
        const u16* dout = first_row(b.dout, p.cu_seqlens_q, t.sequence, seq.start_q, t.head);
        const u16* k = first_row(p.k, p.cu_seqlens_k, t.sequence, seq.start_k, kv_head);
        const u16* v = first_row(p.v, p.cu_seqlens_k, t.sequence, seq.start_k, kv_head);
        const int warp_row = warp * 16 * kRowGroups;

        // Key tiles that some row sees, as in attention_forward.h.
        const s32 last_row = min_of(row0 + kTileM, seq.seqlen_q) - 1;
        const s32 key_first = visible.first(row0), key_last = visible.last(last_row);
        const s32 n_first = key_first / kTileN, n_last = key_last < key_first ? n_first - 1 : key_last / kTileN;

        OfQ of_q;
        XATTN_UNROLL
        for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
        for (int d = 0; d < kDim / 16; ++d) of_q[g][d].clear();
        const Gradient gradient(p, seq, t.sequence, t.head);
        float lse[kRowGroups][kRows], delta[kRowGroups][kRows];
        load_numbers(lse, delta, b, seq, t, row0 + warp_row, lane);

        if (n_first <= n_last) {
            using CopyQ = TileCopy<Arch, kThreads, kTileM, kDim>;
            using CopyO = TileCopy<Arch, kThreads, kTileM, kDimV>;
            CopyQ(q, p.q, row0, p.head_dim, thread).start(shared + kQ, seq.seqlen_q - row0);
            CopyO(dout, b.dout, row0, p.head_dim_v, thread).start(shared + kO, seq.seqlen_q - row0);
            CopyK copy_k(k, p.k, n_last * kTileN, p.head_dim, thread);
            CopyV copy_v(v, p.v, n_last * kTileN, p.head_dim_v, thread);
            copy(copy_k, copy_v, shared, 0, seq.seqlen_k - n_last * kTileN);
            int stage = 0;
            for (s32 n = n_last; n >= n_first; --n) {
                if (Config::dropout && (n == n_last || (n + 1) * kTileN % kSpan == 0))
                    Kept::fill(kept_of(shared, n * kTileN), Dropout::of(p), t.sequence, t.head, row0,
                               n * kTileN / kSpan * kSpan, thread);
                Arch::template copy_wait<0>();
                Arch::barrier();  // this tile is there for all, and all are done with the one before
                if (kStages == 2 && n > n_first) copy_next(copy_k, copy_v, shared, stage ^ 1);
                multiply(gradient, visible, lse, delta, n * kTileN, shared, stage, row0, warp_row, last_row, lane,
                         of_q);
                if (kStages == 1 && n > n_first) {
                    Arch::barrier();  // all are done with this tile
                    copy_next(copy_k, copy_v, shared, 0);
                }
                if (kStages == 2) stage ^= 1;
            }
            Arch::warp_barrier();
        }
        clear_empty(of_q, lse);
        u16* dq = target_row(b.dq, p.cu_seqlens_q, t.sequence, seq.start_q, t.head) + s64(row0) * b.dq.row_stride;
        // Each warp stages its result where its own queries were.
        store_gradient<Arch, Element, LayoutQ, kRowGroups, kDim>(of_q, b.scale, shared + kQ, warp_row, lane, dq, b.dq,
                                                                 seq.seqlen_q - row0, p.head_dim);
    }

  private:
    using Numbers = float[kRowGroups][kRows];

    XATTN_DEVICE static void load_numbers(Numbers& lse, Numbers& delta, const BackwardParams& b, const Sequence& seq,
                                          const Tile& t, s32 warp_row0, int lane) {
        const s64 at = row_numbers(b.p, seq, t.sequence, t.head);
        XATTN_UNROLL
        for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) {
            const s32 row = warp_row0 + g * 16 + Arch::row_of(lane, r);
            const bool valid = row < seq.seqlen_q;
            lse[g][r] = valid ? Gradient::lse(b.p.lse[at + row]) : Arch::infinity();
            delta[g][r] = valid ? b.delta[at + row] : 0.0f;
        }
    }

    // The two take turns: when one is made anew, nobody reads it.
    XATTN_DEVICE static Shared kept_of(Shared shared, s32 key0) {
        return shared + kKept + key0 / kSpan % 2 * Kept::bytes;
    }

    XATTN_DEVICE static void copy(const CopyK& copy_k, const CopyV& copy_v, Shared shared, int stage, s32 valid) {
        copy_k.start(shared + kK + stage * LayoutK::bytes, valid);
        copy_v.start(shared + kV + stage * LayoutV::bytes, valid);
        Arch::copy_commit();
    }
    XATTN_DEVICE static void copy_next(CopyK& copy_k, CopyV& copy_v, Shared shared, int stage) {
        copy_k.move(-kTileN), copy_v.move(-kTileN);
        copy(copy_k, copy_v, shared, stage, kTileN);
    }

    // What one tile of keys adds to a warp's dQ.
    XATTN_DEVICE static void multiply(const Gradient& gradient, const Visible& visible, const Numbers& lse,
                                      const Numbers& delta, s32 key0, Shared shared, int stage, s32 row0, int warp_row,
                                      s32 last_row, int lane, OfQ& of_q) {
        const s32 first_row = row0 + warp_row, last = min_of(first_row + 16 * kRowGroups - 1, last_row);
        if (last < first_row || key0 > visible.last(last) || key0 + kTileN <= visible.first(first_row)) return;
        const bool whole = key0 >= visible.first(last) && key0 + kTileN - 1 <= visible.last(first_row);
        const Shared sk = shared + kK + stage * LayoutK::bytes, sv = shared + kV + stage * LayoutV::bytes;
        const Shared pq = Arch::template rows_pointer<LayoutQ>(shared + kQ, warp_row, lane);
        const Shared po = Arch::template rows_pointer<LayoutO>(shared + kO, warp_row, lane);
        const Shared k_rows = Arch::template keys_pointer<LayoutK>(sk, lane);
        const Shared v_rows = Arch::template keys_pointer<LayoutV>(sv, lane);
        const Shared k_columns = Arch::template values_pointer<LayoutK>(sk, lane);
        XATTN_UNROLL
        for (int n0 = 0; n0 < kTileN; n0 += 16 * kAtOnce) {
            Scores w, ds;
            float factor[kRowGroups][kAtOnce][Arch::kElements];
            Products::template rows_by_rows<kDim, LayoutQ, LayoutK>(w, pq, k_rows, n0);
            XATTN_UNROLL
            for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
            for (int n = 0; n < kAtOnce; ++n) XATTN_UNROLL
            for (int e = 0; e < Arch::kElements; ++e) {
                const s32 row = first_row + g * 16 + Arch::row_of(lane, Arch::row_slot(e));
                const s32 key = key0 + n0 + n * 16 + Arch::col_of(lane, e);
                w[g][n].x[e] = gradient.weight(w[g][n].x[e], row, key, lse[g][Arch::row_slot(e)], factor[g][n][e]);
            }
            if (!whole) hide(visible, w, first_row, key0 + n0, lane);
            Products::template rows_by_rows<kDimV, LayoutO, LayoutV>(ds, po, v_rows, n0);
            if constexpr (Config::dropout)
                through_dropout(gradient, ds, kept_of(shared, key0), warp_row, (key0 % kSpan + n0) / 16, lane);
            XATTN_UNROLL
            for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
            for (int n = 0; n < kAtOnce; ++n) XATTN_UNROLL
            for (int e = 0; e < Arch::kElements; ++e)
                ds[g][n].x[e] = Gradient::of_product(w[g][n].x[e], ds[g][n].x[e], delta[g][Arch::row_slot(e)],
                                                     factor[g][n][e], whole);
            Products::template weights_by_tile<kDim, LayoutK>(of_q, ds, k_columns, n0);
        }
    }

    // `query`: the warp's first one; `sixteen`: the first 16 keys, as KeptTile counts them.
    XATTN_DEVICE static void through_dropout(const Gradient& gradient, Scores& ds, Shared tile, int query, int sixteen,
                                             int lane) {
        static_assert(4 % kAtOnce == 0, "the keys that are at hand at once lie in one block of 64");
        XATTN_UNROLL
        for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
        for (int e = 0; e < Arch::kElements; ++e) {
            if (Arch::col_slot(e) % 2 != 0) continue;
            const u32 kept = Kept::bits(tile, query + g * 16 + Arch::row_of(lane, Arch::row_slot(e)), sixteen,
                                        Arch::col_of(lane, e));
            XATTN_UNROLL
            for (int n = 0; n < kAtOnce; ++n) XATTN_UNROLL
            for (int i = 0; i < 2; ++i)
                ds[g][n].x[e + i] = gradient.through_dropout(ds[g][n].x[e + i], kept >> (2 * n + i) & 1);
        }
    }

    // The weights of keys that a query does not see become 0.
    XATTN_DEVICE static void hide(const Visible& visible, Scores& w, s32 first_row, s32 key0, int lane) {
        XATTN_UNROLL
        for (int g = 0; g < kRowGroups; ++g) {
            s32 first[kRows], last[kRows];  // keys that a query sees, as columns
            XATTN_UNROLL
            for (int r = 0; r < kRows; ++r) {
                const s32 row = first_row + g * 16 + Arch::row_of(lane, r), at = key0 + Arch::col_of(lane, 0);
                first[r] = visible.first(row) - at, last[r] = visible.last(row) - at;
            }
            XATTN_UNROLL
            for (int n = 0; n < kAtOnce; ++n) XATTN_UNROLL
            for (int e = 0; e < Arch::kElements; ++e) {
                const int r = Arch::row_slot(e), col = n * 16 + Arch::col_of(0, e);  // of lane 0
                if (col < first[r] || col > last[r]) w[g][n].x[e] = 0.0f;
            }
        }
    }

    // Rows whose weights are all 0 have no gradient, whatever q and dout hold there.
    XATTN_DEVICE static void clear_empty(OfQ& of_q, const Numbers& lse) {
        XATTN_UNROLL
        for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
        for (int d = 0; d < kDim / 16; ++d) XATTN_UNROLL
        for (int e = 0; e < Arch::kElements; ++e)
            if (lse[g][Arch::row_slot(e)] == Arch::infinity()) of_q[g][d].x[e] = 0.0f;
    }
};

}  // namespace xattn
