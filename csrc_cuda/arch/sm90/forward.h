// Attention forward on Hopper: TMA feeds shared memory, wgmma multiplies, warps are specialised.
//
// Roles. Warpgroup 0 gives: its first warp finds tiles and writes them into a ring (tiles.h); one lane of its second
// reads them and issues TMA into rings of kStages buffers for K and for V, and kQueries for Q; of a paged cache all
// lanes of two warps do, each for a piece of a block that lies in one page. The other warpgroups consume: each owns 64
// query rows of the tile. Registers are handed over accordingly.
//
// Who waits for whom. full[stage] ends when TMA has delivered a block; empty[stage] when every consumer warp has said
// that it has read it. Q is copied to registers where they suffice (Config::keep_q) and its buffer is free at once.
// A Work is free when the loader and every consumer warp have done with its tile, output included. Consumers take turns
// at the tensor cores by named barriers, so that the softmax of one runs behind the products of another.
//
// Order of a step. S of the next block is issued before O += P V of this one, both asynchronous; the softmax of the
// next block runs while P V does. This goes on across tiles: the step that issues the last P V of a tile issues the
// first Q K^T of the next, and the tile's output is stored behind it. So the tensor cores see no seam.
//
// 8-bit elements. V goes through two warps more on its way to the consumers (transpose.h), and a tile has factors for
// its scores and its output, which its Work holds. The rest counts in bytes: 32 of a row are a product's.
//
// Registers of a consumer lane: kDimV / 2 for O, kTileN / 2 for S and its weights, kTileN / 4 for P, kDim / 4 for Q
// where it is kept. What a tile is, is read from its Work again where it is needed, and costs none.
#pragma once

#include "arch/sm90/loader.h"
#include "arch/sm90/tiles.h"
#include "arch/sm90/tma.h"
#include "arch/sm90/transpose.h"
#include "arch/sm90/wgmma.h"
#include "kernels/output.h"
#include "kernels/params.h"
#include "kernels/scores.h"
#include "kernels/softmax.h"

namespace xattn {

// Forward: ForwardParams, and what the user's functions hold.
template <class Forward>
struct Sm90Params {
    TensorMap q, k, v;  // (head_dim, row, head, sequence), or (head_dim, slot, head, page); boxes of 128 bytes
    Forward p;
    s32 tiles;
    s32 queue;  // number of the launch's work queue; -1: none
    s32 piece;  // rows of a box of k and v; of a paged cache they are in one page, otherwise a block
};

template <class Config>
struct Sm90Forward {
    using Arch = Sm80<IsaSm80>;  // lane maps and scalar arithmetic
    using Params = Sm90Params<typename Config::Functions::Params>;
    using Element = typename Config::Element;
    using Out = Output<Arch, Config>;
    using Place = xattn::Place<typename Out::Element>;
    using S = Scores<Arch, Config, false, sizeof(Element) == 1>;
    using Limits = typename S::Limits;
    using Soft = Softmax<Arch, S, 2, true>;

    static constexpr int kConsumers = Config::num_warpgroups;
    static constexpr int kTileM = 64 * kConsumers, kTileN = Config::tile_n, kStages = Config::num_stages;
    static constexpr int kQueries = Config::q_stages, kWorks = 4;
    static constexpr int kDim = Config::head_dim, kDimV = Config::head_dim_v;
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr bool kPaged = Config::paged, kKeepQ = Config::keep_q;
    static constexpr int kWidth = sizeof(Element);
    static constexpr bool kNarrow = kWidth == 1;
    static constexpr int kTransposers = kNarrow ? 2 : 0;  // warps
    static constexpr int kPanels = (kDim * kWidth + 127) / 128, kPanelsV = (kDimV * kWidth + 127) / 128,
                         kPanelsOut = (kDimV + 63) / 64;
    static constexpr int kKeyGroups = kTileN / 16, kDimGroups = kDimV / 16;
    static constexpr int kProductsQ = kDim * kWidth / 32, kProductsV = kTileN * kWidth / 32;

