// Attention of few queries over a long paged cache, bound by the speed at which keys and values are read.
//
// A tile is 16 rows: the queries of all heads that share a key head (Scores, packed heads). Its keys are cut into
// splits, one to a thread block, and the blocks of a split are dealt to the warps. Each warp walks its own key blocks
// through its own ring of stages in shared memory, with its own softmax, and waits for no other warp. It looks its keys
// up in the page table, one to a lane, a block ahead of their copying. At the end the warps of a block merge in shared
// memory; the blocks of a tile merge through global memory, by whichever comes last.
// Up to p.num_splits thread blocks share the keys that the sequence really has.
//
// A cache of 8 bits (Config::Cache) is copied as it is and becomes 16 bits in registers, ahead of the products, which
// is exact. The scale of keys enters with that of the scores, the scale of values with the division of the output.
#pragma once

#include "kernels/output.h"
#include "kernels/paging.h"
#include "kernels/params.h"
#include "kernels/scores.h"
#include "kernels/sequence.h"
#include "kernels/warp_tile.h"

namespace xattn {

// Splits of a tile that have ended, four tiles in a word; the last one sets it back to 0. Launches that may overlap
// count in different rows (p.queue; the launcher numbers them).
constexpr s32 kDecodeQueues = 4096;  // kWorkQueues of the launcher
constexpr s32 kDecodeTiles = 512;    // that can be split, of a launch
constexpr s32 kDecodeSplits = 128;   // of a tile, at most
XATTN_GLOBAL u32 decode_ended[kDecodeQueues * (kDecodeTiles / 4)];

template <class Arch, class Config>
struct AttentionDecode {
    using Element = typename Config::Element;
    using Cache = typename Config::Cache;  // of keys and values: the Element, or of 8 bits
    using Shared = typename Arch::Shared;

    static constexpr int kTileM = 16, kTileN = Config::tile_n, kWarps = Config::num_warps, kStages = Config::num_stages;
    static constexpr int kDim = Config::head_dim, kDimV = Config::head_dim_v;
    static constexpr int kThreads = kWarps * Arch::kWarpSize;
    static constexpr int kRows = Arch::kRowsPerLane;

    using LayoutQ = TileLayout<kTileM, kDim>;
    using LayoutK = TileLayout<kTileN, kDim* int(sizeof(Cache)) / 2>;  // layouts count in 16 bits
    using LayoutV = TileLayout<kTileN, kDimV* int(sizeof(Cache)) / 2>;
    static constexpr bool kNarrow = sizeof(Cache) == 1;
    using S = Scores<Arch, Config, true, kNarrow>;
    using Soft = Softmax<Arch, S, kRows>;
    using Out = Output<Arch, Config>;
    using Product = typename Choose<kNarrow, typename Arch::template NarrowProduct<Element>, Element>::Type;
    using State = WarpTile<Arch, Config, S, 1, LayoutQ, LayoutK, LayoutV, Cache, Product>;
    static constexpr bool kScaledRows = !Same<Product, Element>::value;  // of Q: bf16 holds what fp16 does not
    static constexpr int kChunk = 16 / int(sizeof(Cache));  // elements of the cache that are copied at once
    static_assert(!kNarrow || !S::kPlain, "the scale of keys, which may be of any sign, is a factor of scores");

    static constexpr int kStageBytes = LayoutK::bytes + LayoutV::bytes;
    static constexpr int kRingBytes = kStages * kStageBytes;
    static constexpr int kRing = LayoutQ::bytes;
    // Over the rings, when they are done with: each warp's output, with padded rows, its references and its sums.
    static constexpr int kPitch = kDimV + 4;
    static constexpr int kPartBytes = (kTileM * kPitch + 2 * kTileM) * 4;
    static constexpr int kFlag = kWarps * kPartBytes;
    static constexpr int kFactors = kRing + kWarps * kRingBytes;  // of the rows of Q
    static constexpr int kSharedBytes = max_of(kFactors + (kNarrow ? 4 * kTileM : 0), kFlag + 16);
    // The same in global memory, of each split: rows without padding.
    static constexpr s64 kPartial = kTileM * (kDimV + 2);
    static constexpr int kColumns = kDimV / 4;  // of four elements, in which rows are merged

