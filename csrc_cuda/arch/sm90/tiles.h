// Which tiles a thread block works on, and how its warps hear of them: one warp finds them and writes each as a Work
// into a ring in shared memory, which the loading lane and the consumers read.
//
// The first tile of a block is its index; the next is the first that no block has taken yet. Launches that may overlap
// count in different queues (Sm90Params.queue; the launcher numbers them); the last block of a launch sets its queue
// back to 0. Without a queue a block takes every gridDim-th tile.
//
// Tiles of dense tensors are numbered as kernels/scheduler.h says. Of packed sequences only tiles that exist are
// numbered: sequence by sequence, row blocks outer, heads inner, the longest first where the mask makes them differ.
#pragma once

#include "arch/sm80/isa.h"
#include "arch/sm90/tma.h"
#include "kernels/params.h"
#include "kernels/scheduler.h"
#include "kernels/sequence.h"

namespace xattn {

struct Queue {
    u32 taken, ended;  // tiles beyond the first of each block; blocks
};
constexpr s32 kQueues = 4096;  // kWorkQueues of the launcher
__device__ Queue queues[kQueues];

struct alignas(16) Quad {
    s32 x[4];
};
XATTN_DEVICE Quad read_quad(u32 address) {
    Quad q;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.x[0]), "=r"(q.x[1]), "=r"(q.x[2]), "=r"(q.x[3])
                 : "r"(address));
    return q;
}
XATTN_DEVICE void write_quad(u32 address, s32 a, s32 b, s32 c, s32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// A tile and the key blocks that some of its rows see, [n_first, n_last], at least one; its place in shared memory, in
// four quads.
struct Work {
    static constexpr u32 kBytes = 64;
    static constexpr s32 kEnd = -1;  // for rows: no tile follows

    struct Rows {
        s32 sequence, head, row0, rows;  // rows of the tile that exist
        XATTN_DEVICE static Rows at(u32 work) {
            const Quad q = read_quad(work);
            return {q.x[0], q.x[1], q.x[2], q.x[3]};
        }
    };
    struct Keys {
        s32 n_first, n_last, shift, seqlen_k;  // shift: seqlen_k - seqlen_q
        XATTN_DEVICE static Keys at(u32 work) {
            const Quad q = read_quad(work + 16);
            return {q.x[0], q.x[1], q.x[2], q.x[3]};
        }
        XATTN_DEVICE Visible visible(const ForwardParams& p) const {
            return Visible::of(p, {0, 0, seqlen_k - shift, seqlen_k});
        }
    };
    struct Start {
        s32 row_q, row_k;  // of the tile and of the sequence, in q and k
        XATTN_DEVICE static Start at(u32 work) {
            const Quad q = read_quad(work + 32);
            return {q.x[0], q.x[1]};
        }
    };
    struct Factors {
        float scores, values;  // of 8-bit tensors: the scales of q and k, and of v
        XATTN_DEVICE static Factors at(u32 work) {
            const Quad q = read_quad(work + 48);
            return {__int_as_float(q.x[0]), __int_as_float(q.x[1])};
        }
    };
};

// Where a tile's first row goes.
template <class Element>
struct Place {
    Element* out;
    float* lse;
    XATTN_DEVICE Place(const ForwardParams& p, const Work::Rows& rows, const Work::Start& start) {
        const bool packed = p.cu_seqlens_q;
        const s32 row = packed ? start.row_q : rows.row0;
        out = static_cast<Element*>(p.out.data) + (packed ? 0 : rows.sequence * p.out.batch_stride) +
              rows.head * p.out.head_stride + row * p.out.row_stride;
        lse = p.lse + (packed ? 0 : rows.sequence * p.lse_batch_stride) + rows.head * p.lse_head_stride + row;
    }
};

// Out: what is done to the output (kernels/output.h).
template <class Out, int tile_m, int tile_n, int works, bool scaled, bool paged>
struct TileFinder {
    const ForwardParams& p;
    const u32 ring;      // Works
    const u32 barriers;  // full[works], empty[works]
    const s32 tiles;     // of dense tensors
    const s32 queue;     // -1: none
    const int lane;
    Ring<works> at{1};
    // Of packed sequences: 32 of them from `group` on, one to a lane, and the tiles ahead of them.
    s32 group = -32, ahead = 0, total = 0, blocks = 0, sum = 0;

    XATTN_DEVICE void run() {
        const bool counts = queue >= 0 && queue < kQueues;
        for (s32 index = blockIdx.x;; index = counts ? take() : index + s32(gridDim.x)) {
            Barrier{barriers + 8 * (works + at.stage())}.wait(at.parity());
            Tile tile;
            if (!(p.cu_seqlens_q ? find_packed(index, tile) : find_dense(index, tile))) break;
            if (write(tile)) at.next();
        }
        if (lane == 0) {
            write_quad(ring + at.stage() * Work::kBytes, 0, 0, 0, Work::kEnd);
            Barrier{barriers + 8 * at.stage()}.arrive();
            if (counts) end();
        }
        if (p.status && blockIdx.x == 0)
            for (s32 b = lane; b < p.batch; b += 32) Sequence::report(p, b);
    }

  private:
    XATTN_DEVICE s32 take() const {
        u32 taken = 0;
        if (lane == 0) taken = atomicAdd(&queues[queue].taken, 1u);
        return s32(__shfl_sync(0xffffffffu, taken, 0) + gridDim.x);
    }
    XATTN_DEVICE void end() const {
        __threadfence();
        if (atomicAdd(&queues[queue].ended, 1u) == gridDim.x - 1) queues[queue] = Queue{0, 0};
    }

    XATTN_DEVICE bool find_dense(s32 index, Tile& tile) const {
        if (index >= tiles) return false;
        tile = tile_at(p, u32(index));
        return true;
    }

    XATTN_DEVICE bool find_packed(s32 index, Tile& tile) {
        while (index - ahead >= total) {
            ahead += total;
            group += 32;
            if (group >= p.sequences) return false;
            const s32 b = group + lane;
            blocks = b < p.sequences ? (sequence(b).seqlen_q + tile_m - 1) / tile_m : 0;
            sum = blocks * p.heads_q;
            XATTN_UNROLL
            for (int n = 1; n < 32; n *= 2) {
                const s32 before = __shfl_up_sync(0xffffffffu, sum, n);
                if (lane >= n) sum += before;
            }
            total = __shfl_sync(0xffffffffu, sum, 31);
        }
        const s32 rest = index - ahead;
        const int owner = __ffs(__ballot_sync(0xffffffffu, rest < sum)) - 1;
        const s32 its_blocks = __shfl_sync(0xffffffffu, blocks, owner);
        const s32 inside = rest - (__shfl_sync(0xffffffffu, sum, owner) - its_blocks * p.heads_q);
        const s32 block = s32(quotient(u32(inside), p.heads));
        const bool bounded_right = p.causal || p.window_right >= 0;
        tile = {bounded_right ? its_blocks - 1 - block : block, inside - block * p.heads_q, group + owner};
        return true;
    }

    XATTN_DEVICE Sequence sequence(s32 b) const { return b == p.batch ? Sequence::rest(p) : Sequence::of(p, b); }

    // Of a tile without keys the output is written here and now: a consumer learns of a tile while it still holds the
    // one before, and whoever holds a Work and passes over the next waits, in a ring of two, for himself.
    XATTN_DEVICE bool write(const Tile& tile) const {
        const Sequence s = sequence(tile.sequence);
        const Visible visible = Visible::of(p, s);
        const s32 row0 = tile.m_block * tile_m, rows = max_of(0, min_of(tile_m, s.seqlen_q - row0));
        const s32 first = visible.first(row0), last = visible.last(row0 + rows - 1);
        const Work::Rows place = {tile.sequence, tile.head, row0, rows};
        const Work::Start start = {s32(s.start_q) + row0, s32(s.start_k)};
        if (last < first || rows == 0) {
            write_empty(place, start, visible.shift);
            return false;
        }
        if (lane == 0) {
            const u32 to = ring + at.stage() * Work::kBytes;
            write_quad(to, tile.sequence, tile.head, row0, rows);
            write_quad(to + 16, first / tile_n, last / tile_n, visible.shift, s.seqlen_k);
            write_quad(to + 32, start.row_q, start.row_k, 0, 0);
            if (scaled) {
                const s32 b = tile.sequence, head = s32(quotient(u32(tile.head), p.gqa_ratio));
                write_quad(to + 48, __float_as_int(p.q_scale.of(b, head) * p.k_scale.of(b, head)),
                           __float_as_int(p.v_scale.of(b, head)), 0, 0);
            }
            Barrier{barriers + 8 * at.stage()}.arrive();
        }
        return true;
    }
    XATTN_DEVICE void write_empty(const Work::Rows& rows, const Work::Start& start, s32 shift) const {
        const Place<typename Out::Element> to(p, rows, start);
        const bool sink = p.sinks && rows.sequence < p.batch;
        bool found = true;
        for (s32 r = 0; r < rows.rows; ++r) {
            if (Out::Functions::kEpilogue && rows.sequence < p.batch) {
                for (s32 c = lane * 2; c < p.head_dim_v; c += 64) {  // the registers of this warp are few
                    float x[2] = {0.0f, 0.0f};
                    Out::apply(p, x, rows.sequence, rows.head, rows.row0 + r + (paged ? shift : 0), c, found);
                    Out::store(to.out + r * p.out.row_stride + c, x);
                }
                continue;
            }
            for (s32 c = lane * 8; c < p.head_dim_v; c += 256)
                Out::template clear<8>(to.out + r * p.out.row_stride + c);
        }
        Out::report(p, found);
        for (s32 r = lane; p.lse && r < rows.rows; r += 32)
            to.lse[r] = sink ? p.sinks[rows.head] : -IsaSm80::infinity();
    }
};

}  // namespace xattn
