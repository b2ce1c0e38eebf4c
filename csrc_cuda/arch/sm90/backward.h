// Backward on Hopper, second: all gradients in five matrix products. A thread block has kTileN keys of one head of k
// and v and walks the tiles of queries that see them, of every head that shares them:
//
//   S^T = K Q^T;  P^T = exp(S^T - lse);  dP^T = V dO^T;  dS^T = P^T (dP^T - delta);
//   dV += P^T dO;  dK += dS^T Q;  dQ = dS K.
//
// Blocks stay: the first tile of keys of a block is its index, the next the first that none has taken yet. What a tile
// loads first is under way while the results of the one before are stored.
//
// Roles. One lane of warpgroup 0 gives: a tile of keys by its number, K and V once, then Q with its numbers and dO, in
// rings of two. The other two warpgroups consume: each owns 64 keys, so that P^T and dS^T are operands as they stand in
// its registers, and dK and dV stay there to the end. dS goes to shared memory as well, rows of queries, in two
// buffers: each warpgroup makes a half of dQ from all of it, 64 rows of 128 or 64 columns of 128, and adds it to the
// sums in global memory.
//
// Order of a step, asynchronous products in brackets: [dP], weights beside it; [dV], dS beside it; [dQ of the step
// before], [dK], [S of the step that follows]; dQ is added to global memory beside these. So some product is nearly
// always under way, and whoever needs the other's half of dS waits for what was written a step ago. Where registers
// suffice (kEarlyDp), dP is issued at the end of the step before; nothing else is under way where the loop begins anew,
// and nobody reads what is: ptxas would put waits between all products.
//
// Who waits for whom. q_full, o_full: TMA has delivered; q_empty, o_empty: every consumer warp has read to the end.
// s_full: every consumer warp has written its part of a step's dS, and has done with dQ of the step before, whose
// buffer is written next. keys_full, keys_empty: K and V of a tile likewise, once both groups have done with the last
// dQ, and dS is free for the results, which are laid down there.
//
// What the order of additions changes is the rounding of dq; dk and dv are the same bit for bit.
//
// Registers of a consumer lane: kDim / 2 for dK, kDimV / 2 for dV, kTileM / 2 for S and for dP, 32 for dQ, kTileM / 4
// for P and for dS as operands; dQ is issued when dP has become dS.
#pragma once

#include "arch/sm90/backward_params.h"
#include "kernels/backward_tile.h"
#include "kernels/scheduler.h"

namespace xattn {

template <class Config>
struct Sm90Backward {
    using Arch = Sm80<IsaSm80>;
    using Params = Sm90BackwardParams;
    using Element = typename Config::Element;
    using Gradient = ScoreGradient<Arch, Config>;

    static constexpr int kTileM = Config::tile_m, kTileN = 128, kStages = 2, kConsumers = 2;
    static constexpr int kDim = Config::head_dim, kDimV = Config::head_dim_v;
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kPanels = (kDim + 63) / 64, kPanelsV = (kDimV + 63) / 64;
    static constexpr int kQueryGroups = kTileM / 16, kDimGroups = kDim / 16, kDimGroupsV = kDimV / 16;
    static constexpr bool kSplitRows = kPanels == 1;  // of dQ; else its columns
    static_assert(kTileM == (kSplitRows ? 128 : 64) && kPanels <= 2, "a half of dQ is 64 x 64");
    using Queries = QueryTile<kTileM, kPanels * 64>;
    // dP of a step is under way where the loop begins anew, if registers suffice.
    static constexpr bool kEarlyDp = kTileM == 64 && !Config::softcap && !Config::alibi;
    static constexpr u32 kPanelK = kTileN * 128, kPanelQ = kTileM * 128;
    static constexpr u32 kBytesK = kPanels * kPanelK, kBytesV = kPanelsV * kPanelK, kBytesQ = kPanels * kPanelQ,
                         kBytesO = kPanelsV * kPanelQ, kBytesS = 2 * kPanelQ, kBytesNumbers = 4 * Queries::kNumbers;
    static constexpr u32 kAtV = kBytesK, kAtQ = kAtV + kBytesV, kAtO = kAtQ + kStages * kBytesQ,
                         kAtS = kAtO + kStages * kBytesO, kAtNumbers = kAtS + 2 * kBytesS,
                         kAtTiles = kAtNumbers + kStages * kBytesNumbers, kAtBarriers = kAtTiles + 2 * 16;
    static constexpr u32 kSharedBytes = kAtBarriers + 8 * (7 + 4 * kStages);