    // Which tile, which of its splits.
    struct Part {
        s32 tile, split, m_block, kv_head, sequence;
        XATTN_DEVICE static Part at(const ForwardParams& p, s32 index) {
            Part t;
            t.tile = index / p.num_splits, t.split = index - t.tile * p.num_splits;
            const s32 head = t.tile / p.m_blocks;
            t.m_block = t.tile - head * p.m_blocks;
            t.sequence = head / p.heads_kv, t.kv_head = head - t.sequence * p.heads_kv;
            return t;
        }
    };

    XATTN_DEVICE static void run(const ForwardParams& p, Shared shared) {
        const Part t = Part::at(p, s32(Arch::block_index()));
        const int thread = Arch::thread_index(), warp = thread / Arch::kWarpSize, lane = thread % Arch::kWarpSize;
        if (t.sequence == p.batch) return clear_rest(p, t, thread);
        if (p.status && t.kv_head == 0 && t.m_block == 0 && t.split == 0 && thread == 0)
            Sequence::report(p, t.sequence);
        const Sequence seq = Sequence::of(p, t.sequence);
        const s32 ratio = s32(p.gqa_ratio.value), row0 = t.m_block * kTileM, rows = seq.seqlen_q * ratio;
        if (row0 >= rows) return;

        // Key blocks that some row sees, and those of this split.
        const Visible visible = Visible::of(p, seq);
        const s32 first_query = S::query(p, row0), last_query = S::query(p, min_of(row0 + kTileM, rows) - 1);
        const s32 key_first = visible.first(first_query), key_last = visible.last(last_query);
        const s32 whole_from = visible.first(last_query), whole_to = visible.last(first_query) + 1;
        const s32 n_first = key_first / kTileN, blocks = key_last < key_first ? 0 : key_last / kTileN - n_first + 1;
        const s32 most = p.queue < 0 ? 1 : p.num_splits;  // without counters nobody could tell who comes last
        const s32 each = max_of(((blocks + most - 1) / most + kWarps - 1) / kWarps, 1) * kWarps;
        const s32 splits = max_of((blocks + each - 1) / each, 1);
        if (t.split >= splits) return;
        const s32 n_end = n_first + min_of(blocks, (t.split + 1) * each);
        s32 n = n_first + t.split * each + warp;

        const Shared ring = shared + kRing + warp * kRingBytes;
        const Keys keys{p, PageTable::of(p, t.sequence), t.kv_head, min_of(seq.seqlen_k, n_end * kTileN), lane};
        PageTable::Place places[kStages];
        XATTN_UNROLL
        for (int i = 0; i < kStages; ++i) places[i] = keys.find(n + i * kWarps);
        if constexpr (kNarrow)
            copy_narrow_q(p, t, seq, row0, rows, shared, warp, lane);
        else
            copy_q(p, t, seq, row0, rows, shared, thread);
        Arch::copy_commit();
        XATTN_UNROLL
        for (int i = 0; i < kStages - 1; ++i) {
            if (n + i * kWarps < n_end) keys.start(ring + i * kStageBytes, places[i]);
            Arch::copy_commit();
        }
        PageTable::Place place = places[kStages - 1];
        const Shared pq = Arch::template rows_pointer<LayoutQ>(shared, 0, lane);
        Shared pk = State::keys_pointer(ring, lane), pv = State::values_pointer(ring + LayoutK::bytes, lane);
        Shared next = ring + (kStages - 1) * kStageBytes;
        Arch::template copy_wait<kStages - 1>();
        Arch::barrier();  // Q is there for all

        State s;
        s.softmax_reset();
        s.clear_output();
        if constexpr (Config::dropout) s.dropout = Dropout::of(p);
        if (State::kKeepQ) s.keep_q(pq);
        const s64 query0 = p.cu_seqlens_q ? seq.start_q : s64(t.sequence) * p.seqlen_q;
        S scores(p, visible, t.sequence, t.kv_head * ratio, row0, lane, query0);
        XATTN_UNROLL
        for (int r = 0; r < kRows && kScaledRows; ++r)
            scores.row_factor[r] = Arch::load_float(shared + kFactors + 4 * Arch::row_of(lane, r));
        if (kNarrow) scores.factor = p.q_scale.of(t.sequence, t.kv_head) * p.k_scale.of(t.sequence, t.kv_head);

        s32 stage = 0;
        for (; n < n_end; n += kWarps) {
            const s32 ahead = n + (kStages - 1) * kWarps;
            if (ahead < n_end) keys.start(next, place);
            Arch::copy_commit();
            place = keys.find(ahead + kWarps);
            Arch::template copy_wait<kStages - 1>();
            Arch::warp_barrier();  // the block is there for all lanes
            s.multiply_qk(pq, pk);
            const s32 key0 = n * kTileN;
            s.softmax(scores, key0, key0 >= whole_from && key0 + kTileN <= whole_to);
            s.multiply_pv(pv);
            Arch::warp_barrier();  // and may be overwritten
            const s32 step = ++stage == kStages ? kStageBytes - kRingBytes : kStageBytes;
            if (stage == kStages) stage = 0;
            pk += step, pv += step;
            next = next == ring + (kStages - 1) * kStageBytes ? ring : next + kStageBytes;
        }
        Arch::template copy_wait<0>();
        Arch::barrier();  // every warp is done with its ring
        lay_down(s, shared + warp * kPartBytes, lane);
        Arch::barrier();
        if (splits == 1)
            finish(p, t, seq, row0, rows, thread, InShared{shared}, kWarps);
        else
            merge(p, t, seq, row0, rows, thread, shared, splits);
    }

