// Attention forward on Hopper: TMA feeds shared memory, wgmma multiplies, warps are specialised.
//
// Roles. Warpgroup 0 produces: one lane walks the same tiles and key blocks as the consumers do and issues TMA into
// rings of kStages buffers for K and for V, and one for Q. The others consume: each owns 64 query rows of the tile.
// registers are handed over accordingly (give_registers, take_registers).
//
// Who waits for whom. full[stage] ends when TMA has delivered a block; empty[stage] when every consumer warp has said
// that it has read it. Q is copied to registers where they suffice (Config::keep_q) and its buffer is free at once.
// Consumers take turns at the tensor cores by named barriers, so that the softmax of one runs behind the products of
// another.
//
// Order of a step. S of the next block is issued before O += P V of this one, both asynchronous; the softmax of the
// next block runs while P V does. This goes on across tiles: the step that issues the last P V of a tile issues the
// first Q K^T of the next, and the tile's output is stored behind it. So the tensor cores see no seam.
//
// Registers of a consumer lane: kDimV / 2 for O, kTileN / 2 for S and its weights, kTileN / 4 for P, kDim / 4 for Q.
#pragma once

#include "arch/sm90/tma.h"
#include "arch/sm90/wgmma.h"
#include "kernels/params.h"
#include "kernels/scheduler.h"
#include "kernels/scores.h"
#include "kernels/sequence.h"
#include "kernels/softmax.h"

namespace xattn {

struct Sm90Params {
    TensorMap q, k, v;  // (head_dim, row, head, sequence), boxes of 64 columns
    ForwardParams p;
    s32 tiles;
};

template <class Config>
struct Sm90Forward {
    using Arch = Sm80<IsaSm80>;  // lane maps and scalar arithmetic
    using Element = typename Config::Element;
    using S = Scores<Arch, Config>;
    using Soft = Softmax<Arch, S, 2>;

    static constexpr int kConsumers = Config::num_warpgroups;
    static constexpr int kTileM = 64 * kConsumers, kTileN = Config::tile_n, kStages = Config::num_stages;
    static constexpr int kDim = Config::head_dim, kDimV = Config::head_dim_v;
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kPanels = (kDim + 63) / 64, kPanelsV = (kDimV + 63) / 64;
    static constexpr int kKeyGroups = kTileN / 16, kDimGroups = kDimV / 16;

    static constexpr u32 kPanelQ = kTileM * 128, kPanelK = kTileN * 128;
    static constexpr u32 kBytesQ = kPanels * kPanelQ, kBytesK = kPanels * kPanelK, kBytesV = kPanelsV * kPanelK;
    static constexpr u32 kAtK = kBytesQ, kAtV = kAtK + kStages * kBytesK, kAtBarriers = kAtV + kStages * kBytesV;
    static constexpr u32 kSharedBytes = kAtBarriers + 8 * (2 + 4 * kStages);
    static constexpr int kRegisters = kConsumers == 1 ? 240 : kConsumers == 2 ? 240 : 160;
    static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;

    struct Buffers {
        u32 base;
        XATTN_DEVICE u32 k(u32 stage) const { return base + kAtK + stage * kBytesK; }
        XATTN_DEVICE u32 v(u32 stage) const { return base + kAtV + stage * kBytesV; }
        XATTN_DEVICE Barrier barrier(u32 n) const { return {base + kAtBarriers + 8 * n}; }
        XATTN_DEVICE Barrier q_full() const { return barrier(0); }
        XATTN_DEVICE Barrier q_empty() const { return barrier(1); }
        XATTN_DEVICE Barrier k_full(u32 stage) const { return barrier(2 + stage); }
        XATTN_DEVICE Barrier k_empty(u32 stage) const { return barrier(2 + kStages + stage); }
        XATTN_DEVICE Barrier v_full(u32 stage) const { return barrier(2 + 2 * kStages + stage); }
        XATTN_DEVICE Barrier v_empty(u32 stage) const { return barrier(2 + 3 * kStages + stage); }
    };

