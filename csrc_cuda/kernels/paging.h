// Keys and values of a paged cache: where the token at a position lies, and the copying of tiles of them.
#pragma once

#include "kernels/sequence.h"
#include "kernels/tile_copy.h"

namespace xattn {

// The pages of one sequence. What the table holds behind the sequence's length is never read. Params: what names the
// table, its stride, page_size, num_pages and status.
template <class Params>
struct PageTableOf {
    const Params* p;
    s64 row;  // where the sequence begins in it

    XATTN_DEVICE static PageTableOf of(const Params& p, s32 sequence) { return {&p, sequence * p.page_table_stride}; }

    struct Place {
        s32 page, slot;  // page -1: the table holds no page of the cache there, which is reported
        template <class T>
        XATTN_DEVICE const T* in(const T* cache, const Operand& x) const {
            return cache + page * x.batch_stride + slot * x.row_stride;
        }
    };
    XATTN_DEVICE Place at(s32 position) const {
        const u32 column = quotient(u32(position), p->page_size);
        const s64 page = index_at(p->page_table, p->index64 & 8, row + column);
        if (page < 0 || page >= p->num_pages) {
            if (p->status) p->status[int(Status::page_table)] = 1;
            return {-1, 0};
        }
        return {s32(page), s32(position - column * p->page_size.value)};
    }
};
using PageTable = PageTableOf<ForwardParams>;

// A thread's part in copying tiles of kRows keys, each found through the page table; as TileCopy otherwise. Keys whose
// page does not exist become 0.
template <class Arch, int kThreads, int kRows, int kCols>
struct PageCopy : TileCopy<Arch, kThreads, kRows, kCols> {
    using Base = TileCopy<Arch, kThreads, kRows, kCols>;
    const Operand& x;
    s32 position;  // of the thread's first key
    PageTable table;

    XATTN_DEVICE PageCopy(const u16* cache, const Operand& operand, s32 position0, s32 valid_cols, int thread)
        : Base(cache, operand, -(thread / Base::kPerRow), valid_cols, thread),  // its column in the first page
          x(operand),
          position(position0 + thread / Base::kPerRow),
          table{nullptr, 0} {}

    XATTN_DEVICE void start(typename Arch::Shared tile, s32 valid_rows) const {
        const s32 left = this->in_cols ? valid_rows - this->row : 0;
        XATTN_UNROLL
        for (int r = 0; r < kRows; r += Base::kStep) {
            if (this->ends(r)) break;
            PageTable::Place place{-1, 0};
            if (r < left) place = table.at(Arch::fresh(position) + r);
            const bool valid = place.page >= 0;
            Arch::copy_async(tile, this->target_at(r), valid ? place.in(this->source, x) : this->source, valid);
        }
    }
    XATTN_DEVICE void move(s32 rows) { position += rows; }
};

// How a kernel copies keys.
template <class Arch, bool kPaged, int kThreads, int kRows, int kCols>
struct KeyCopyOf {
    using Type = TileCopy<Arch, kThreads, kRows, kCols>;
};
template <class Arch, int kThreads, int kRows, int kCols>
struct KeyCopyOf<Arch, true, kThreads, kRows, kCols> {
    using Type = PageCopy<Arch, kThreads, kRows, kCols>;
};
template <class Arch, class Config, int kThreads, int kRows, int kCols>
using KeyCopy = typename KeyCopyOf<Arch, Config::paged, kThreads, kRows, kCols>::Type;

}  // namespace xattn