  private:
    // A warp's copying of key blocks.
    struct Keys {
        const ForwardParams& p;
        PageTable table;
        s32 head, end;  // behind the last key
        int lane;

        static_assert(kTileN <= Arch::kWarpSize, "a lane looks up one key of a block");
        XATTN_DEVICE PageTable::Place find(s32 n) const {
            const s32 key = n * kTileN + lane;
            return lane < kTileN && key < end ? table.at(key) : PageTable::Place{-1, 0};
        }

        // `place`: what `find` said of the block.
        XATTN_DEVICE void start(Shared stage, const PageTable::Place& place) const {
            const Cache* k = static_cast<const Cache*>(p.k.data) + head * p.k.head_stride;
            const Cache* v = static_cast<const Cache*>(p.v.data) + head * p.v.head_stride;
            if constexpr (kDim == kDimV) {  // each key is handed over once for both
                each_chunk<kDim>(place, [&](int row, int col, PageTable::Place at) {
                    copy<LayoutK>(stage, k, p.k, row, col, at, p.head_dim);
                    copy<LayoutV>(stage + LayoutK::bytes, v, p.v, row, col, at, p.head_dim_v);
                });
            } else {
                each_chunk<kDim>(place, [&](int row, int col, PageTable::Place at) {
                    copy<LayoutK>(stage, k, p.k, row, col, at, p.head_dim);
                });
                each_chunk<kDimV>(place, [&](int row, int col, PageTable::Place at) {
                    copy<LayoutV>(stage + LayoutK::bytes, v, p.v, row, col, at, p.head_dim_v);
                });
            }
        }

        // The lane's chunks of a block of rows of kCols elements.
        template <int kCols, class Act>
        XATTN_DEVICE void each_chunk(const PageTable::Place& place, Act act) const {
            constexpr int per_row = kCols / kChunk, chunks = kTileN * per_row, lanes = Arch::kWarpSize;
            XATTN_UNROLL
            for (int i = 0; i < (chunks + lanes - 1) / lanes; ++i) {
                const int index = lane + i * lanes, row = min_of(index / per_row, kTileN - 1);
                const PageTable::Place at{Arch::shuffle(place.page, row), Arch::shuffle(place.slot, row)};
                if (chunks % lanes == 0 || index < chunks) act(row, index % per_row * kChunk, at);
            }
        }
        template <class Layout>
        XATTN_DEVICE static void copy(Shared tile, const Cache* cache, const Operand& x, int row, int col,
                                      PageTable::Place at, s32 cols) {
            const bool valid = at.page >= 0 && col < cols;
            const u32 target = Layout::chunk_at(row, col * int(sizeof(Cache)) / 2);
            Arch::copy_async(tile, target, valid ? at.in(cache, x) + col : cache, valid);
        }
    };