    static constexpr u32 kPanelQ = kTileM * 128, kPanelK = kTileN * 128, kPanelT = kDimV * 128;
    static constexpr u32 kBytesQ = kPanels * kPanelQ, kBytesK = kPanels * kPanelK, kBytesLanded = kPanelsV * kPanelK,
                         kBytesV = kNarrow ? (kTileN + 127) / 128 * kPanelT : kBytesLanded;
    static constexpr u32 kAtK = kQueries * kBytesQ, kAtV = kAtK + kStages * kBytesK,
                         kAtLanded = kNarrow ? kAtV + kStages * kBytesV : kAtV;
    static constexpr u32 kAtOutput = kAtLanded + kStages * kBytesLanded;
    // The output is laid down in shared memory in panels of its own, if all of them fit; else where Q was, if Q is not
    // read there any more when the next tile begins; else in the panels that fit, some at a time; else nowhere.
    static constexpr int kFitting = int(min_of(u32(kPanelsOut), (226 * 1024 - kAtOutput) / kPanelQ));
    static constexpr bool kOverQ = kFitting < kPanelsOut && (Config::keep_q || kQueries == 2);
    static constexpr int kStagePanels = kOverQ ? kPanels : kFitting;  // 0: it is stored directly
    static constexpr u32 kAtWorks = kAtOutput + (kOverQ ? 0 : kFitting * kPanelQ),
                         kAtBarriers = kAtWorks + kWorks * Work::kBytes;
    static constexpr u32 kSharedBytes = kAtBarriers + 8 * (2 * kQueries + (kNarrow ? 6 : 4) * kStages + 2 * kWorks);
    // What a launch allots to a thread is what __launch_bounds__ leaves; the sum must stay what it was.
    static constexpr int kAllotted = kConsumers == 3 ? 128 : kConsumers == 2 ? 168 : 248;
    // What looking up pages and turning V take.
    static constexpr int kMore = (Config::paged || kNarrow) && kConsumers == 2 ? 8 : 0;
    static constexpr int kRegisters = kConsumers == 3 ? 160 : 240 - kMore,
                         kGiverRegisters = kConsumers == 3 ? 32 : 24 + 2 * kMore;
    static_assert(kGiverRegisters + kConsumers * kRegisters <= (kConsumers + 1) * kAllotted, "setmaxnreg would wait");

    // Where registers are short, a tile's sums are taken ahead of the next tile's products: two numbers are kept then,
    // not four.
    static constexpr bool kCloseEarly = kConsumers == 3;

    struct Buffers {
        u32 base;
        XATTN_DEVICE u32 q(u32 stage) const { return base + stage * kBytesQ; }
        XATTN_DEVICE u32 k(u32 stage) const { return base + kAtK + stage * kBytesK; }
        XATTN_DEVICE u32 v(u32 stage) const { return base + kAtV + stage * kBytesV; }
        XATTN_DEVICE u32 landed(u32 stage) const { return base + kAtLanded + stage * kBytesLanded; }  // V by TMA
        XATTN_DEVICE u32 output(u32 stage) const { return kOverQ ? q(stage) : base + kAtOutput; }
        XATTN_DEVICE u32 work(u32 stage) const { return base + kAtWorks + stage * Work::kBytes; }
        XATTN_DEVICE Barrier barrier(u32 n) const { return {base + kAtBarriers + 8 * n}; }
        XATTN_DEVICE Barrier work_full(u32 stage) const { return barrier(stage); }
        XATTN_DEVICE Barrier work_empty(u32 stage) const { return barrier(kWorks + stage); }
        XATTN_DEVICE Barrier q_full(u32 stage) const { return barrier(2 * kWorks + stage); }
        XATTN_DEVICE Barrier q_empty(u32 stage) const { return barrier(2 * kWorks + kQueries + stage); }
        XATTN_DEVICE Barrier k_full(u32 stage) const { return barrier(kFirst + stage); }
        XATTN_DEVICE Barrier k_empty(u32 stage) const { return barrier(kFirst + kStages + stage); }
        XATTN_DEVICE Barrier v_full(u32 stage) const { return barrier(kFirst + 2 * kStages + stage); }
        XATTN_DEVICE Barrier v_empty(u32 stage) const { return barrier(kFirst + 3 * kStages + stage); }
        XATTN_DEVICE Barrier landed_full(u32 stage) const { return kNarrow ? barrier(kLanded + stage) : v_full(stage); }
        XATTN_DEVICE Barrier landed_empty(u32 stage) const {
            return kNarrow ? barrier(kLanded + kStages + stage) : v_empty(stage);
        }

      private:
        static constexpr u32 kFirst = 2 * kWorks + 2 * kQueries, kLanded = kFirst + 4 * kStages;
    };

    // Rows of a block of V become 0 from `valid` on; `thread` of `threads` that share this.
    XATTN_DEVICE static void clear_rows(u32 block, s32 valid, int thread, int threads) {
        for (int panel = 0; panel < kPanelsV; ++panel, block += kPanelK)
#pragma unroll 1
            for (u32 at = valid * 128 + thread * 16; at < kPanelK; at += threads * 16)
                IsaSm80::store_shared(block + at, Chunk{});
    }

    XATTN_DEVICE static void run(const Params& params, u32 shared) {
        const Buffers buffers{shared};
        const int thread = Arch::thread_index();
        const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
        const u32 loaders = Loader<Sm90Forward>::warps(params);
        if (thread == 0) {
            for (u32 s = 0; s < kWorks; ++s)
                buffers.work_full(s).init(1), buffers.work_empty(s).init(4 * kConsumers + loaders + kTransposers);
            for (u32 s = 0; s < kQueries; ++s) buffers.q_full(s).init(1), buffers.q_empty(s).init(4 * kConsumers);
            for (u32 s = 0; s < kStages; ++s) {
                buffers.k_full(s).init(1), buffers.k_empty(s).init(4 * kConsumers);
                buffers.v_full(s).init(kNarrow ? kTransposers : 1), buffers.v_empty(s).init(4 * kConsumers);
                if (kNarrow) buffers.landed_full(s).init(1), buffers.landed_empty(s).init(kTransposers);
            }
            make_barriers_visible();
        }
        Arch::barrier();
        if (warp < 4) {
            give_registers<kGiverRegisters>();
            if (warp == 0) {
                using Finder = TileFinder<Out, kTileM, kTileN, kWorks, kNarrow, kPaged>;
                Finder{params.p, buffers.work(0), buffers.work_full(0).address, params.tiles, params.queue, thread}
                    .run();
            } else if (warp == 1 && (Config::paged || elected())) {
                Loader<Sm90Forward> loader(params, buffers, thread % 32);
                if (loaders == 1)
                    loader.run();
                else
                    loader.template run_part<false>();
            } else if (Config::paged && warp == 2) {
                if (loaders == 2) Loader<Sm90Forward>(params, buffers, thread % 32).template run_part<true>();
            } else if (warp >= 2) {
                if constexpr (kNarrow) Transposer<Sm90Forward>{params.p, buffers, warp - 2, thread % 32}.run();
            }
        } else {
            take_registers<kRegisters>();
            Consumer consumer(params.p, buffers, warp / 4 - 1);
            consumer.run();
        }
    }

