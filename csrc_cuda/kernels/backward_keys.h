// Backward, gradients of k and v: a thread block has kTileN keys of one head of k and v, a warp 16 * kRowGroups of
// them, and walks the queries that see them, of every head that shares them:
//
//   S^T = K Q^T;  P^T = exp(S^T - lse);  dV += P^T dO;  dP^T = V dO^T;  dS^T = P^T (dP^T - delta);  dK += dS^T Q.
//
// Keys are the rows of all products, so that P^T and dS^T are operands as they stand in the accumulators, and dK and dV
// stay in registers to the end: nothing is added up between warps or blocks, the result is the same bit for bit, and
// memory holds no more than it. K and V stay in shared memory; Q and dO of the next tile are copied behind the products
// of this one (num_stages 2). lse and delta of a tile's queries lie beside them, in pairs.
//
// Dropout. Which weights of a tile are kept lies in shared memory too (KeptTile), made by all threads ahead of it;
// their scale enters with the sums.
//
// With `parts` 2 a block makes dV or dK alone: head dimensions of which both do not fit in registers.
#pragma once

#include "kernels/backward_tile.h"
#include "kernels/scheduler.h"

namespace xattn {

template <class Arch, class Config>
struct BackwardKeys {
    using Element = typename Config::Element;
    using Shared = typename Arch::Shared;
    using Accumulator = typename Arch::Accumulator;
    using Gradient = ScoreGradient<Arch, Config>;

    static constexpr int kTileM = Config::tile_m, kTileN = Config::tile_n;  // queries of a step, keys
    static constexpr int kDim = Config::head_dim, kDimV = Config::head_dim_v;
    static constexpr int kThreads = Config::num_warps * Arch::kWarpSize;
    static constexpr int kRowGroups = kTileN / (16 * Config::num_warps);
    static constexpr int kAtOnce = Config::tile_at_once / 16;  // 16-query groups whose scores are in registers at once
    static constexpr int kStages = Config::num_stages;
    static_assert(kTileN == 16 * Config::num_warps * kRowGroups && kTileM % (16 * kAtOnce) == 0, "16 x 16 tiles");
    static_assert(kTileM <= kThreads, "a thread brings the numbers of one query");

    using LayoutK = TileLayout<kTileN, kDim>;
    using LayoutV = TileLayout<kTileN, kDimV>;
    using LayoutQ = TileLayout<kTileM, kDim>;
    using LayoutO = TileLayout<kTileM, kDimV>;
    static constexpr int kNumberBytes = 8 * kTileM;  // lse and delta of each query
    static constexpr int kK = 0, kV = kK + LayoutK::bytes, kQ = kV + LayoutV::bytes;
    static constexpr int kO = kQ + kStages * LayoutQ::bytes, kNumbers = kO + kStages * LayoutO::bytes;
    static constexpr int kKept = kNumbers + kStages * kNumberBytes;
    using Kept = KeptTile<Arch, kThreads, kTileM, kTileN>;
    static constexpr int kSharedBytes = kKept + (Config::dropout ? kStages * Kept::bytes : 0);

    using CopyQ = TileCopy<Arch, kThreads, kTileM, kDim>;
    using CopyO = TileCopy<Arch, kThreads, kTileM, kDimV>;
    using Products = WarpProducts<Arch, Element, kRowGroups, kAtOnce>;
    using Scores = Accumulator[kRowGroups][kAtOnce];
    using OfK = Accumulator[kRowGroups][kDim / 16];
    using OfV = Accumulator[kRowGroups][kDimV / 16];
    using Bits = u32[kAtOnce][Arch::kElements / 2];  // what KeptTile says of two neighbours, for all row groups
    static_assert(!Config::dropout || 4 % kRowGroups == 0, "the keys of a warp lie in one block of 64");

    XATTN_DEVICE static void run(const BackwardParams& b, Shared shared) {
        const u32 index = Arch::block_index();
        if (Config::parts == 1)
            Block<true, true>::run(b, shared, index);
        else if (b.part == 1 || (b.part == 0 && index % 2 == 0))
            Block<false, true>::run(b, shared, b.part ? index : index / 2);
        else
            Block<true, false>::run(b, shared, b.part ? index : index / 2);
    }

  private:
    // Queries [begin, end) that see a key of the tile, of one head after the other.
    struct Walk {
        s32 begin, end, row0, head;
        XATTN_DEVICE bool next() {
            row0 += kTileM;
            if (row0 < end) return false;
            row0 = begin;
            ++head;
            return true;
        }
    };