    // Where a row of the tile lies in a tensor like q or out.
    XATTN_DEVICE static s64 place(const Operand& x, const ForwardParams& p, const Part& t, const Sequence& seq,
                                  s32 row) {
        const s32 query = S::query(p, row), ratio = s32(p.gqa_ratio.value);
        const s64 start = p.cu_seqlens_q ? seq.start_q * x.row_stride : t.sequence * x.batch_stride;
        return start + query * x.row_stride + s64(t.kv_head * ratio + row - query * ratio) * x.head_stride;
    }

    XATTN_DEVICE static void copy_q(const ForwardParams& p, const Part& t, const Sequence& seq, s32 row0, s32 rows,
                                    Shared tile, int thread) {
        const u16* q = static_cast<const u16*>(p.q.data);
        constexpr int per_row = kDim / 8;
        for (int index = thread; index < kTileM * per_row; index += kThreads) {
            const int row = index / per_row, col = index % per_row * 8;
            const bool valid = row0 + row < rows && col < p.head_dim;
            Arch::copy_async(tile, LayoutQ::chunk_at(row, col), valid ? q + place(p.q, p, t, seq, row0 + row) + col : q,
                             valid);
        }
    }

    // The same for keys of 8 bits: a warp takes a row, a lane 16 elements. Where those become fp16, a row is multiplied
    // by the power of two that brings its largest number to 2^14, so that what falls out is less than 2^-38 of that.
    XATTN_DEVICE static void copy_narrow_q(const ForwardParams& p, const Part& t, const Sequence& seq, s32 row0,
                                           s32 rows, Shared shared, int warp, int lane) {
        const u16* q = static_cast<const u16*>(p.q.data);
        for (int row = warp; row < kTileM; row += kWarps) {
            const int col = 16 * lane;
            u32 x[8] = {};
            if (row0 + row < rows && col < p.head_dim) {
                const u16* source = q + place(p.q, p, t, seq, row0 + row) + col;
                load_words(x, source, 0), load_words(x, source, 4);
            }
            if constexpr (kScaledRows) {
                static_assert(Same<Element, bf16>::value && Same<Product, fp16>::value, "by their exponents");
                s32 top = 0;
                XATTN_UNROLL
                for (int i = 0; i < 8; ++i) top = max_of(top, max_of(s32(x[i] & 0x7fff), s32(x[i] >> 16 & 0x7fff)));
                XATTN_UNROLL
                for (int m = 1; m < Arch::kWarpSize; m *= 2) top = max_of(top, Arch::shuffle(top, lane ^ m));
                const s32 exponent = max_of(top >> 7, 16);  // 127 more than it means; smaller ones need no more room
                const float factor = Arch::number(u32(127 + 127 + 14 - exponent) << 23);
                XATTN_UNROLL
                for (int i = 0; i < 8; ++i)
                    x[i] = Arch::template pack<Product>(Arch::template to_float<Element>(u16(x[i])) * factor,
                                                        Arch::template to_float<Element>(u16(x[i] >> 16)) * factor);
                if (lane == 0) Arch::store_float(shared + kFactors + 4 * row, Arch::number(u32(exponent - 14) << 23));
            }
            if (col < kDim) Arch::template store_query<LayoutQ>(shared, row, col, x);
        }
    }
    XATTN_DEVICE static void load_words(u32 (&x)[8], const u16* source, int first) {
        u32 four[4];
        Arch::load_global(four, source + 2 * first);
        XATTN_UNROLL
        for (int i = 0; i < 4; ++i) x[first + i] = four[i];
    }