    // ---------------------------------------------------------------- a consumer: one of 128 lanes
    struct Consumer {
        // What a consumer carries of a tile through its loop.
        struct Span {
            u32 slot;  // of its Work
            s32 n_first;
            // Key blocks that every row of the group sees whole: from the high half on, up to the low half. Blocks that
            // 16 bits cannot name are taken as others.
            u32 whole;

            XATTN_DEVICE static u32 blocks(s32 from, s32 to) {
                return u32(min_of(max_of(from, 0), 0xffff)) << 16 | u32(min_of(max_of(to, 0), 0xffff));
            }
            XATTN_DEVICE bool is_whole(s32 n) const { return n >= s32(whole >> 16) && n < s32(whole & 0xffff); }
        };

        const ForwardParams& p;
        const Buffers buffers;
        const int group;
        Ring<kWorks> works;
        Ring<kQueries> queries;
        Ring<kStages> k;
        Accumulator acc_s[kKeyGroups];
        Accumulator acc_o[kDimGroups];
        OperandA weights[kProductsV];
        OperandA q[Config::keep_q ? kProductsQ : 1];
        Soft soft;
        float
            tile_scale;  // of the scores of the tile whose softmax is under way: all scales in one, or those of q and k
        Dropout dropout;  // where there is any

        XATTN_DEVICE Consumer(const ForwardParams& params, const Buffers& b, int warpgroup)
            : p(params), buffers(b), group(warpgroup) {
            if constexpr (Config::dropout) dropout = Dropout::of(p);
        }

        XATTN_DEVICE void run() {
            Span w;
            s32 n;
            if (!next(w, n)) return;
            if (group == kConsumers - 1) pass_turn();  // the first turn is the first group's
            take_q();
            if (Config::keep_q) free_q(0);
            buffers.k_full(k.stage()).wait(k.parity());
            take_turn();
            issue_qk();
            pass_turn();
            wgmma_wait<0>();
            hold(acc_s);
            release_k();
            k.next();
            soft.reset();
            float factor[2];
            const bool masked = is_masked(w, n);
            softmax(w, n, masked, limits(w, n, masked), factor);
            to_weights();
            clear_output();
            for (;;) {
                // The weights of block n are ready, its P V is not issued. With it goes S of the block that follows.
                const bool last = Arch::any(n == w.n_first);
                Span following = w;
                s32 m = n - 1;
                Inverse inverse;
                Soft done;
                if (XATTN_RARELY(last)) {
                    if (!kOverQ && !Config::keep_q) free_q(queries.stage());
                    if (!next(following, m)) break;
                    if (kCloseEarly)
                        inverse = close(w, soft);
                    else
                        done = soft;
                    soft.reset();
                    if (!Config::keep_q) queries.next();
                    take_q();
                    if (!kOverQ && Config::keep_q) free_q(0);
                }
                const bool moved = step<false>(following, m, w, n, factor);
                to_weights();
                if (XATTN_RARELY(last)) {
                    Ring<kQueries> before = queries;
                    before.back();
                    finish(w, before.stage(), kCloseEarly ? inverse : close(w, done));
                    clear_output();
                    if (kOverQ) free_q(before.stage());
                } else if (XATTN_RARELY(moved)) {
                    rescale(factor);
                }
                w = following;
                n = m;
                if (!S::kModifies) n = whole_blocks(w, n, factor);
            }
            buffers.v_full(v().stage()).wait(v().parity());
            clear_tail(w, n);
            issue_pv();
            wgmma_wait<0>();
            hold(acc_o);
            finish(w, queries.stage(), close(w, soft));
        }

      private:
        // Read again where they are needed.
        XATTN_DEVICE static int thread() { return IsaSm80::thread_index_again() % 128; }
        XATTN_DEVICE static int warp() { return thread() / 32; }
        XATTN_DEVICE static int lane() { return thread() % 32; }