    template <bool kOfK, bool kOfV>
    struct Block {
        XATTN_DEVICE static void run(const BackwardParams& b, Shared shared, u32 index) {
            const ForwardParams& p = b.p;
            const Tile t = tile_at(b.keys, index);
            const int thread = Arch::thread_index(), warp = thread / Arch::kWarpSize, lane = thread % Arch::kWarpSize;
            if (t.sequence == p.batch) return clear_rest(b, t, thread);
            const Sequence seq = Sequence::of(p, t.sequence);
            const s32 key0 = t.m_block * kTileN;
            if (key0 >= Sequence::whole(p, t.sequence).seqlen_k) return;
            const Visible visible = Visible::of(p, seq);
            const s32 ratio = s32(p.gqa_ratio.value), warp_row = warp * 16 * kRowGroups;
            const u16* k = first_row(p.k, p.cu_seqlens_k, t.sequence, seq.start_k, t.head);
            const u16* v = first_row(p.v, p.cu_seqlens_k, t.sequence, seq.start_k, t.head);

            OfK of_k;
            OfV of_v;
            clear(of_k, of_v);
            Walk walk = queries(visible, seq, key0);
            walk.row0 = walk.begin;
            walk.head = t.head * ratio;
            if (walk.begin < walk.end) {
                const s32 steps = (walk.end - walk.begin + kTileM - 1) / kTileM * ratio;
                const s32 valid = seq.seqlen_k - key0;
                TileCopy<Arch, kThreads, kTileN, kDim>(k, p.k, key0, p.head_dim, thread).start(shared + kK, valid);
                if (kOfK) {
                    using CopyV = TileCopy<Arch, kThreads, kTileN, kDimV>;
                    CopyV(v, p.v, key0, p.head_dim_v, thread).start(shared + kV, valid);
                }
                const u16* q = first_row(p.q, p.cu_seqlens_q, t.sequence, seq.start_q, walk.head);
                const u16* dout = first_row(b.dout, p.cu_seqlens_q, t.sequence, seq.start_q, walk.head);
                CopyQ copy_q(q, p.q, walk.row0, p.head_dim, thread);
                CopyO copy_o(dout, b.dout, walk.row0, p.head_dim_v, thread);
                copy(copy_q, copy_o, walk, shared, 0);
                Numbers numbers = Numbers::of(b, seq, t.sequence, walk, thread);

                for (s32 step = 0; step < steps; ++step) {
                    const Walk now = walk;
                    const int stage = kStages == 1 ? 0 : step & 1;
                    numbers.store(shared + kNumbers + stage * kNumberBytes, thread);
                    if constexpr (Config::dropout)
                        Kept::fill(shared + kKept + stage * Kept::bytes, Dropout::of(p), t.sequence, now.head, now.row0,
                                   key0, thread);
                    Arch::template copy_wait<0>();
                    Arch::barrier();  // this tile is there for all, and all are done with the one before
                    clear_empty(shared, stage, thread);
                    if (step + 1 < steps) {
                        const bool wraps = walk.next();
                        move(copy_q, p.q, now, walk, wraps), move(copy_o, b.dout, now, walk, wraps);
                        numbers = Numbers::of(b, seq, t.sequence, walk, thread);
                        if (kStages == 2) copy(copy_q, copy_o, walk, shared, stage ^ 1);
                    }
                    multiply(b, seq, visible, t.sequence, now, key0, shared, stage, warp_row, Arch::fresh(lane), of_k,
                             of_v);
                    if (kStages == 1 && step + 1 < steps) {
                        Arch::barrier();  // all are done with this tile
                        copy(copy_q, copy_o, walk, shared, 0);
                    }
                }
                Arch::warp_barrier();
            }
            store(b, shared, u32(Arch::fresh(s32(index))), warp_row, lane, of_k, of_v);
        }

      private:
        // Each warp stages its results where its own keys were. The place is found anew: the loop needs the registers.
        XATTN_DEVICE static void store(const BackwardParams& b, Shared shared, u32 index, int warp_row, int lane,
                                       OfK& of_k, OfV& of_v) {
            const ForwardParams& p = b.p;
            const Tile t = tile_at(b.keys, index);
            const Sequence seq = Sequence::whole(p, t.sequence);
            const s32 key0 = t.m_block * kTileN, keys = seq.seqlen_k - key0;
            if (kOfK) {
                u16* dk = target_row(b.dk, p.cu_seqlens_k, t.sequence, seq.start_k, t.head) + key0 * b.dk.row_stride;
                store_gradient<Arch, Element, LayoutK, kRowGroups, kDim>(of_k, b.scale, shared + kK, warp_row, lane, dk,
                                                                         b.dk, keys, p.head_dim);
            }
            if (kOfV) {
                u16* dv = target_row(b.dv, p.cu_seqlens_k, t.sequence, seq.start_k, t.head) + key0 * b.dv.row_stride;
                store_gradient<Arch, Element, LayoutV, kRowGroups, kDimV>(
                    of_v, Config::dropout ? p.dropout_scale : 1.0f, shared + kV, warp_row, lane, dv, b.dv, keys,
                    p.head_dim_v);
            }
        }