    XATTN_DEVICE static void lay_down(State& s, Shared part, int lane) {
        XATTN_UNROLL
        for (int d = 0; d < kDimV / 16; ++d) XATTN_UNROLL
        for (int e = 0; e < Arch::kElements; ++e) {
            const int row = Arch::row_of(lane, Arch::row_slot(e)), col = d * 16 + State::output_col(lane, e);
            Arch::store_float(part + (row * kPitch + col) * 4, s.acc_o[0][d].x[e]);
        }
        XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) {
            const float sum = Arch::row_sum(s.soft[0].row_sum[r]);
            if (!Arch::first_of_row(lane)) continue;
            const u32 at = part + (kTileM * kPitch + Arch::row_of(lane, r)) * 4;
            Arch::store_float(at, s.soft[0].reference[r]);
            Arch::store_float(at + kTileM * 4, sum);
        }
    }

    // Parts of a tile: the output of rows relative to their references, and the sums of their weights.
    struct InShared {
        static constexpr int kAtOnce = kWarps;
        Shared at;
        XATTN_DEVICE float reference(int part, int row) const {
            return Arch::load_float(at + part * kPartBytes + (kTileM * kPitch + row) * 4);
        }
        XATTN_DEVICE float sum(int part, int row) const {
            return Arch::load_float(at + part * kPartBytes + (kTileM * kPitch + kTileM + row) * 4);
        }
        XATTN_DEVICE void output(float (&x)[4], int part, int row, int col) const {
            Arch::load_floats(x, at + part * kPartBytes + (row * kPitch + col) * 4);
        }
    };
    struct InMemory {
        static constexpr int kAtOnce = 16;
        const float* at;
        XATTN_DEVICE float reference(int part, int row) const {
            return Arch::load_fresh(at + part * kPartial + kTileM * kDimV + row);
        }
        XATTN_DEVICE float sum(int part, int row) const {
            return Arch::load_fresh(at + part * kPartial + kTileM * (kDimV + 1) + row);
        }
        XATTN_DEVICE void output(float (&x)[4], int part, int row, int col) const {
            Arch::load_fresh(x, at + part * kPartial + row * kDimV + col);
        }
    };

    // Four elements of a row, of all parts. Many parts are under way at once: memory is far.
    struct Merged {
        float reference, sum, x[4];
        template <class Parts>
        XATTN_DEVICE static Merged of(const Parts& parts, int count, int row, int col) {
            Merged m{Soft::none(), 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
            for (int first = 0; first < count; first += Parts::kAtOnce) {
                float reference[Parts::kAtOnce], sum[Parts::kAtOnce], x[Parts::kAtOnce][4], top = m.reference;
                XATTN_UNROLL
                for (int i = 0; i < Parts::kAtOnce; ++i) {
                    const int part = min_of(first + i, count - 1);
                    reference[i] = parts.reference(part, row);
                    sum[i] = parts.sum(part, row);
                    parts.output(x[i], part, row, col);
                }
                XATTN_UNROLL
                for (int i = 0; i < Parts::kAtOnce; ++i) top = Arch::max(top, reference[i]);
                m.scale(Soft::factor(m.reference, top));
                m.reference = top;
                XATTN_UNROLL
                for (int i = 0; i < Parts::kAtOnce; ++i) {
                    const float weight = first + i < count ? Soft::factor(reference[i], top) : 0.0f;
                    m.sum += weight * sum[i];
                    XATTN_UNROLL
                    for (int c = 0; c < 4; ++c) m.x[c] += weight * x[i][c];
                }
            }
            return m;
        }
        XATTN_DEVICE void scale(float factor) {
            sum *= factor;
            XATTN_UNROLL
            for (int c = 0; c < 4; ++c) x[c] *= factor;
        }
    };