        // ---- tiles
        // The next tile and its last block.
        XATTN_DEVICE bool next(Span& span, s32& n_last) {
            buffers.work_full(works.stage()).wait(works.parity());
            const u32 at = buffers.work(works.stage());
            const Work::Rows rows = Work::Rows::at(at);
            if (rows.rows == Work::kEnd) return false;
            const typename Work::Keys keys = Work::Keys::at(at);
            const Visible visible = keys.visible(p);
            const s32 first_row = rows.row0 + group * 64;
            const s32 last_row = min_of(first_row + 64, rows.row0 + rows.rows) - 1;
            span = {
                works.stage(), keys.n_first,
                Span::blocks((visible.first(last_row) + kTileN - 1) / kTileN, (visible.last(first_row) + 1) / kTileN)};
            n_last = keys.n_last;
            if (kNarrow) {
                tile_scale = Work::Factors::at(at).scores;
                if (S::kPlain) tile_scale = tamed(tile_scale * p.scale);
            }
            works.next();
            return true;
        }
        // A scale of size from 2^-100 to the largest float: one of 0 makes scores that differ by nothing, and NaN
        // stays.
        XATTN_DEVICE static float tamed(float scale) {
            const float size = scale < 0.0f ? -scale : scale, most = 3.402823466e38f, least = 7.888609052e-31f;
            const float within = size > most ? most : size < least ? least : size;
            return scale < 0.0f ? -within : within;
        }
        XATTN_DEVICE void release_work(u32 slot) {
            Arch::warp_barrier();
            arrive(buffers.work_empty(slot));
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
            if (elected()) b.arrive();
        }
        XATTN_DEVICE void take_q() {
            buffers.q_full(queries.stage()).wait(queries.parity());
            if (Config::keep_q) {
                const int lane = this->lane();
                const int row = group * 64 + warp() * 16 + (lane & 15);
                XATTN_UNROLL
                for (int c = 0; c < kProductsQ; ++c) {
                    const u32 chunk = u32(c % 4 * 2 + (lane >> 4)) ^ u32(row & 7);
                    IsaSm80::ldmatrix(q[Config::keep_q ? c : 0].x,
                                      buffers.q(queries.stage()) + c / 4 * kPanelQ + row * 128 + chunk * 16);
                }
                queries.next();
            }
        }
        // Q of the tile before is free, and what was laid down in its place is stored.
        XATTN_DEVICE void free_q(u32 stage) {
            if (kOverQ) fence_async_proxy();
            Arch::warp_barrier();
            arrive(buffers.q_empty(stage));
        }
        XATTN_DEVICE void release_k() { arrive(buffers.k_empty(k.stage())); }
        // V follows a block behind K.
        XATTN_DEVICE Ring<kStages> v() const {
            Ring<kStages> place = k;
            place.back();
            return place;
        }
        XATTN_DEVICE void release_v() {
            arrive(buffers.v_empty(v().stage()));
            k.next();
        }

        // Rows of V behind the sequence's last key may hold anything, where TMA does not know where it ends; a weight
        // of 0 does not silence a NaN. Every group does it for itself.
        XATTN_DEVICE void clear_tail(const Span& w, s32 n) {
            if (kNarrow || !XATTN_RARELY(p.seqused_k || p.cu_seqlens_k)) return;
            const typename Work::Keys keys = Work::Keys::at(buffers.work(w.slot));
            if (n != keys.n_last) return;
            const s32 valid = min_of(keys.seqlen_k - keys.n_last * kTileN, kTileN);
            if (valid == kTileN) return;
            clear_rows(buffers.v(v().stage()), valid, thread(), 128);
            fence_async_proxy();
            named_barrier_sync(1 + kConsumers + group, 128);
        }

        // ---- products
        XATTN_DEVICE void issue_qk() {
            wgmma_fence();
            hold(acc_s);
            const Matrix keys = Matrix::rows(buffers.k(k.stage()));
            const Matrix rows = Matrix::rows(buffers.q(queries.stage()) + group * 64 * 128);
            XATTN_UNROLL
            for (int c = 0; c < kProductsQ; ++c) {
                const Matrix b = keys.moved(c / 4 * kPanelK + c % 4 * 32);
                if (Config::keep_q)
                    multiply_rows(acc_s, q[Config::keep_q ? c : 0], b, c > 0);
                else
                    Wgmma<Element, kTileN>::ss(acc_s, rows.moved(c / 4 * kPanelQ + c % 4 * 32), b, c > 0);
            }
            wgmma_commit();
        }
        XATTN_DEVICE void issue_pv() {
            wgmma_fence();
            hold(acc_o);
            const u32 at = buffers.v(v().stage());
            const Matrix values = kNarrow ? Matrix::rows(at) : Matrix::summed(at, kPanelK);
            XATTN_UNROLL
            for (int n = 0; n < kProductsV; ++n) {
                if constexpr (kNarrow)
                    Wgmma<Element, kDimV>::rs(acc_o, weights[n], values.moved(n / 4 * kPanelT + n % 4 * 32), 1);
                else
                    Wgmma<Element, kDimV>::template rs<1>(acc_o, weights[n], values.moved(n * 16 * 128), 1);
            }
            wgmma_commit();
        }
        XATTN_DEVICE static void multiply_rows(Accumulator (&acc)[kKeyGroups], const OperandA& a, Matrix b, s32 add) {
            if constexpr (kNarrow)
                Wgmma<Element, kTileN>::rs(acc, a, b, add);
            else
                Wgmma<Element, kTileN>::template rs<0>(acc, a, b, add);
        }

