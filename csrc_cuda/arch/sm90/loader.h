// The loader of the Hopper forward: tensors by one lane, of a paged cache all lanes of a warp or two, each for a piece
// of a block that lies in one page. Who waits for whom: forward.h.
#pragma once

#include "arch/sm90/tiles.h"
#include "arch/sm90/tma.h"
#include "kernels/paging.h"

namespace xattn {

template <class Forward>
struct Loader {
    static constexpr bool kPaged = Forward::kPaged;
    static constexpr u32 kWorks = Forward::kWorks, kQueries = Forward::kQueries, kStages = Forward::kStages;
    static constexpr int kTileN = Forward::kTileN;

    const typename Forward::Params& params;
    const typename Forward::Buffers buffers;
    const int lane;
    Ring<kWorks> works;
    Ring<kQueries> q{1};
    Ring<kStages> k{1}, v{1};
    u32 loaded = 0;  // tiles

    // Where a sequence's keys are for a tile's head.
    struct Keys {
        s32 row, head, sequence, seqlen_k;
    };
    struct Tile {
        s32 row_q, head, sequence, n_first, n_last;
        Keys keys;
    };
    // Of a paged cache, where this lane's piece of a block is; the page behind the last one reads as 0.
    struct Piece {
        s32 page, slot;
    };

    // Warps that load.
    XATTN_DEVICE static u32 warps(const typename Forward::Params& params) {
        return kPaged && params.piece < kTileN / 2 ? 2 : 1;
    }
    XATTN_DEVICE Loader(const typename Forward::Params& ps, const typename Forward::Buffers& b, int lane_)
        : params(ps), buffers(b), lane(lane_) {}

    // Loads all there is: of tensors one lane, of a paged cache a warp.
    XATTN_DEVICE void run() {
        if (leads()) tma_prefetch(&params.q), tma_prefetch(&params.k), tma_prefetch(&params.v);
        // The block whose V is loaded behind the next K, be it another tile's.
        Keys keys_before;
        Piece piece_before;
        s32 pending = -1;
        for (Tile tile; next(tile);) {
            const Keys& keys = tile.keys;
            Piece piece = find(keys, tile.n_last);
            // A single Q that is read to the end is free too late for V to wait behind it.
            constexpr bool v_first = kQueries == 1 && !Forward::kKeepQ;
            if (v_first && pending >= 0) load_v(keys_before, pending, piece_before), pending = -1;
            load_q(tile);
            for (s32 n = tile.n_last; n >= tile.n_first; --n) {
                const Piece ahead = find(keys, max_of(n - 1, tile.n_first));
                load_k(keys, n, piece);
                if (pending >= 0) load_v(keys_before, pending, piece_before);
                keys_before = keys, pending = n, piece_before = piece, piece = ahead;
            }
            release();
        }
        if (pending >= 0) load_v(keys_before, pending, piece_before);
    }
    // Of a paged cache of small pages: a warp loads Q and K, another V, as a box for every page takes a warp's time.
    template <bool values>
    XATTN_DEVICE void run_part() {
        if (leads()) tma_prefetch(&params.q), tma_prefetch(values ? &params.v : &params.k);
        for (Tile tile; next(tile);) {
            Piece piece = find(tile.keys, tile.n_last);
            if (!values) load_q(tile);
            for (s32 n = tile.n_last; n >= tile.n_first; --n) {
                const Piece ahead = find(tile.keys, max_of(n - 1, tile.n_first));
                if (values)
                    load_v(tile.keys, n, piece);
                else
                    load_k(tile.keys, n, piece);
                piece = ahead;
            }
            release();
        }
    }

  private:
    XATTN_DEVICE bool leads() const { return !kPaged || lane == 0; }

    // The next tile; false where there is none.
    XATTN_DEVICE bool next(Tile& tile) {
        buffers.work_full(works.stage()).wait(works.parity());
        const u32 at = buffers.work(works.stage());
        const Work::Rows rows = Work::Rows::at(at);
        if (rows.rows == Work::kEnd) return false;
        const Work::Keys range = Work::Keys::at(at);
        const Work::Start start = Work::Start::at(at);
        works.next();
        tile = {start.row_q,
                rows.head,
                params.p.cu_seqlens_q ? 0 : rows.sequence,
                range.n_first,
                range.n_last,
                {start.row_k, s32(quotient(u32(rows.head), params.p.gqa_ratio)),
                 params.p.cu_seqlens_k ? 0 : rows.sequence, range.seqlen_k}};
        return true;
    }
    // The tile's loads are issued. The loader says so of a Work only when it has loaded some tiles more: the later
    // a tile is taken, the better tiles are spread at the end. Finding a short one must not be waited for.
    XATTN_DEVICE void release() {
        const u32 lag = params.p.cu_seqlens_q ? 0 : kWorks - 1;
        if (leads() && loaded >= lag) buffers.work_empty((loaded - lag) % kWorks).arrive();
        ++loaded;
    }
    XATTN_DEVICE static s32 column(u32 panel) { return s32(panel * (128 / Forward::kWidth)); }

    // Asked a block ahead: the page table is far away.
    XATTN_DEVICE Piece find(const Keys& keys, s32 n) const {
        if (!kPaged) return {};
        const s32 row = lane * params.piece, position = n * kTileN + row;
        PageTable::Place place{-1, 0};
        if (row < kTileN && position < keys.seqlen_k) place = PageTable::of(params.p, keys.sequence).at(position);
        return {place.page < 0 ? params.p.num_pages : place.page, place.slot};
    }
    XATTN_DEVICE void load_q(const Tile& tile) {
        const Barrier full = buffers.q_full(q.stage());
        buffers.q_empty(q.stage()).wait(q.parity());
        if (leads()) {
            full.arrive_and_expect(Forward::kBytesQ);
            XATTN_UNROLL
            for (u32 c = 0; c < Forward::kPanels; ++c)
                tma_load(buffers.q(q.stage()) + c * Forward::kPanelQ, &params.q, full, column(c), tile.row_q, tile.head,
                         tile.sequence);
        }
        q.next();
    }
    XATTN_DEVICE void load_k(const Keys& keys, s32 n, const Piece& piece) {
        const Barrier full = buffers.k_full(k.stage());
        buffers.k_empty(k.stage()).wait(k.parity());
        if (leads()) full.arrive_and_expect(Forward::kBytesK);
        load<Forward::kPanels>(buffers.k(k.stage()), &params.k, full, keys, n, piece);
        k.next();
    }
    XATTN_DEVICE void load_v(const Keys& keys, s32 n, const Piece& piece) {
        const Barrier full = buffers.landed_full(v.stage());
        buffers.landed_empty(v.stage()).wait(v.parity());
        if (leads()) full.arrive_and_expect(Forward::kBytesLanded);
        load<Forward::kPanelsV>(buffers.landed(v.stage()), &params.v, full, keys, n, piece);
        v.next();
    }
    template <u32 panels>
    XATTN_DEVICE void load(u32 target, const TensorMap* map, Barrier full, const Keys& keys, s32 n,
                           const Piece& piece) const {
        const s32 row = lane * params.piece;
        if (kPaged && row >= kTileN) return;
        XATTN_UNROLL
        for (u32 c = 0; c < panels; ++c) {
            if (kPaged)
                tma_load(target + c * Forward::kPanelK + row * 128, map, full, column(c), piece.slot, keys.head,
                         piece.page);
            else
                tma_load(target + c * Forward::kPanelK, map, full, column(c), keys.row + n * kTileN, keys.head,
                         keys.sequence);
        }
    }
};

}  // namespace xattn