    struct Buffers {
        u32 base;
        XATTN_DEVICE u32 k() const { return base; }
        XATTN_DEVICE u32 v() const { return base + kAtV; }
        XATTN_DEVICE u32 q(u32 stage) const { return base + kAtQ + stage * kBytesQ; }
        XATTN_DEVICE u32 dout(u32 stage) const { return base + kAtO + stage * kBytesO; }
        XATTN_DEVICE u32 ds(u32 stage) const { return base + kAtS + stage * kBytesS; }
        XATTN_DEVICE u32 numbers(u32 stage) const { return base + kAtNumbers + stage * kBytesNumbers; }
        XATTN_DEVICE Barrier barrier(u32 n) const { return {base + kAtBarriers + 8 * n}; }
        XATTN_DEVICE u32 tile(u32 stage) const { return base + kAtTiles + stage * 16; }
        XATTN_DEVICE Barrier keys_full() const { return barrier(0); }
        XATTN_DEVICE Barrier keys_empty() const { return barrier(1); }
        XATTN_DEVICE Barrier s_full() const { return barrier(2); }
        XATTN_DEVICE Barrier tile_full(u32 stage) const { return barrier(3 + stage); }
        XATTN_DEVICE Barrier tile_empty(u32 stage) const { return barrier(5 + stage); }
        XATTN_DEVICE Barrier q_full(u32 stage) const { return barrier(7 + stage); }
        XATTN_DEVICE Barrier q_empty(u32 stage) const { return barrier(7 + kStages + stage); }
        XATTN_DEVICE Barrier o_full(u32 stage) const { return barrier(7 + 2 * kStages + stage); }
        XATTN_DEVICE Barrier o_empty(u32 stage) const { return barrier(7 + 3 * kStages + stage); }
    };

    // The tile of keys, and the tiles of queries [begin, end) that see some of it, of each of the heads.
    struct Work {
        Tile tile;
        Sequence seq;
        Visible visible;
        s32 key0, begin, end;

        XATTN_DEVICE Work(const ForwardParams& p, const Tile& t)
            : tile(t),
              seq(Sequence::of(p, t.sequence)),
              visible(Visible::of(p, seq)),
              key0(t.m_block * kTileN),
              begin(0),
              end(0) {
            const s32 last = min_of(key0 + kTileN, seq.seqlen_k) - 1, unbounded = Visible::kUnbounded;
            s32 from = 0, to = last < key0 ? 0 : seq.seqlen_q;
            if (visible.right != unbounded) from = max_of(0, key0 - visible.shift - visible.right);
            if (visible.left != unbounded) to = min_of(to, last - visible.shift + visible.left + 1);
            if (from < to) begin = from / kTileM, end = (to + kTileM - 1) / kTileM;
        }
        XATTN_DEVICE s32 steps(const ForwardParams& p) const { return (end - begin) * s32(p.gqa_ratio.value); }
    };
    // One step after the other: the tiles of a head, then those of the next.
    struct Walk {
        s32 m_block, head;
        XATTN_DEVICE Walk(const ForwardParams& p, const Work& w)
            : m_block(w.begin), head(w.tile.head * s32(p.gqa_ratio.value)) {}
        XATTN_DEVICE void next(const Work& w) {
            if (++m_block < w.end) return;
            m_block = w.begin;
            ++head;
        }
    };