        // Goes on from block n of a tile for as long as blocks are seen whole, and returns the last of them. Most of
        // the time is spent here: a jump costs 20 cycles, and the loop that does everything makes seven in a step.
        XATTN_DEVICE s32 whole_blocks(const Span& w, s32 n, float (&factor)[2]) {
            const s32 until = max_of(w.n_first, s32(w.whole >> 16));
            const s32 tail = p.seqused_k || p.cu_seqlens_k;  // block n may be the last one, and want clear_tail
            if (n + tail > s32(w.whole & 0xffff)) return n;
            while (Arch::any(n > until)) {
                const bool moved = step<true>(w, n - 1, w, n, factor);
                --n;
                to_weights();
                if (XATTN_RARELY(moved)) rescale(factor);
            }
            return n;
        }

        // Issues S of block n of `w` and O += P V of block m of `before`; the softmax of the one runs beside the other.
        // Returns whether the output must be rescaled by `factor`. `whole`: every row sees all of block n, and block m
        // is not the last of its tile.
        template <bool whole>
        XATTN_DEVICE bool step(const Span& w, s32 n, const Span& before, s32 m, float (&factor)[2]) {
            buffers.k_full(k.stage()).wait(k.parity());
            take_turn();
            issue_qk();
            buffers.v_full(v().stage()).wait(v().parity());
            if (!whole) clear_tail(before, m);
            issue_pv();
            pass_turn();
            const bool masked = !whole && is_masked(w, n);
            const Limits seen = limits(w, n, masked);
            wgmma_wait<1>();
            hold(acc_s);
            release_k();
            const bool moved = softmax(w, n, masked, seen, factor);
            wgmma_wait<0>();
            hold(acc_s), hold(acc_o);
            release_v();
            return moved;
        }

        // ---- the softmax of a block, as the shared body does it
        XATTN_DEVICE s32 first_row(const Work::Rows& rows) const { return rows.row0 + group * 64 + warp() * 16; }

        // A vote, so that the compiler knows that the warp goes one way.
        XATTN_DEVICE static bool is_masked(const Span& span, s32 n) { return Arch::any(!span.is_whole(n)); }

        // Worked out while the products are under way.
        XATTN_DEVICE Limits limits(const Span& span, s32 n, bool masked) const {
            if (!XATTN_RARELY(masked)) return {};
            const u32 at = buffers.work(span.slot);
            return S::limits(p, Work::Keys::at(at).visible(p), first_row(Work::Rows::at(at)), lane(), n * kTileN);
        }

        XATTN_DEVICE bool softmax(const Span& span, s32 n, bool masked, const Limits& seen, float (&factor)[2]) {
            if (kNarrow && S::kPlain && XATTN_RARELY(tile_scale < 0.0f)) {
                XATTN_UNROLL
                for (int g = 0; g < kKeyGroups; ++g) XATTN_UNROLL
                for (int e = 0; e < 8; ++e) acc_s[g].x[e] = -acc_s[g].x[e];
            }
            if (S::kModifies) {
                const u32 at = buffers.work(span.slot);
                const Work::Rows rows = Work::Rows::at(at);
                const s32 start = Work::Start::at(at).row_q - rows.row0;
                S scores(p, Work::Keys::at(at).visible(p), rows.sequence, rows.head, first_row(rows), lane(),
                         p.cu_seqlens_q ? start : s64(rows.sequence) * p.seqlen_q);
                if (kNarrow) scores.factor = tile_scale;
                scores.modify(acc_s, 0, n * kTileN);
            }
            if (XATTN_RARELY(masked)) S::mask(p, acc_s, seen);
            // Two chains for each row, of the left and the right half of every 16 columns: one would wait for itself.
            float part[2][2];
            XATTN_UNROLL
            for (int g = 0; g < kKeyGroups; ++g) XATTN_UNROLL
            for (int e = 0; e < 8; ++e) {
                float& most = part[Arch::row_slot(e)][e >> 2];
                most = g == 0 && e % 2 == 0 ? acc_s[g].x[e] : Arch::max(most, acc_s[g].x[e]);
            }
            float largest[2] = {Arch::max(part[0][0], part[0][1]), Arch::max(part[1][0], part[1][1])};
            const auto& scaled = scale();
            S::to_scores(scaled, largest);
            float base[2];
            const bool moved = soft.move_reference(scaled, largest, factor, base, acc_s);
            XATTN_UNROLL
            for (int g = 0; g < kKeyGroups; ++g) XATTN_UNROLL
            for (int e = 0; e < 8; ++e) {
                const int r = Arch::row_slot(e);
                float& sum = part[r][e >> 2];
                acc_s[g].x[e] = S::weight(scaled, acc_s[g].x[e], base[r]);
                sum = g == 0 && e % 2 == 0 ? acc_s[g].x[e] : sum + acc_s[g].x[e];
            }
            XATTN_UNROLL
            for (int r = 0; r < 2; ++r) soft.row_sum[r] += part[r][0] + part[r][1];
            if constexpr (Config::dropout) drop(span, n);
            return moved;
        }
        // The sums hold the weights that are dropped.
        XATTN_DEVICE void drop(const Span& span, s32 n) {
            const u32 at = buffers.work(span.slot);
            const Work::Rows rows = Work::Rows::at(at);
            const int lane = this->lane();
            const s32 row = first_row(rows) + Arch::row_of(lane, 0) + (Config::paged ? Work::Keys::at(at).shift : 0);
            const Dropout::Row both[2] = {{row, rows.head}, {row + 8, rows.head}};
            dropout.template drop<Arch>(acc_s, both, rows.sequence, n * kTileN, lane);
        }
        // What has the scale of plain scores.
        XATTN_DEVICE decltype(auto) scale() const {
            if constexpr (kNarrow)
                return Factor{tile_scale < 0.0f ? -tile_scale : tile_scale};
            else
                return (p);
        }
        XATTN_DEVICE void to_weights() {
            XATTN_UNROLL
            for (int n = 0; n < kProductsV; ++n) {
                if constexpr (kNarrow)
                    weights[n] = narrow_weights(acc_s[2 * n], acc_s[2 * n + 1]);
                else
                    weights[n] = Arch::template weights<Element>(acc_s[n]);
            }
        }
        XATTN_DEVICE void clear_output() {
            XATTN_UNROLL
            for (int g = 0; g < kDimGroups; ++g) acc_o[g].clear();
        }
        XATTN_DEVICE void rescale(const float (&factor)[2]) {
            XATTN_UNROLL
            for (int g = 0; g < kDimGroups; ++g) XATTN_UNROLL
            for (int e = 0; e < 8; ++e) acc_o[g].x[e] *= factor[Arch::row_slot(e)];
        }