    // The last of a tile's splits puts all of them together.
    XATTN_DEVICE static void merge(const ForwardParams& p, const Part& t, const Sequence& seq, s32 row0, s32 rows,
                                   int thread, Shared shared, s32 splits) {
        float* tile = p.partials + s64(t.tile) * p.num_splits * kPartial;
        float* mine = tile + t.split * kPartial;
        for (int index = thread; index < kTileM * kColumns; index += kThreads) {
            const int row = index / kColumns, col = index % kColumns * 4;
            if (row0 + row >= rows) break;
            const Merged m = Merged::of(InShared{shared}, kWarps, row, col);
            Arch::store_floats(mine + row * kDimV + col, m.x);
            if (col == 0) mine[kTileM * kDimV + row] = m.reference, mine[kTileM * (kDimV + 1) + row] = m.sum;
        }
        Arch::device_fence();
        Arch::barrier();
        if (thread == 0) {
            u32* ended = decode_ended + p.queue * (kDecodeTiles / 4) + t.tile / 4;
            const int shift = t.tile % 4 * 8;
            const bool last = s32(Arch::atomic_add(ended, 1u << shift) >> shift & 255) + 1 == splits;
            if (last) Arch::atomic_add(ended, 0u - (u32(splits) << shift));
            Arch::store_float(shared + kFlag, last ? 1.0f : 0.0f);
        }
        Arch::barrier();
        if (Arch::load_float(shared + kFlag) == 0.0f) return;
        Arch::device_fence();
        finish(p, t, seq, row0, rows, thread, InMemory{tile}, splits);
    }

    // Merges parts, divides by the sums of the rows, and stores the output and lse.
    template <class Parts>
    XATTN_DEVICE static void finish(const ForwardParams& p, const Part& t, const Sequence& seq, s32 row0, s32 rows,
                                    int thread, const Parts& parts, int count) {
        for (int index = thread; index < kTileM * kColumns; index += kThreads) {
            const int row = index / kColumns, col = index % kColumns * 4;
            if (row0 + row >= rows) break;
            Merged m = Merged::of(parts, count, row, col);
            const s32 query = S::query(p, row0 + row), ratio = s32(p.gqa_ratio.value);
            const s32 head = t.kv_head * ratio + row0 + row - query * ratio;
            float base = Soft::base_of(m.reference), sum = m.sum, inverse;
            if (p.sinks)
                S::add_sink(p.sinks[head], base, sum, inverse);
            else
                inverse = sum == 0.0f ? 0.0f : Arch::divide(1.0f, sum);
            if constexpr (Config::dropout) inverse *= p.dropout_scale;
            if (p.lse && col == 0) {
                const s64 at =
                    head * p.lse_head_stride + query + (p.cu_seqlens_q ? seq.start_q : t.sequence * p.lse_batch_stride);
                p.lse[at] = S::lse(base, sum);
            }
            if (col < p.head_dim_v) {
                auto* out = Out::at(p.out, place(p.out, p, t, seq, row0 + row) + col);
                if (inverse == 0.0f) m.x[0] = m.x[1] = m.x[2] = m.x[3] = 0.0f;  // it has no key
                if (kNarrow && inverse != 0.0f) m.scale(p.v_scale.of(t.sequence, t.kv_head));
                if constexpr (Out::kChanged) {
                    XATTN_UNROLL
                    for (int c = 0; c < 4; ++c) m.x[c] *= inverse;
                    bool found = true;
                    Out::apply(p, m.x, t.sequence, head, query + seq.seqlen_k - seq.seqlen_q, col, found);
                    Out::report(p, found);
                    Out::store(out, m.x);
                    continue;
                }
                const u64 low = Arch::template pack<Element>(m.x[0] * inverse, m.x[1] * inverse);
                const u64 high = Arch::template pack<Element>(m.x[2] * inverse, m.x[3] * inverse);
                *reinterpret_cast<u64*>(out) = low | high << 32;
            }
        }
    }

    // Rows of a packed q that belong to no sequence come out as empty rows.
    XATTN_DEVICE static void clear_rest(const ForwardParams& p, const Part& t, int thread) {
        if (t.split != 0) return;
        const Sequence rest = Sequence::rest(p);
        const s32 ratio = s32(p.gqa_ratio.value);
        for (s32 row = t.m_block; row < rest.seqlen_q * ratio; row += p.m_blocks) {
            auto* out = Out::at(p.out, place(p.out, p, t, rest, row));
            for (s32 c = thread; c < p.head_dim_v / 8; c += kThreads) Out::template clear<8>(out + c * 8);
            if (p.lse && thread == 0) {
                const s32 query = S::query(p, row), head = t.kv_head * ratio + row - query * ratio;
                p.lse[head * p.lse_head_stride + rest.start_q + query] = -Arch::infinity();
            }
        }
    }
};

}  // namespace xattn