    XATTN_DEVICE static void run(const Params& params, u32 shared) {
        const Buffers buffers{shared};
        const int thread = Arch::thread_index();
        const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
        if (thread == 0) {
            buffers.keys_full().init(1), buffers.keys_empty().init(4 * kConsumers);
            buffers.s_full().init(4 * kConsumers);
            for (u32 s = 0; s < 2; ++s) buffers.tile_full(s).init(1), buffers.tile_empty(s).init(4 * kConsumers);
            for (u32 s = 0; s < kStages; ++s) {
                buffers.q_full(s).init(1), buffers.q_empty(s).init(4 * kConsumers);
                buffers.o_full(s).init(1), buffers.o_empty(s).init(4 * kConsumers);
            }
            make_barriers_visible();
        }
        Arch::barrier();
        if (warp < 4) {
            give_registers<24>();
            if (warp == 0 && elected()) Loader{params, buffers}.run();
        } else {
            take_registers<240>();
            Consumer consumer(params, buffers, warp / 4 - 1);
            consumer.run();
        }
    }

    // ---------------------------------------------------------------- the lane that gives
    struct Loader {
        const Params& params;
        const Buffers buffers;
        Ring<2> tiles{1};
        Ring<kStages> at{1};
        u32 loaded = 0;  // tiles of keys

        // The first tile of a block is its index; the next is the first that no block has taken yet, asked for when
        // the loads of the one before are issued.
        XATTN_DEVICE void run() {
            const ForwardParams& p = params.b.p;
            tma_prefetch(&params.q), tma_prefetch(&params.k), tma_prefetch(&params.v), tma_prefetch(&params.dout);
            for (s32 index = s32(Arch::block_index()); index < params.key_tiles;
                 index = s32(atomicAdd(Queries::taken(params), 1u) + gridDim.x)) {
                const Tile tile = tile_at(params.b.keys, u32(index));
                const bool rest = tile.sequence == p.batch;
                if (!rest && tile.m_block * kTileN >= Sequence::whole(p, tile.sequence).seqlen_k) continue;
                tell(index);
                if (!rest) load(Work(p, tile));
            }
            tell(-1);
        }

      private:
        XATTN_DEVICE void tell(s32 index) {
            buffers.tile_empty(tiles.stage()).wait(tiles.parity());
            asm volatile("st.shared.s32 [%0], %1;" ::"r"(buffers.tile(tiles.stage())), "r"(index) : "memory");
            buffers.tile_full(tiles.stage()).arrive();
            tiles.next();
        }
        XATTN_DEVICE void load(const Work& w) {
            const ForwardParams& p = params.b.p;
            const s32 steps = w.steps(p);
            if (steps == 0) return;
            const s32 sequence_k = p.cu_seqlens_k ? 0 : w.tile.sequence;
            const s32 sequence_q = p.cu_seqlens_q ? 0 : w.tile.sequence;
            const s32 row_k = s32(w.seq.start_k) + w.key0, row_q = s32(w.seq.start_q);
            Walk walk(p, w);
            for (s32 step = 0; step < steps; ++step) {
                const s32 row = row_q + walk.m_block * kTileM;
                const Barrier q_full = buffers.q_full(at.stage()), o_full = buffers.o_full(at.stage());
                buffers.q_empty(at.stage()).wait(at.parity());
                q_full.arrive_and_expect(kBytesQ + kBytesNumbers);
                load_panels<kPanels, kPanelQ>(buffers.q(at.stage()), &params.q, q_full, row, walk.head, sequence_q);
                const s64 tile = Queries::first(params, w.seq, w.tile.sequence, walk.head) + walk.m_block;
                bulk_load(buffers.numbers(at.stage()), params.numbers + tile * Queries::kNumbers, kBytesNumbers,
                          q_full);
                if (step == 0) {
                    const Barrier full = buffers.keys_full();
                    buffers.keys_empty().wait(loaded + 1 & 1);
                    ++loaded;
                    full.arrive_and_expect(kBytesK + kBytesV);
                    load_panels<kPanels, kPanelK>(buffers.k(), &params.k, full, row_k, w.tile.head, sequence_k);
                    load_panels<kPanelsV, kPanelK>(buffers.v(), &params.v, full, row_k, w.tile.head, sequence_k);
                }
                buffers.o_empty(at.stage()).wait(at.parity());
                o_full.arrive_and_expect(kBytesO);
                load_panels<kPanelsV, kPanelQ>(buffers.dout(at.stage()), &params.dout, o_full, row, walk.head,
                                               sequence_q);
                walk.next(w);
                at.next();
            }
        }
    };
    template <u32 panels, u32 bytes>
    XATTN_DEVICE static void load_panels(u32 target, const TensorMap* map, Barrier full, s32 row, s32 head,
                                         s32 sequence) {
        XATTN_UNROLL
        for (u32 c = 0; c < panels; ++c) tma_load(target + c * bytes, map, full, s32(c * 64), row, head, sequence);
    }