        // ---- the output
        // The end of a tile's softmax: lse is stored, and what the output is to be multiplied by is returned.
        struct Inverse {
            float x[2];
        };
        XATTN_DEVICE Inverse close(const Span& span, const Soft& s) {
            const u32 at = buffers.work(span.slot);
            const Work::Rows rows = Work::Rows::at(at);
            const int lane = this->lane();
            Inverse inverse;
            XATTN_UNROLL
            for (int r = 0; r < 2; ++r) {
                const s32 row = group * 64 + warp() * 16 + Arch::row_of(lane, r);
                float sum = Arch::row_sum(s.row_sum[r]), base = s.base(r);
                if (p.sinks)
                    S::add_sink(p.sinks[rows.head], base, sum, inverse.x[r]);
                else
                    inverse.x[r] = sum == 0.0f ? 0.0f : Arch::divide(1.0f, sum);
                if constexpr (Config::dropout) inverse.x[r] *= p.dropout_scale;
                if (p.lse && row < rows.rows && Arch::first_of_row(lane))
                    Place(p, rows, Work::Start::at(at)).lse[row] = S::lse(base, sum);
                if (kNarrow) inverse.x[r] *= Work::Factors::at(at).values;
            }
            return inverse;
        }

        // Stores the output: through shared memory, where there is room for it.
        XATTN_DEVICE void finish(const Span& span, u32 q_stage, const Inverse& inverse) {
            const Work::Rows rows = Work::Rows::at(buffers.work(span.slot));
            const Place place(p, rows, Work::Start::at(buffers.work(span.slot)));
            if constexpr (Out::kChanged) {
                const s32 shift = kPaged ? Work::Keys::at(buffers.work(span.slot)).shift : 0;
                const Changed to{place.out, rows, rows.row0 + shift};
                if (kStagePanels > 0)
                    store_changed(to, buffers.output(q_stage), inverse);
                else
                    store_changed_direct(to, inverse);
            } else if (kStagePanels > 0)
                store_staged(place.out, rows.rows, buffers.output(q_stage), inverse);
            else
                store_direct(place.out, rows.rows, inverse);
            release_work(span.slot);
        }

        // Two elements. A row without a key is 0, whatever the values of keys that it does not see.
        XATTN_DEVICE static u32 output(const float* x, float inverse) { return output(x[0], x[1], inverse); }
        XATTN_DEVICE static u32 output(float a, float b, float inverse) {
            const u32 pair = IsaSm80::pack(typename Out::Usual{}, a * inverse, b * inverse);
            return inverse == 0.0f ? 0 : pair;
        }
        // Of 8-bit values a lane holds four that follow each other in 16 of a row.
        struct alignas(8) Four {
            u32 low, high;
        };
        XATTN_DEVICE Four four(int g, int r, const Inverse& inverse) const {
            const float* x = acc_o[g].x + 2 * r;
            return {output(x[0], x[4], inverse.x[r]), output(x[1], x[5], inverse.x[r])};
        }
        XATTN_DEVICE OperandA output(int g, const Inverse& inverse) const {
            const float* x = acc_o[g].x;
            OperandA packed;
            XATTN_UNROLL
            for (int i = 0; i < 4; ++i) packed.x[i] = output(x + 2 * i, inverse.x[i % 2]);
            return packed;
        }

