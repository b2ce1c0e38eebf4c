// Where one sequence lies in the tensors, and which keys its rows can see.
#pragma once

#include "kernels/params.h"

namespace xattn {

XATTN_DEVICE s64 index_at(const void* data, bool wide, s64 i) {
    return wide ? static_cast<const s64*>(data)[i] : static_cast<const s32*>(data)[i];
}

// Whatever the device holds, start and length stay inside the tensors.
struct Sequence {
    s64 start_q, start_k;  // first row in a packed tensor, 0 in a dense one
    s32 seqlen_q, seqlen_k;

    XATTN_DEVICE static Sequence of(const ForwardParams& p, s32 b) {
        Sequence s = whole(p, b);
        if (p.seqused_k) {
            s.seqlen_k = s32(min_of<s64>(s.seqlen_k, max_of<s64>(0, index_at(p.seqused_k, p.index64 & 4, b))));
        }
        return s;
    }

    // With the keys behind seqused_k.
    XATTN_DEVICE static Sequence whole(const ForwardParams& p, s32 b) {
        Sequence s{0, 0, p.seqlen_q, p.seqlen_k};
        if (p.cu_seqlens_q) s.start_q = span(p.cu_seqlens_q, p.index64 & 1, b, p.total_q, p.seqlen_q, s.seqlen_q);
        if (p.cu_seqlens_k) s.start_k = span(p.cu_seqlens_k, p.index64 & 2, b, p.total_k, p.seqlen_k, s.seqlen_k);
        return s;
    }

    // The rows of a packed q behind the last offset, which see no key.
    XATTN_DEVICE static Sequence rest(const ForwardParams& p) {
        const s64 start = min_of(max_of<s64>(index_at(p.cu_seqlens_q, p.index64 & 1, p.batch), 0), p.total_q);
        return {start, 0, s32(p.total_q - start), 0};
    }

    // Reports what is wrong with sequence b; one thread of a launch calls it for each.
    XATTN_DEVICE static void report(const ForwardParams& p, s32 b) {
        s64 room = p.seqlen_k;
        if (p.cu_seqlens_q) report_span(p, p.cu_seqlens_q, p.index64 & 1, b, p.total_q, p.seqlen_q);
        if (p.cu_seqlens_k) room = report_span(p, p.cu_seqlens_k, p.index64 & 2, b, p.total_k, p.seqlen_k);
        if (p.seqused_k) {
            const s64 used = index_at(p.seqused_k, p.index64 & 4, b);
            if (p.page_table) room = p.total_k;
            if (used < 0 || used > room) p.status[int(Status::seqlens_k)] = 1;
            if (p.page_table && used > p.seqlen_k) p.status[int(Status::max_seqlen)] = 1;
        }
    }

  private:
    XATTN_DEVICE static s64 report_span(const ForwardParams& p, const void* offsets, bool wide, s32 b, s64 total,
                                        s64 longest) {
        const s64 start = index_at(offsets, wide, b), end = index_at(offsets, wide, b + 1);
        if (start < 0 || end < start || end > total || (b == 0 && start != 0)) p.status[int(Status::cu_seqlens)] = 1;
        if (end - start > longest) p.status[int(Status::max_seqlen)] = 1;
        return end - start;
    }
    XATTN_DEVICE static s64 span(const void* offsets, bool wide, s32 b, s64 total, s32 longest, s32& length) {
        const s64 start = min_of(max_of<s64>(index_at(offsets, wide, b), 0), total);
        const s64 end = min_of(max_of<s64>(index_at(offsets, wide, b + 1), start), total);
        length = s32(min_of<s64>(end - start, longest));
        return start;
    }
};

// Keys [first, last] that a row sees: causal and window masks are one interval, aligned bottom-right.
struct Visible {
    s32 shift;        // seqlen_k - seqlen_q
    s32 left, right;  // distances from the diagonal; kUnbounded where there is no bound
    s32 seqlen_k;

    static constexpr s32 kUnbounded = 0x3fffffff;

    XATTN_DEVICE static Visible of(const ForwardParams& p, const Sequence& s) {
        s32 right = p.window_right < 0 ? kUnbounded : p.window_right;
        if (p.causal) right = 0;
        return {s.seqlen_k - s.seqlen_q, p.window_left < 0 ? kUnbounded : p.window_left, right, s.seqlen_k};
    }
    XATTN_DEVICE s32 first(s32 row) const { return left == kUnbounded ? 0 : max_of(0, row + shift - left); }
    XATTN_DEVICE s32 last(s32 row) const {
        return right == kUnbounded ? seqlen_k - 1 : min_of(seqlen_k - 1, row + shift + right);
    }
};

}  // namespace xattn