        // lse and delta of one query of the next tile, on their way through a register.
        struct Numbers {
            float lse, delta;
            XATTN_DEVICE static Numbers of(const BackwardParams& b, const Sequence& seq, s32 sequence, const Walk& walk,
                                           int thread) {
                const s32 row = walk.row0 + thread;
                if (thread >= kTileM || row >= walk.end) return {Arch::infinity(), 0.0f};
                const s64 at = row_numbers(b.p, seq, sequence, walk.head) + row;
                return {Gradient::lse(b.p.lse[at]), b.delta[at]};
            }
            XATTN_DEVICE void store(Shared at, int thread) const {
                if (thread >= kTileM) return;
                Arch::store_float(at + 8 * thread, lse);
                Arch::store_float(at + 8 * thread + 4, delta);
            }
        };

        XATTN_DEVICE static void clear(OfK& of_k, OfV& of_v) {
            XATTN_UNROLL
            for (int g = 0; g < kRowGroups; ++g) {
                XATTN_UNROLL
                for (int d = 0; d < kDim / 16; ++d) of_k[g][d].clear();
                XATTN_UNROLL
                for (int d = 0; d < kDimV / 16; ++d) of_v[g][d].clear();
            }
        }

        XATTN_DEVICE static Walk queries(const Visible& visible, const Sequence& seq, s32 key0) {
            const s32 last = min_of(key0 + kTileN, seq.seqlen_k) - 1, unbounded = Visible::kUnbounded;
            Walk w{0, seq.seqlen_q, 0, 0};
            if (last < key0) w.end = 0;
            if (visible.right != unbounded) w.begin = max_of(0, key0 - visible.shift - visible.right);
            if (visible.left != unbounded) w.end = min_of(w.end, last - visible.shift + visible.left + 1);
            return w;
        }

        XATTN_DEVICE static void copy(const CopyQ& copy_q, const CopyO& copy_o, const Walk& walk, Shared shared,
                                      int stage) {
            copy_q.start(shared + kQ + stage * LayoutQ::bytes, walk.end - walk.row0);
            copy_o.start(shared + kO + stage * LayoutO::bytes, walk.end - walk.row0);
            Arch::copy_commit();
        }
        template <class Copy>
        XATTN_DEVICE static void move(Copy& copy, const Operand& x, const Walk& from, const Walk& to, bool wraps) {
            copy.source += s64(to.row0 - from.row0) * x.row_stride + (wraps ? x.head_stride : 0);
        }

        // Queries whose weights are all 0 bring nothing, whatever q and dout hold there.
        XATTN_DEVICE static void clear_empty(Shared shared, int stage, int thread) {
            const Shared numbers = shared + kNumbers + stage * kNumberBytes;
            bool any = false;
            for (int r = thread % Arch::kWarpSize; r < kTileM; r += Arch::kWarpSize)
                any |= Arch::load_float(numbers + 8 * r) == Arch::infinity();
            if (!Arch::any(any)) return;  // every warp has seen the same
            for (int r = thread; r < kTileM; r += kThreads) {
                if (Arch::load_float(numbers + 8 * r) != Arch::infinity()) continue;
                clear_row<Arch, LayoutQ, kDim>(shared + kQ + stage * LayoutQ::bytes, r);
                clear_row<Arch, LayoutO, kDimV>(shared + kO + stage * LayoutO::bytes, r);
            }
            Arch::barrier();
        }