    // ---------------------------------------------------------------- a consumer: one of 128 lanes
    struct Consumer {
        const Params& params;
        const ForwardParams& p;
        const Buffers buffers;
        const int group;
        Ring<2> tiles;
        u32 count = 0, loaded = 0;  // steps and tiles of keys so far
        float* sums;                // of the step whose dQ is added next
        Accumulator s[kQueryGroups], dp[kQueryGroups], dq[4], dk[kDimGroups], dv[kDimGroupsV];
        OperandA weights[kQueryGroups], ds[kQueryGroups], slopes[Config::softcap ? kQueryGroups : 1];

        XATTN_DEVICE Consumer(const Params& ps, const Buffers& b, int warpgroup)
            : params(ps), p(ps.b.p), buffers(b), group(warpgroup) {}

        XATTN_DEVICE void run() {
            for (;;) {
                const u32 stage = tiles.stage();
                buffers.tile_full(stage).wait(tiles.parity());
                s32 index;
                asm volatile("ld.shared.s32 %0, [%1];" : "=r"(index) : "r"(buffers.tile(stage)) : "memory");
                Arch::warp_barrier();
                arrive(buffers.tile_empty(stage));
                tiles.next();
                if (index < 0) break;
                const Tile tile = tile_at(params.b.keys, u32(index));
                if (tile.sequence == p.batch)
                    clear_rest(params.b, tile, group * 128 + thread());
                else
                    run(tile, index);
            }
        }

      private:
        // Read again where they are needed.
        XATTN_DEVICE static int thread() { return IsaSm80::thread_index_again() % 128; }
        XATTN_DEVICE static int warp() { return thread() / 32; }
        XATTN_DEVICE static int lane() { return thread() % 32; }
        XATTN_DEVICE static void arrive(Barrier b) {
            if (elected()) b.arrive();
        }

        XATTN_DEVICE void run(const Tile& tile, s32 index) {
            const Work work(p, tile);
            Walk walk(p, work);
            XATTN_UNROLL
            for (int g = 0; g < kDimGroups; ++g) dk[g].clear();
            XATTN_UNROLL
            for (int g = 0; g < kDimGroupsV; ++g) dv[g].clear();
            const s32 steps = work.steps(p);
            if (steps > 0) {
                const s64 first = Queries::first(params, work.seq, tile.sequence, walk.head) + walk.m_block;
                sums = params.sums + first * Queries::kSums + group * 64 * 64;
                buffers.keys_full().wait(loaded & 1);
                ++loaded;
                clear_tail(work);
                prepare(count);
                issue_s(count % kStages);
                begin();
                for (s32 step = 0; step < steps; ++step, ++count) multiply(work, walk, step > 0, step + 1 < steps);
                if (kEarlyDp) {
                    wgmma_wait<0>();
                    hold(dp);
                }
                buffers.s_full().wait(count + 1 & 1);
                issue_dq(count + 1 & 1);
                wgmma_wait<0>();
                hold(dq);
                named_barrier_sync(1, 256);  // K and dS have been read
                arrive(buffers.keys_empty());
                add_dq();
            }
            store(index);
        }
        // S of the first step has been issued.
        XATTN_DEVICE void begin() {
            if (kEarlyDp) {
                buffers.o_full(count % kStages).wait(count / kStages & 1);
                issue_dp(count % kStages);
                wgmma_wait<1>();
            } else {
                wgmma_wait<0>();
            }
            hold(s);
        }