    // A tile and the key blocks that some of its rows see: [n_first, n_last].
    struct Work {
        Tile tile;
        Sequence seq;
        s32 row0, n_first, n_last;

        XATTN_DEVICE bool empty() const { return n_last < n_first; }
        XATTN_DEVICE bool exists() const { return row0 < seq.seqlen_q; }
    };

    XATTN_DEVICE static Work work_at(const ForwardParams& p, s32 index) {
        Work w;
        w.tile = tile_at(p, u32(index));
        const bool rest = w.tile.sequence == p.batch;
        w.seq = rest ? Sequence::rest(p) : Sequence::of(p, w.tile.sequence);
        w.row0 = w.tile.m_block * kTileM;
        const Visible visible = Visible::of(p, w.seq);
        const s32 first = visible.first(w.row0), last = visible.last(min_of(w.row0 + kTileM, w.seq.seqlen_q) - 1);
        w.n_first = first / kTileN;
        w.n_last = last < first || !w.exists() ? w.n_first - 1 : last / kTileN;
        return w;
    }

    XATTN_DEVICE static void run(const Sm90Params& params, u32 shared) {
        const Buffers buffers{shared};
        const int thread = Arch::thread_index();
        const int warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);
        if (thread == 0) {
            buffers.q_full().init(1), buffers.q_empty().init(4 * kConsumers);
            for (u32 s = 0; s < kStages; ++s) {
                buffers.k_full(s).init(1), buffers.k_empty(s).init(4 * kConsumers);
                buffers.v_full(s).init(1), buffers.v_empty(s).init(4 * kConsumers);
            }
            make_barriers_visible();
        }
        Arch::barrier();
        if (warpgroup == 0) {
            give_registers<kProducerRegisters>();
            if (thread < 32 && elected()) Producer(params, buffers).run();
        } else {
            take_registers<kRegisters>();
            Consumer consumer(params, buffers, warpgroup - 1);
            consumer.run();
        }
    }

    // What a consumer carries of a tile through its loop; the rest is worked out again where it is needed.
    struct Span {
        s32 index;
        s32 n_first, n_last;
        s32 whole_from, whole_to;  // keys that every row of the group sees
        s32 valid;                 // keys of block n_last, where what lies behind them must be cleared from V

        XATTN_DEVICE static Span of(const ForwardParams& p, const Work& w, s32 index, int group) {
            const Visible visible = Visible::of(p, w.seq);
            const s32 first_row = w.row0 + group * 64, last_row = min_of(first_row + 64, w.seq.seqlen_q) - 1;
            const bool unknown_end = p.seqused_k || p.cu_seqlens_k;
            return {index,
                    w.n_first,
                    w.n_last,
                    visible.first(last_row),
                    visible.last(first_row) + 1,
                    unknown_end ? min_of(w.seq.seqlen_k - w.n_last * kTileN, kTileN) : kTileN};
        }
    };

    // ---------------------------------------------------------------- the producer: one lane
    struct Producer {
        const Sm90Params& params;
        const Buffers buffers;
        Ring<kStages> k{0, 1}, v{0, 1};
        u32 q_parity = 1;

        XATTN_DEVICE Producer(const Sm90Params& ps, const Buffers& b) : params(ps), buffers(b) {}

        XATTN_DEVICE void run() {
            tma_prefetch(&params.q), tma_prefetch(&params.k), tma_prefetch(&params.v);
            Work before;
            bool pending = false;  // the last V of the tile before is loaded behind the first K of this one
            for (s32 index = Arch::block_index(); index < params.tiles; index += gridDim.x) {
                const Work w = work_at(params.p, index);
                if (w.empty()) continue;
                load_q(w);
                load_k(w, w.n_last);
                if (pending) load_v(before, before.n_first);
                for (s32 n = w.n_last - 1; n >= w.n_first; --n) load_k(w, n), load_v(w, n + 1);
                before = w, pending = true;
            }
            if (pending) load_v(before, before.n_first);
        }