        // What one tile of queries adds to a warp's dK and dV.
        XATTN_DEVICE static void multiply(const BackwardParams& b, const Sequence& seq, const Visible& visible,
                                          s32 sequence, const Walk& walk, s32 key0, Shared shared, int stage,
                                          int warp_row, int lane, OfK& of_k, OfV& of_v) {
            const s32 row0 = walk.row0, last_row = min_of(row0 + kTileM, walk.end) - 1;
            const s32 first_key = key0 + warp_row, last_key = first_key + 16 * kRowGroups - 1;
            if (first_key > visible.last(last_row) || last_key < visible.first(row0)) return;
            const bool whole = first_key >= visible.first(last_row) && last_key <= visible.last(row0);
            const Gradient gradient(b.p, seq, sequence, walk.head);
            const Shared sq = shared + kQ + stage * LayoutQ::bytes, so = shared + kO + stage * LayoutO::bytes;
            const Shared pk = Arch::template rows_pointer<LayoutK>(shared + kK, warp_row, lane);
            const Shared pv = Arch::template rows_pointer<LayoutV>(shared + kV, warp_row, lane);
            const Shared q_rows = Arch::template keys_pointer<LayoutQ>(sq, lane);
            const Shared o_rows = Arch::template keys_pointer<LayoutO>(so, lane);
            const Shared q_columns = Arch::template values_pointer<LayoutQ>(sq, lane);
            const Shared o_columns = Arch::template values_pointer<LayoutO>(so, lane);
            XATTN_UNROLL
            for (int m = 0; m < kTileM; m += 16 * kAtOnce) {
                Scores w, ds;
                Products::template rows_by_rows<kDim, LayoutK, LayoutQ>(w, pk, q_rows, m);
                float factor[kRowGroups][kAtOnce][Arch::kElements];
                weigh(gradient, visible, w, factor, shared + kNumbers + stage * kNumberBytes, row0, m, first_key, whole,
                      lane);
                Bits kept;
                if constexpr (Config::dropout)
                    load_kept(kept, shared + kKept + stage * Kept::bytes, m, ((key0 & 63) + warp_row) / 16, lane);
                if constexpr (kOfV && Config::dropout) {
                    Scores left;
                    drop(left, w, kept);
                    Products::template weights_by_tile<kDimV, LayoutO>(of_v, left, o_columns, m);
                } else if (kOfV) {
                    Products::template weights_by_tile<kDimV, LayoutO>(of_v, w, o_columns, m);
                }
                if (kOfK) {
                    Products::template rows_by_rows<kDimV, LayoutV, LayoutO>(ds, pv, o_rows, m);
                    if constexpr (Config::dropout) through_dropout(gradient, ds, kept);
                    differentiate(w, factor, ds, shared + kNumbers + stage * kNumberBytes, m, whole, lane);
                    Products::template weights_by_tile<kDim, LayoutQ>(of_k, ds, q_columns, m);
                }
            }
        }

        // lse (n 0) or delta (n 1) of the columns that the lane holds of a 16-query group.
        XATTN_DEVICE static void load_numbers(float (&x)[Arch::kColsPerLane], int n, Shared numbers, int col,
                                              int lane) {
            XATTN_UNROLL
            for (int e = 0; e < Arch::kElements; ++e) {
                if (Arch::row_slot(e) != 0 || Arch::col_slot(e) % 2 != 0) continue;
                float pairs[4];
                Arch::load_floats(pairs, numbers + 8 * (col + Arch::col_of(lane, e)));
                x[Arch::col_slot(e)] = pairs[n], x[Arch::col_slot(e) + 1] = pairs[2 + n];
            }
        }

        // Products to weights. `factor` is used where a score is not linear in its product.
        XATTN_DEVICE static void weigh(const Gradient& gradient, const Visible& visible, Scores& w,
                                       float (&factor)[kRowGroups][kAtOnce][Arch::kElements], Shared numbers, s32 row0,
                                       int m, s32 first_key, bool whole, int lane) {
            XATTN_UNROLL
            for (int n = 0; n < kAtOnce; ++n) {
                float lse[Arch::kColsPerLane];
                load_numbers(lse, 0, numbers, m + n * 16, lane);
                XATTN_UNROLL
                for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
                for (int e = 0; e < Arch::kElements; ++e) {
                    const s32 key = first_key + g * 16 + Arch::row_of(lane, Arch::row_slot(e));
                    const s32 row = row0 + m + n * 16 + Arch::col_of(lane, e);
                    w[g][n].x[e] = gradient.weight(w[g][n].x[e], row, key, lse[Arch::col_slot(e)], factor[g][n][e]);
                }
            }
            if (!whole) hide(visible, w, row0 + m, first_key, lane);
        }