        // ---- what a tile holds that must not count
        // Keys behind the sequence's last one may hold anything, where TMA does not know where it ends. Every group
        // clears all of them for itself.
        XATTN_DEVICE void clear_tail(const Work& work) {
            if (!XATTN_RARELY(p.seqused_k || p.cu_seqlens_k)) return;
            const s32 valid = work.seq.seqlen_k - work.key0;
            if (valid >= kTileN) return;
            for (int c = thread(); c < (kTileN - valid) * 8; c += 128) {
                XATTN_UNROLL
                for (int panel = 0; panel < kPanels + kPanelsV; ++panel)
                    clear_chunk(buffers.k() + panel * kPanelK + valid * 128 + c * 16);
            }
            fence_async_proxy();
            named_barrier_sync(2 + group, 128);
        }
        XATTN_DEVICE static void clear_chunk(u32 at) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
        }

        // Q and the numbers of a step are there. Queries whose weights are all 0 bring nothing, whatever q and dout
        // hold there: of packed sequences the rows behind a sequence's last are another's.
        XATTN_DEVICE void prepare(u32 step) {
            const u32 stage = step % kStages, parity = step / kStages & 1;
            buffers.q_full(stage).wait(parity);
            const u32 numbers = buffers.numbers(stage);
            bool any = false;
            XATTN_UNROLL
            for (int n = 0; n < kTileM / 32; ++n)
                any |= Arch::load_float(numbers + 4 * (n * 32 + lane())) == Arch::infinity();
            if (XATTN_RARELY(Arch::any(any))) {
                buffers.o_full(stage).wait(parity);
                for (int n = thread() / 8; n < kTileM; n += 16) {
                    if (Arch::load_float(numbers + 4 * n) != Arch::infinity()) continue;
                    const u32 at = Queries::row_of(n) * 128 + thread() % 8 * 16;
                    XATTN_UNROLL
                    for (u32 panel = 0; panel < kPanels; ++panel) clear_chunk(buffers.q(stage) + panel * kPanelQ + at);
                    XATTN_UNROLL
                    for (u32 panel = 0; panel < kPanelsV; ++panel)
                        clear_chunk(buffers.dout(stage) + panel * kPanelQ + at);
                }
                fence_async_proxy();
                named_barrier_sync(2 + group, 128);
            }
        }