      private:
        XATTN_DEVICE s32 kv_head(const Work& w) const { return s32(quotient(u32(w.tile.head), params.p.gqa_ratio)); }

        XATTN_DEVICE void load_q(const Work& w) {
            const Barrier full = buffers.q_full();
            buffers.q_empty().wait(q_parity);
            q_parity ^= 1;
            full.arrive_and_expect(kBytesQ);
            const s32 sequence = params.p.cu_seqlens_q ? 0 : w.tile.sequence;
            XATTN_UNROLL
            for (u32 c = 0; c < kPanels; ++c)
                tma_load(buffers.base + c * kPanelQ, &params.q, full, s32(64 * c), s32(w.seq.start_q) + w.row0,
                         w.tile.head, sequence);
        }
        XATTN_DEVICE void load_k(const Work& w, s32 n) {
            const Barrier full = buffers.k_full(k.stage);
            buffers.k_empty(k.stage).wait(k.parity);
            full.arrive_and_expect(kBytesK);
            load<kPanels>(buffers.k(k.stage), &params.k, full, w, n);
            k.next();
        }
        XATTN_DEVICE void load_v(const Work& w, s32 n) {
            const Barrier full = buffers.v_full(v.stage);
            buffers.v_empty(v.stage).wait(v.parity);
            full.arrive_and_expect(kBytesV);
            load<kPanelsV>(buffers.v(v.stage), &params.v, full, w, n);
            v.next();
        }
        template <u32 panels>
        XATTN_DEVICE void load(u32 target, const TensorMap* map, Barrier full, const Work& w, s32 n) {
            const s32 sequence = params.p.cu_seqlens_k ? 0 : w.tile.sequence;
            XATTN_UNROLL
            for (u32 c = 0; c < panels; ++c)
                tma_load(target + c * kPanelK, map, full, s32(64 * c), s32(w.seq.start_k) + n * kTileN, kv_head(w),
                         sequence);
        }
    };

    // ---------------------------------------------------------------- a consumer: one of 128 lanes
    struct Consumer {
        const ForwardParams& p;
        const s32 tiles;
        const Buffers buffers;
        const int group, thread, warp, lane;
        Ring<kStages> k{0, 0}, v{0, 0};
        u32 q_parity = 0;
        Accumulator acc_s[kKeyGroups];
        Accumulator acc_o[kDimGroups];
        OperandA weights[kKeyGroups];
        OperandA q[Config::keep_q ? kDim / 16 : 1];
        Soft soft;

        XATTN_DEVICE Consumer(const Sm90Params& ps, const Buffers& b, int warpgroup)
            : p(ps.p),
              tiles(ps.tiles),
              buffers(b),
              group(warpgroup),
              thread(Arch::thread_index() % 128),
              warp(__shfl_sync(0xffffffffu, thread / 32, 0)),
              lane(thread % 32) {}

        XATTN_DEVICE void run() {
            s32 index = Arch::block_index();
            Span w;
            if (!next(w, index)) return;
            if (group == kConsumers - 1) pass_turn();  // the first turn is the first group's
            take_q();
            buffers.k_full(k.stage).wait(k.parity);
            take_turn();
            issue_qk();
            pass_turn();
            wgmma_wait<0>();
            hold(acc_s);
            release_k();
            soft.reset();
            float factor[2];
            softmax(w, w.n_last, factor);
            to_weights();
            s32 add = 0, n = w.n_last;
            for (;;) {
                // The weights of block n are ready, its P V is not issued. With it goes S of the block that follows.
                const bool last = n == w.n_first;
                Span following = w;
                s32 m = n - 1;
                Soft done;
                if (last) {
                    if (!Config::keep_q) free_q();
                    if (!next(following, index)) break;
                    m = following.n_last;
                    done = soft;
                    soft.reset();
                    take_q();
                }
                const bool moved = step(following, m, w, n, add, factor);
                to_weights();
                add = 1;
                if (last) {
                    finish(w, done);
                    add = 0;
                } else if (moved) {
                    rescale(factor);
                }
                w = following;
                n = m;
            }
            buffers.v_full(v.stage).wait(v.parity);
            clear_tail(w, w.n_first);
            issue_pv(add);
            wgmma_wait<0>();
            hold(acc_o);
            finish(w, soft);
        }