        // A warp lays its 16 rows down in panels of 64 columns, swizzled as Q is, and stores whole rows of them.
        XATTN_DEVICE void store_staged(typename Out::Element* out, s32 rows, u32 stage, const Inverse& inverse) {
            const int lane = this->lane();
            const s32 row0 = group * 64 + warp() * 16;
            const u32 at = stage + row0 * 128;
            const u32 write = at + (lane & 15) * 128;
            constexpr int kStep = kStagePanels > 0 ? min_of(kStagePanels, kPanelsOut) : 1;
            XATTN_UNROLL
            for (int first = 0; first < kPanelsOut; first += kStep) {
                constexpr int kGroups = 4 * kStep, kChunks = 8 * kStep;
                XATTN_UNROLL
                for (int g = 0; g < kGroups; ++g) {
                    if (4 * first + g >= kDimGroups) break;
                    if (kNarrow) {
                        const u32 chunk = u32(g % 4 * 2 + ((lane & 3) >> 1)) ^ u32(lane >> 2);
                        XATTN_UNROLL
                        for (int r = 0; r < 2; ++r) {
                            const Four x = four(4 * first + g, r, inverse);
                            store_shared(
                                at + g / 4 * kPanelQ + Arch::row_of(lane, r) * 128 + chunk * 16 + (lane & 1) * 8, x.low,
                                x.high);
                        }
                        continue;
                    }
                    const u32 chunk = u32(g % 4 * 2 + (lane >> 4)) ^ u32(lane & 7);
                    stmatrix(write + g / 4 * kPanelQ + chunk * 16, output(4 * first + g, inverse).x);
                }
                Arch::warp_barrier();
                XATTN_UNROLL
                for (int i = 0; i < kChunks / 2; ++i) {
                    const int index = 32 * i + lane, row = index / kChunks, c = index % kChunks;
                    const s32 col = 64 * first + 8 * c;
                    const u32 from = at + c / 8 * kPanelQ + row * 128 + ((c % 8) ^ (row & 7)) * 16;
                    if (row0 + row < rows && col < p.head_dim_v)
                        *reinterpret_cast<Chunk*>(out + (row0 + row) * p.out.row_stride + col) =
                            IsaSm80::load_shared(from);
                }
                Arch::warp_barrier();
            }
        }

        // Four lanes hold a row in pieces of 2 columns of each 8; they exchange them so that each stores 16 bytes at
        // once.
        XATTN_DEVICE void store_direct(typename Out::Element* target, s32 rows, const Inverse& inverse) {
            u16* out = reinterpret_cast<u16*>(target);
            const int lane = this->lane(), quad = lane & 3;
            XATTN_UNROLL
            for (int r = 0; r < 2; ++r) {
                const s32 row = group * 64 + warp() * 16 + Arch::row_of(lane, r);
                if (kNarrow) {
                    u16* to = out + row * p.out.row_stride + 4 * quad;
                    XATTN_UNROLL
                    for (int g = 0; g < kDimGroups; ++g)
                        if (row < rows && 16 * g + 4 * quad < p.head_dim_v)
                            *reinterpret_cast<Four*>(to + 16 * g) = four(g, r, inverse);
                    continue;
                }
                u16* to = out + row * p.out.row_stride + 8 * quad;
                XATTN_UNROLL
                for (int c = 0; c < kDimV / 32; ++c) {
                    u32 x[4];
                    XATTN_UNROLL
                    for (int i = 0; i < 4; ++i)
                        x[i] = output(&acc_o[2 * c + i / 2].x[4 * (i % 2) + 2 * r], inverse.x[r]);
                    transpose(x, quad);
                    if (row < rows && 32 * c + 8 * quad < p.head_dim_v) IsaSm80::store_global(to + 32 * c, x);
                }
            }
        }
        // ---- an output that the user's epilogue changes, or of another dtype
        struct Changed {
            typename Out::Element* out;
            const Work::Rows& rows;
            s32 q_idx;  // of its first row
        };
        XATTN_DEVICE static float whole(float x, float inverse) { return inverse == 0.0f ? 0.0f : x * inverse; }