        // ---- products
        XATTN_DEVICE void issue_s(u32 stage) { issue_rows<kDimGroups>(s, buffers.k(), buffers.q(stage)); }
        XATTN_DEVICE void issue_dp(u32 stage) { issue_rows<kDimGroupsV>(dp, buffers.v(), buffers.dout(stage)); }
        // Keys of the group by queries.
        template <int steps>
        XATTN_DEVICE void issue_rows(Accumulator (&acc)[kQueryGroups], u32 keys, u32 queries) {
            wgmma_fence();
            renew(acc);
            const Matrix a = Matrix::rows(keys + group * 64 * 128), b = Matrix::rows(queries);
            XATTN_UNROLL
            for (int c = 0; c < steps; ++c)
                Wgmma<Element, kTileM>::ss(acc, a.moved(c / 4 * kPanelK + c % 4 * 32),
                                           b.moved(c / 4 * kPanelQ + c % 4 * 32), c > 0);
            wgmma_commit();
        }
        // acc += A B: operands in registers by rows of queries.
        template <int groups>
        XATTN_DEVICE static void issue_sums(Accumulator (&acc)[groups], const OperandA (&a)[kQueryGroups], u32 at) {
            wgmma_fence();
            hold(acc);
            const Matrix b = Matrix::summed(at, kPanelQ);
            XATTN_UNROLL
            for (int n = 0; n < kQueryGroups; ++n)
                Wgmma<Element, 16 * groups>::template rs<1>(acc, a[n], b.moved(n * 16 * 128), 1);
            wgmma_commit();
        }
        XATTN_DEVICE void issue_dq(u32 stage) {
            wgmma_fence();
            renew(dq);
            const Matrix a = Matrix::rows(buffers.ds(stage) + (kSplitRows ? group * 64 * 128 : 0));
            const Matrix b = Matrix::summed(buffers.k() + (kSplitRows ? 0 : group * kPanelK), kPanelK);
            XATTN_UNROLL
            for (int c = 0; c < kTileN / 16; ++c)
                Wgmma<Element, 64>::ss_summed(dq, a.moved(c / 4 * kPanelQ + c % 4 * 32), b.moved(c * 16 * 128), c > 0);
            wgmma_commit();
        }

        XATTN_DEVICE void multiply(const Work& work, Walk& walk, bool continues, bool follows) {
            const u32 stage = count % kStages, parity = count / kStages & 1;
            const s32 row0 = walk.m_block * kTileM, first_key = work.key0 + group * 64;
            const bool whole =
                Arch::any(first_key >= work.visible.first(min_of(row0 + kTileM, work.seq.seqlen_q) - 1) &&
                          first_key + 63 <= work.visible.last(row0));
            if (!kEarlyDp) {
                buffers.o_full(stage).wait(parity);
                issue_dp(stage);
            }
            if (XATTN_RARELY(!whole))
                weigh<false>(work, walk, buffers.numbers(stage), row0, first_key);
            else
                weigh<true>(work, walk, buffers.numbers(stage), row0, first_key);
            if (kEarlyDp) {
                wgmma_wait<0>();
                hold(dp);
            }
            issue_sums(dv, weights, buffers.dout(stage));
            if (!kEarlyDp) {
                wgmma_wait<1>();
                hold(dp);
            }
            if (XATTN_RARELY(!whole))
                differentiate<false>(buffers.numbers(stage));
            else
                differentiate<true>(buffers.numbers(stage));
            buffers.s_full().wait(count + 1 & 1);
            store_ds(stage);
            // Of a tile's first step, what is made from what nobody wrote for it is not added to anything; nor is what
            // is made of queries that do not follow.
            issue_dq(stage ^ 1);
            issue_sums(dk, ds, buffers.q(stage));
            wgmma_wait<1>();
            hold(weights), hold(dv), hold(dq);
            Arch::warp_barrier();
            if (elected()) buffers.o_empty(stage).arrive(), buffers.s_full().arrive();
            if (follows) prepare(count + 1);
            issue_s(stage ^ 1);
            if (continues) {
                add_dq();
                sums += Queries::kSums;
                if (walk.m_block == work.begin)
                    sums += s64(params.head_tiles - (work.end - work.begin)) * Queries::kSums;
            }
            if (kEarlyDp) {
                if (follows) buffers.o_full(stage ^ 1).wait((count + 1) / kStages & 1);
                issue_dp(stage ^ 1);
                wgmma_wait<1>();
            } else {
                wgmma_wait<0>();
            }
            hold(s), hold(ds), hold(dk);
            arrive(buffers.q_empty(stage));
            walk.next(work);
        }