      private:
        // ---- tiles
        // The next tile with keys to see; rows of those without are written on the way.
        XATTN_DEVICE bool next(Span& span, s32& index) {
            for (; index < tiles; index += gridDim.x) {
                const Work w = work_at(p, index);
                if (p.status && w.tile.sequence < p.batch && w.tile.head == 0 && w.tile.m_block == 0 && group == 0 &&
                    thread == 0)
                    Sequence::report(p, w.tile.sequence);
                if (!w.empty()) {
                    span = Span::of(p, w, index, group);
                    index += gridDim.x;
                    return true;
                }
                write_empty(w);
            }
            return false;
        }

        XATTN_DEVICE void write_empty(const Work& w) {
            const bool rest = w.tile.sequence == p.batch;
            // Tiles of the rows behind the last offset share them; other tiles own theirs.
            const s32 step = rest ? kTileM * p.m_blocks : w.seq.seqlen_q;
            for (s32 from = w.row0; from < w.seq.seqlen_q; from += step) {
                for (s32 r = from + group * 64 + warp; r < min_of(from + (group + 1) * 64, w.seq.seqlen_q); r += 4) {
                    u16* out = row_of_out(w, r);
                    for (s32 c = lane * 8; c < p.head_dim_v; c += 256)
                        *reinterpret_cast<Chunk*>(out + c) = Chunk{{0, 0, 0, 0}};
                    if (p.lse && lane == 0) {
                        const bool sink = p.sinks && !rest;
                        lse_at(w, r) = sink ? p.sinks[w.tile.head] : -Arch::infinity();
                    }
                }
            }
        }

        // ---- turns at the tensor cores
        XATTN_DEVICE void take_turn() {
            if (kConsumers > 1) named_barrier_sync(1 + group, 256);
        }
        XATTN_DEVICE void pass_turn() {
            if (kConsumers > 1) named_barrier_arrive(1 + (group == kConsumers - 1 ? 0 : group + 1), 256);
        }

        // ---- buffers
        XATTN_DEVICE void arrive(Barrier b) {
            if (lane == 0) b.arrive();
        }
        XATTN_DEVICE void take_q() {
            buffers.q_full().wait(q_parity);
            q_parity ^= 1;
            if (Config::keep_q) {
                const int row = group * 64 + warp * 16 + (lane & 15);
                XATTN_UNROLL
                for (int c = 0; c < kDim / 16; ++c) {
                    const u32 chunk = u32(c % 4 * 2 + (lane >> 4)) ^ u32(row & 7);
                    IsaSm80::ldmatrix(q[Config::keep_q ? c : 0].x,
                                      buffers.base + c / 4 * kPanelQ + row * 128 + chunk * 16);
                }
                Arch::warp_barrier();
                free_q();
            }
        }
        XATTN_DEVICE void free_q() { arrive(buffers.q_empty()); }
        XATTN_DEVICE void release_k() {
            arrive(buffers.k_empty(k.stage));
            k.next();
        }
        XATTN_DEVICE void release_v() {
            arrive(buffers.v_empty(v.stage));
            v.next();
        }

        // Rows of V behind the sequence's last key may hold anything, where TMA does not know where it ends; a weight
        // of 0 does not silence a NaN. Every group does it for itself.
        XATTN_DEVICE void clear_tail(const Span& w, s32 n) {
            const s32 valid = w.valid;
            if (valid == kTileN || n != w.n_last) return;
            const u32 from = buffers.v(v.stage);
            for (int c = thread; c < (kTileN - valid) * 8 * kPanelsV; c += 128) {
                const int panel = c / ((kTileN - valid) * 8), rest = c % ((kTileN - valid) * 8);
                const u32 at = from + panel * kPanelK + valid * 128 + rest * 16;
                asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
            }
            fence_async_proxy();
            named_barrier_sync(1 + kConsumers + group, 128);
        }