        // A warp lays its 16 rows down as float32, in panels of 32 columns, and takes runs of 8 columns up again: what
        // they are computed with is read, ahead of all that, and what comes of them stored, 16 bytes at once. Chunks of
        // 16 bytes are permuted such that neither side meets a bank twice: four lanes take up a row, beside the one
        // four below it. Of rows and columns that there are not, the last that there are: no jump stands between loads.
        XATTN_DEVICE void store_changed(const Changed& to, u32 stage, const Inverse& inverse) {
            const int lane = this->lane();
            const s32 row0 = group * 64 + warp() * 16;
            const u32 at = stage + row0 * 128;
            constexpr int kStep = kStagePanels > 0 ? min_of(kStagePanels, (kDimV + 31) / 32) : 1, kRuns = 2 * kStep;
            XATTN_UNROLL
            for (int first = 0; first < (kDimV + 31) / 32; first += kStep) {
                const int row_in_8 = (lane >> 3 & 3) + (lane & 4);
                typename Out::template Epilogue<8> epilogue[kRuns];
                bool found = true;
                const auto row_of = [&](int i) { return row0 + i % 2 * 8 + row_in_8; };
                const auto col_of = [&](int i) { return 32 * (first + i / 2) + 8 * (lane & 3); };
                const auto q_idx = [&](int i) { return to.q_idx + min_of(row_of(i), to.rows.rows - 1); };
                const auto col = [&](int i) { return min_of(col_of(i), p.head_dim_v - 8); };
                XATTN_UNROLL
                for (int i = 0; i < kRuns; ++i)
                    epilogue[i].load(p, to.rows.sequence, to.rows.head, q_idx(i), col(i), found);
                XATTN_UNROLL
                for (int g = 0; g < 2 * kStep; ++g) {
                    if (2 * first + g >= kDimGroups) break;
                    XATTN_UNROLL
                    for (int r = 0; r < 2; ++r) lay_down(at + g / 2 * kPanelQ, g % 2, acc_o[2 * first + g], r, inverse);
                }
                Arch::warp_barrier();
                float x[kRuns][8];
                XATTN_UNROLL
                for (int i = 0; i < kRuns; ++i) {
                    const int row = i % 2 * 8 + row_in_8;
                    XATTN_UNROLL
                    for (int half = 0; half < 2; ++half) {
                        float four[4];
                        IsaSm80::load_shared_floats(
                            four, at + i / 2 * kPanelQ + row * 128 + ((2 * (lane & 3) + half) ^ swizzle(row)) * 16);
                        XATTN_UNROLL
                        for (int c = 0; c < 4; ++c) x[i][4 * half + c] = four[c];
                    }
                }
                XATTN_UNROLL
                for (int i = 0; i < kRuns; ++i)
                    epilogue[i].apply(p, x[i], to.rows.sequence, to.rows.head, q_idx(i), col(i), found);
                Out::report(p, found);
                XATTN_UNROLL
                for (int i = 0; i < kRuns; ++i)
                    if (row_of(i) < to.rows.rows && col_of(i) < p.head_dim_v)
                        Out::store(to.out + row_of(i) * p.out.row_stride + col_of(i), x[i]);
                Arch::warp_barrier();
            }
        }
        XATTN_DEVICE static u32 swizzle(int row) { return u32((row & 3) << 1 | (row >> 2 & 1)); }
        // Row r of the lane's two, of 16 columns, in the left or the right half of a panel's row.
        XATTN_DEVICE void lay_down(u32 panel, int right, const Accumulator& acc, int r, const Inverse& inverse) const {
            const int lane = this->lane(), row = Arch::row_of(lane, r);
            const float* x = acc.x + 2 * r;
            const float by = inverse.x[r];
            const u32 line = panel + row * 128;
            if (kNarrow) {  // four columns that follow each other
                const Chunk c = {{IsaSm80::bits(whole(x[0], by)), IsaSm80::bits(whole(x[4], by)),
                                  IsaSm80::bits(whole(x[1], by)), IsaSm80::bits(whole(x[5], by))}};
                IsaSm80::store_shared(line + (u32(4 * right + (lane & 3)) ^ swizzle(row)) * 16, c);
                return;
            }
            XATTN_UNROLL
            for (int half = 0; half < 2; ++half) {
                const u32 chunk = u32(4 * right + 2 * half + (lane >> 1 & 1)) ^ swizzle(row);
                store_shared(line + chunk * 16 + (lane & 1) * 8, IsaSm80::bits(whole(x[4 * half], by)),
                             IsaSm80::bits(whole(x[4 * half + 1], by)));
            }
        }

        // Where there is no room for that: the columns that a lane holds side by side.
        XATTN_DEVICE void store_changed_direct(const Changed& to, const Inverse& inverse) {
            const int lane = this->lane();
            XATTN_UNROLL
            for (int r = 0; r < 2; ++r) {
                const s32 row = group * 64 + warp() * 16 + Arch::row_of(lane, r);
                if (row >= to.rows.rows) continue;
                const float by = inverse.x[r];
                XATTN_UNROLL
                for (int g = 0; g < kDimGroups; ++g) {
                    const float* o = acc_o[g].x + 2 * r;
                    if constexpr (kNarrow) {
                        float x[4] = {whole(o[0], by), whole(o[4], by), whole(o[1], by), whole(o[5], by)};
                        store_run(to, row, 16 * g + 4 * (lane & 3), x);
                    } else {
                        XATTN_UNROLL
                        for (int half = 0; half < 2; ++half) {
                            float x[2] = {whole(o[4 * half], by), whole(o[4 * half + 1], by)};
                            store_run(to, row, 16 * g + 8 * half + 2 * (lane & 3), x);
                        }
                    }
                }
            }
        }
        template <int N>
        XATTN_DEVICE void store_run(const Changed& to, s32 row, s32 col, float (&x)[N]) {
            if (col >= p.head_dim_v) return;
            bool found = true;
            Out::apply(p, x, to.rows.sequence, to.rows.head, to.q_idx + row, col, found);
            Out::report(p, found);
            Out::store(to.out + row * p.out.row_stride + col, x);
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