        // ---- scores
        // Products to weights, as an operand. `whole`: every query sees every key.
        template <bool whole>
        XATTN_DEVICE void weigh(const Work& work, const Walk& walk, u32 numbers, s32 row0, s32 first_key) {
            const Gradient gradient(p, work.seq, work.tile.sequence, walk.head);
            const int lane = this->lane();
            const s32 key0 = first_key + warp() * 16;
            Seen seen;
            if (!whole) seen = Seen(work.visible, row0, key0, lane);
            XATTN_UNROLL
            for (int n = 0; n < kQueryGroups; ++n) {
                float lse[4], factor[8];
                Arch::load_floats(lse, numbers + 4 * (n * 16 + 4 * (lane & 3)));
                XATTN_UNROLL
                for (int e = 0; e < 8; ++e) {
                    const s32 key = key0 + Arch::row_of(lane, Arch::row_slot(e));
                    const s32 row = row0 + n * 16 + Arch::col_of(lane, e);
                    s[n].x[e] = gradient.weight(s[n].x[e], row, key, lse[Arch::col_slot(e)], factor[e]);
                    if (!whole && !seen.by(Arch::row_slot(e), n * 16 + Arch::col_of(0, e))) s[n].x[e] = 0.0f;
                }
                weights[n] = Arch::template weights<Element>(s[n]);
                if (Config::softcap) {
                    Accumulator slope;
                    XATTN_UNROLL
                    for (int e = 0; e < 8; ++e) slope.x[e] = factor[e];
                    slopes[Config::softcap ? n : 0] = Arch::template weights<Element>(slope);
                }
            }
        }
        // Queries that see the two keys of a lane, as columns of lane 0.
        struct Seen {
            s32 first[2], last[2];
            XATTN_DEVICE Seen() {}
            XATTN_DEVICE Seen(const Visible& visible, s32 row0, s32 key0, int lane) {
                XATTN_UNROLL
                for (int r = 0; r < 2; ++r) {
                    const s32 key = key0 + Arch::row_of(lane, r), unbounded = Visible::kUnbounded;
                    const s32 at = row0 + Arch::col_of(lane, 0);
                    first[r] = visible.right == unbounded ? -unbounded : key - visible.shift - visible.right - at;
                    last[r] = visible.left == unbounded ? unbounded : key - visible.shift + visible.left - at;
                    if (key >= visible.seqlen_k) last[r] = -unbounded;
                }
            }
            XATTN_DEVICE bool by(int r, int col) const { return col >= first[r] && col <= last[r]; }
        };
        // Gradients of the weights to those of the products, but for softmax_scale, as an operand.
        template <bool whole>
        XATTN_DEVICE void differentiate(u32 numbers) {
            const int lane = this->lane();
            XATTN_UNROLL
            for (int n = 0; n < kQueryGroups; ++n) {
                float delta[4];
                Arch::load_floats(delta, numbers + 4 * (kTileM + n * 16 + 4 * (lane & 3)));
                XATTN_UNROLL
                for (int e = 0; e < 8; ++e) {
                    const float factor = Config::softcap ? part(slopes[Config::softcap ? n : 0], e) : 1.0f;
                    dp[n].x[e] =
                        Gradient::of_product(part(weights[n], e), dp[n].x[e], delta[Arch::col_slot(e)], factor, whole);
                }
                ds[n] = Arch::template weights<Element>(dp[n]);
            }
        }
        // Element e of an accumulator that has become an operand.
        XATTN_DEVICE static float part(const OperandA& a, int e) {
            return Arch::template to_float<Element>(u16(e % 2 ? a.x[e / 2] >> 16 : a.x[e / 2]));
        }

        // dS, rows of queries, in panels of 64 keys: one of each group's.
        XATTN_DEVICE void store_ds(u32 stage) {
            const int lane = this->lane();
            const u32 at = buffers.ds(stage) + group * kPanelQ;
            const u32 row = (lane >> 4) * 8 + (lane & 7), chunk = u32(warp() * 2 + (lane >> 3 & 1)) ^ u32(lane & 7);
            XATTN_UNROLL
            for (int n = 0; n < kQueryGroups; ++n) stmatrix_turned(at + (n * 16 + row) * 128 + chunk * 16, ds[n].x);
            fence_async_proxy();
        }