        // ---- products
        XATTN_DEVICE void issue_qk() {
            wgmma_fence();
            hold(acc_s);
            const Matrix keys = Matrix::rows(buffers.k(k.stage));
            const Matrix rows = Matrix::rows(buffers.base + group * 64 * 128);
            XATTN_UNROLL
            for (int c = 0; c < kDim / 16; ++c) {
                const Matrix b = keys.moved(c / 4 * kPanelK + c % 4 * 32);
                if (Config::keep_q)
                    Wgmma<Element, kTileN>::template rs<0>(acc_s, q[Config::keep_q ? c : 0], b, c > 0);
                else
                    Wgmma<Element, kTileN>::ss(acc_s, rows.moved(c / 4 * kPanelQ + c % 4 * 32), b, c > 0);
            }
            wgmma_commit();
        }
        XATTN_DEVICE void issue_pv(s32 add) {
            wgmma_fence();
            hold(acc_o);
            const Matrix values = Matrix::summed(buffers.v(v.stage), kPanelK);
            XATTN_UNROLL
            for (int n = 0; n < kKeyGroups; ++n)
                Wgmma<Element, kDimV>::template rs<1>(acc_o, weights[n], values.moved(n * 16 * 128), n ? 1 : add);
            wgmma_commit();
        }

        // Issues S of block n of `w` and O += P V of block m of `before`; the softmax of the one runs beside the other.
        // Returns whether the output must be rescaled by `factor`.
        XATTN_DEVICE bool step(const Span& w, s32 n, const Span& before, s32 m, s32 add, float (&factor)[2]) {
            buffers.k_full(k.stage).wait(k.parity);
            take_turn();
            issue_qk();
            buffers.v_full(v.stage).wait(v.parity);
            clear_tail(before, m);
            issue_pv(add);
            pass_turn();
            wgmma_wait<1>();
            hold(acc_s);
            release_k();
            const bool moved = softmax(w, n, factor);
            wgmma_wait<0>();
            hold(acc_s), hold(acc_o);
            release_v();
            return moved;
        }

        // ---- the softmax of a block, as the shared body does it
        XATTN_DEVICE bool softmax(const Span& span, s32 n, float (&factor)[2]) {
            const s32 key0 = n * kTileN;
            const bool whole = key0 >= span.whole_from && key0 + kTileN <= span.whole_to;
            if (!S::kPlain || !whole) {
                const Work w = work_at(p, Arch::fresh(span.index));
                const s32 row0 = w.row0 + group * 64 + warp * 16;
                const S scores(p, Visible::of(p, w.seq), w.tile.sequence, w.tile.head, row0, lane);
                scores.modify(acc_s, 0, key0);
                if (!whole) scores.mask(acc_s, 0, key0);
            }
            // Two chains for each row, of the left and the right half of every 16 columns: one would wait for itself.
            float part[2][2];
            XATTN_UNROLL
            for (int g = 0; g < kKeyGroups; ++g) XATTN_UNROLL
            for (int e = 0; e < 8; ++e) {
                float& most = part[Arch::row_slot(e)][e >> 2];
                most = g == 0 && e % 2 == 0 ? acc_s[g].x[e] : Arch::max(most, acc_s[g].x[e]);
            }
            float largest[2] = {Arch::max(part[0][0], part[0][1]), Arch::max(part[1][0], part[1][1])};
            S::to_scores(p, largest);
            const bool moved = soft.move_reference(largest, factor);
            const float base[2] = {soft.base(0), soft.base(1)};
            XATTN_UNROLL
            for (int g = 0; g < kKeyGroups; ++g) XATTN_UNROLL
            for (int e = 0; e < 8; ++e) {
                const int r = Arch::row_slot(e);
                float& sum = part[r][e >> 2];
                acc_s[g].x[e] = S::weight(p, acc_s[g].x[e], base[r]);
                sum = g == 0 && e % 2 == 0 ? acc_s[g].x[e] : sum + acc_s[g].x[e];
            }
            XATTN_UNROLL
            for (int r = 0; r < 2; ++r) soft.row_sum[r] += part[r][0] + part[r][1];
            return moved;
        }
        XATTN_DEVICE void to_weights() {
            XATTN_UNROLL
            for (int g = 0; g < kKeyGroups; ++g) weights[g] = Arch::template weights<Element>(acc_s[g]);
        }
        XATTN_DEVICE void rescale(const float (&factor)[2]) {
            XATTN_UNROLL
            for (int g = 0; g < kDimGroups; ++g) XATTN_UNROLL
            for (int e = 0; e < 8; ++e) acc_o[g].x[e] *= factor[Arch::row_slot(e)];
        }