        // The weights of keys that a query does not see become 0.
        XATTN_DEVICE static void hide(const Visible& visible, Scores& w, s32 row0, s32 first_key, int lane) {
            XATTN_UNROLL
            for (int g = 0; g < kRowGroups; ++g) {
                s32 first[Arch::kRowsPerLane], last[Arch::kRowsPerLane];  // queries that see a key, as columns
                XATTN_UNROLL
                for (int r = 0; r < Arch::kRowsPerLane; ++r) {
                    const s32 key = first_key + g * 16 + Arch::row_of(lane, r);
                    const s32 at = row0 + Arch::col_of(lane, 0), unbounded = Visible::kUnbounded;
                    first[r] = visible.right == unbounded ? 0 : key - visible.shift - visible.right - at;
                    last[r] = visible.left == unbounded ? unbounded : key - visible.shift + visible.left - at;
                    if (key >= visible.seqlen_k) last[r] = -1;
                }
                XATTN_UNROLL
                for (int n = 0; n < kAtOnce; ++n) XATTN_UNROLL
                for (int e = 0; e < Arch::kElements; ++e) {
                    const int r = Arch::row_slot(e), col = n * 16 + Arch::col_of(0, e);  // of lane 0
                    if (col < first[r] || col > last[r]) w[g][n].x[e] = 0.0f;
                }
            }
        }

        // `query`: the first one; `sixteen`: the warp's first 16 keys, as KeptTile counts them.
        XATTN_DEVICE static void load_kept(Bits& kept, Shared tile, int query, int sixteen, int lane) {
            XATTN_UNROLL
            for (int n = 0; n < kAtOnce; ++n) XATTN_UNROLL
            for (int e = 0; e < Arch::kElements; ++e) {
                if (Arch::col_slot(e) % 2 != 0) continue;
                kept[n][e / 2] = Kept::bits(tile, query + n * 16 + Arch::col_of(lane, e), sixteen,
                                            Arch::row_of(lane, Arch::row_slot(e)));
            }
        }
        XATTN_DEVICE static bool is_kept(const Bits& kept, int g, int n, int e) {
            return kept[n][e / 2] >> (2 * g + 8 * (Arch::col_slot(e) % 2)) & 1;
        }
        XATTN_DEVICE static void drop(Scores& left, const Scores& w, const Bits& kept) {
            XATTN_UNROLL
            for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
            for (int n = 0; n < kAtOnce; ++n) XATTN_UNROLL
            for (int e = 0; e < Arch::kElements; ++e) left[g][n].x[e] = is_kept(kept, g, n, e) ? w[g][n].x[e] : 0.0f;
        }
        XATTN_DEVICE static void through_dropout(const Gradient& gradient, Scores& ds, const Bits& kept) {
            XATTN_UNROLL
            for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
            for (int n = 0; n < kAtOnce; ++n) XATTN_UNROLL
            for (int e = 0; e < Arch::kElements; ++e)
                ds[g][n].x[e] = gradient.through_dropout(ds[g][n].x[e], is_kept(kept, g, n, e));
        }

        // Gradients of the weights to those of the products, but for softmax_scale.
        XATTN_DEVICE static void differentiate(const Scores& w, float (&factor)[kRowGroups][kAtOnce][Arch::kElements],
                                               Scores& ds, Shared numbers, int m, bool whole, int lane) {
            XATTN_UNROLL
            for (int n = 0; n < kAtOnce; ++n) {
                float delta[Arch::kColsPerLane];
                load_numbers(delta, 1, numbers, m + n * 16, lane);
                XATTN_UNROLL
                for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
                for (int e = 0; e < Arch::kElements; ++e)
                    ds[g][n].x[e] = Gradient::of_product(w[g][n].x[e], ds[g][n].x[e], delta[Arch::col_slot(e)],
                                                         factor[g][n][e], whole);
            }
        }
    };

    // Keys that belong to no sequence.
    XATTN_DEVICE static void clear_rest(const BackwardParams& b, const Tile& t, int thread) {
        const ForwardParams& p = b.p;
        const s64 end = index_at(p.cu_seqlens_k, p.index64 & 2, p.batch);
        const s64 start = min_of(max_of<s64>(end, 0), p.total_k);
        const s32 first = t.m_block, step = b.keys.m_blocks;
        u16* dk = target_row(b.dk, p.cu_seqlens_k, 0, start, t.head);
        u16* dv = target_row(b.dv, p.cu_seqlens_k, 0, start, t.head);
        if (b.dk.data) clear_rows<kThreads>(dk, b.dk, p.total_k - start, p.head_dim, first, step, thread);
        if (b.dv.data) clear_rows<kThreads>(dv, b.dv, p.total_k - start, p.head_dim_v, first, step, thread);
    }
};

}  // namespace xattn