        // ---- results
        XATTN_DEVICE void add_dq() {
            float* to = sums + thread() * 4;
            XATTN_UNROLL
            for (int n = 0; n < 8; ++n) add_to_global(to + n * 512, dq[n / 2].x + n % 2 * 4);
        }

        // Each warp lays its rows down where its group's dS was, panels a buffer apart: K and V are being loaded anew.
        XATTN_DEVICE void store(s32 index) {
            const BackwardParams& b = params.b;
            // Found anew: the loop needs the registers.
            const Tile tile = tile_at(b.keys, u32(Arch::fresh(index)));
            const s32 sequence = tile.sequence, head = tile.head;
            const Sequence seq = Sequence::whole(p, sequence);
            const s32 key0 = tile.m_block * kTileN + group * 64 + warp() * 16, rows = seq.seqlen_k - key0;
            const u32 at = buffers.ds(0) + group * kPanelQ + warp() * 16 * 128;
            u16* of_v = target_row(b.dv, p.cu_seqlens_k, sequence, seq.start_k, head) + s64(key0) * b.dv.row_stride;
            u16* of_k = target_row(b.dk, p.cu_seqlens_k, sequence, seq.start_k, head) + s64(key0) * b.dk.row_stride;
            store_rows(dv, 1.0f, at, of_v, b.dv, rows, p.head_dim_v);
            Arch::warp_barrier();
            store_rows(dk, b.scale, at, of_k, b.dk, rows, p.head_dim);
            named_barrier_sync(2 + group, 128);  // all has been read that the next dS is laid over
        }
        template <int groups>
        XATTN_DEVICE static void store_rows(const Accumulator (&acc)[groups], float scale, u32 at, u16* target,
                                            const Operand& x, s32 rows, s32 cols) {
            const int lane = Consumer::lane();
            XATTN_UNROLL
            for (int g = 0; g < groups; ++g) {
                Accumulator scaled;
                XATTN_UNROLL
                for (int e = 0; e < 8; ++e) scaled.x[e] = acc[g].x[e] * scale;
                const u32 chunk = u32(g % 4 * 2 + (lane >> 4)) ^ u32(lane & 7);
                stmatrix(at + g / 4 * kBytesS + (lane & 15) * 128 + chunk * 16,
                         Arch::template weights<Element>(scaled).x);
            }
            Arch::warp_barrier();
            constexpr int kChunks = 2 * groups;
            XATTN_UNROLL
            for (int n = 0; n < kChunks / 2; ++n) {
                const int index = n * 32 + lane, row = index / kChunks, c = index % kChunks;
                if (row < rows && 8 * c < cols)
                    *reinterpret_cast<Chunk*>(target + s64(row) * x.row_stride + 8 * c) =
                        IsaSm80::load_shared(at + c / 8 * kBytesS + row * 128 + (u32(c % 8) ^ u32(row & 7)) * 16);
            }
        }
    };

    // Keys that belong to no sequence.
    XATTN_DEVICE static void clear_rest(const BackwardParams& b, const Tile& t, int thread) {
        const ForwardParams& p = b.p;
        const s64 end = index_at(p.cu_seqlens_k, p.index64 & 2, p.batch);
        const s64 start = min_of(max_of<s64>(end, 0), p.total_k);
        u16* dk = target_row(b.dk, p.cu_seqlens_k, 0, start, t.head);
        u16* dv = target_row(b.dv, p.cu_seqlens_k, 0, start, t.head);
        clear_rows<128 * kConsumers>(dk, b.dk, p.total_k - start, p.head_dim, t.m_block, b.keys.m_blocks, thread);
        clear_rows<128 * kConsumers>(dv, b.dv, p.total_k - start, p.head_dim_v, t.m_block, b.keys.m_blocks, thread);
    }
};

}  // namespace xattn