        // ---- the output
        XATTN_DEVICE u16* row_of_out(const Work& w, s32 row) const {
            const s64 at = p.cu_seqlens_q ? w.seq.start_q * p.out.row_stride : w.tile.sequence * p.out.batch_stride;
            return static_cast<u16*>(p.out.data) + at + w.tile.head * p.out.head_stride + s64(row) * p.out.row_stride;
        }
        XATTN_DEVICE float& lse_at(const Work& w, s32 row) const {
            return p.lse[p.cu_seqlens_q ? w.tile.head * p.lse_head_stride + w.seq.start_q + row
                                        : w.tile.sequence * p.lse_batch_stride + w.tile.head * p.lse_head_stride + row];
        }

        // Divides by the row sums and stores. Four lanes hold a row in pieces of 2 columns of each 8; they exchange
        // them so that each stores 16 bytes at once.
        XATTN_DEVICE void finish(const Span& span, const Soft& s) {
            const Work w = work_at(p, Arch::fresh(span.index));
            const int quad = lane & 3;
            XATTN_UNROLL
            for (int r = 0; r < 2; ++r) {
                const s32 row = w.row0 + group * 64 + warp * 16 + Arch::row_of(lane, r);
                const bool exists = row < w.seq.seqlen_q;
                float sum = Arch::row_sum(s.row_sum[r]), base = s.base(r), inverse;
                if (p.sinks)
                    S::add_sink(p.sinks[w.tile.head], base, sum, inverse);
                else
                    inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
                if (p.lse && exists && quad == 0) lse_at(w, row) = S::lse(base, sum);
                u16* out = row_of_out(w, row);
                XATTN_UNROLL
                for (int c = 0; c < kDimV / 32; ++c) {
                    u32 x[4];
                    XATTN_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        const float* pair = &acc_o[2 * c + i / 2].x[4 * (i % 2) + 2 * r];
                        x[i] = IsaSm80::pack(Element{}, pair[0] * inverse, pair[1] * inverse);
                    }
                    transpose(x, quad);
                    const s32 col = 32 * c + 8 * quad;
                    if (exists && col < p.head_dim_v)
                        *reinterpret_cast<Chunk*>(out + col) = Chunk{{x[0], x[1], x[2], x[3]}};
                }
            }
        }
        // x[i] of lane j of four becomes x[j] of lane i.
        XATTN_DEVICE static void transpose(u32 (&x)[4], int quad) {
            const bool odd = quad & 1, upper = quad & 2;
            const u32 a = __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[1], 1);
            const u32 b = __shfl_xor_sync(0xffffffffu, odd ? x[2] : x[3], 1);
            if (odd)
                x[0] = a, x[2] = b;
            else
                x[1] = a, x[3] = b;
            const u32 c = __shfl_xor_sync(0xffffffffu, upper ? x[0] : x[2], 2);
            const u32 d = __shfl_xor_sync(0xffffffffu, upper ? x[1] : x[3], 2);
            if (upper)
                x[0] = c, x[1] = d;
            else
                x[2] = c, x[3] = d;
        }
    };
};

}  // namespace xattn
