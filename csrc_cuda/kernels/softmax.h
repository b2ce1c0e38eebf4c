// Online softmax (Milakov and Gimelshein, 2018) of the rows that a lane holds, in the units of Scores.
//
// The reference of a row need not be its exact maximum: it moves only when a score exceeds it by more than kSlack, so
// that the common step neither exchanges maxima between lanes nor rescales the output.
#pragma once

#include "kernels/platform.h"

namespace xattn {

template <class Arch, class Scores, int kRows>  // rows a lane holds
struct Softmax {
    static constexpr float kSlack = 8.0f;
    float reference[kRows];
    float row_sum[kRows];  // of this lane's columns; summed over lanes at the end

    XATTN_DEVICE void reset() {
        XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) reference[r] = -Arch::infinity(), row_sum[r] = 0.0f;
    }

    // Takes the largest score of each row among this lane's columns. Returns whether `factor` must be applied to the
    // output.
    XATTN_DEVICE bool move_reference(const float (&largest)[kRows], float (&factor)[kRows]) {
        bool moves = false;
        XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) moves |= largest[r] > reference[r] + kSlack;
        if (!Arch::any(moves)) return false;
        XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) {
            const float top = Arch::row_max(Arch::max(largest[r], reference[r]));
            const float old = reference[r];
            reference[r] = top;
            factor[r] = top == -Arch::infinity() ? 1.0f : Scores::exponential(old - top);
            row_sum[r] *= factor[r];
        }
        return true;
    }

    // What is subtracted from the scores of a row; 0 where it has seen no key.
    XATTN_DEVICE float base(int r) const { return reference[r] == -Arch::infinity() ? 0.0f : reference[r]; }
};

}  // namespace xattn
