// Online softmax (Milakov and Gimelshein, 2018) of the rows that a lane holds, in the units of Scores.
//
// The reference of a row need not be its exact maximum: it moves only when a score exceeds it by kSlack, so that the
// common step neither exchanges maxima between lanes nor rescales the output. Weights are relative to a base that lies
// kLift below it (WeightRange in scores.h says why).
//
// Where scores are plain, one rounding makes a product a score relative to its base, and the base was rounded as well:
// from kFar on the two differ by more than weights can hold. A score as large as the reference counts as a move there,
// as adding kSlack changes nothing, and the move makes the block's products exact; whatever is smaller stays below 1.
//
// Natural scores become weights by one rounding as well, of a base that was rounded to log2 units: as exact as the
// scores are. From kFarNatural on each block's base is subtracted first, as the lowest float has no value in log2.
#pragma once

#include "kernels/platform.h"

namespace xattn {

// kRows: rows a lane holds. kApart: all that a moving reference takes is behind one jump, so that the common path runs
// straight on; it takes registers.
template <class Arch, class Scores, int kRows, bool kApart = false>
struct Softmax {
    static constexpr float kSlack = Scores::kSlack;
    static constexpr float kFar = 134217728.0f;       // 2^27: half a unit in the last place is 8
    static constexpr float kFarNatural = 1048576.0f;  // 2^20
    // The reference of a row that has seen no key: less than any score, and no score that is plain is compared with it.
    XATTN_DEVICE static float none() { return Scores::kPlain ? -3.402823466e38f : -Arch::infinity(); }
    float reference[kRows];
    float row_sum[kRows];  // of this lane's columns; summed over lanes at the end

    XATTN_DEVICE void reset() {
        XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) reference[r] = none(), row_sum[r] = 0.0f;
    }

    // Takes the largest score of each row among this lane's columns, and their scores or products in `s`; `base` is
    // what Scores::weight is to be given. Returns whether `factor` must be applied to the output.
    template <class Params, class Accumulator, int n>
    XATTN_DEVICE bool move_reference(const Params& p, const float (&largest)[kRows], float (&factor)[kRows],
                                     float (&base)[kRows], Accumulator (&s)[n]) {
        bool moves = false;
        XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) {
            const float top = reference[r] + kSlack;
            moves |= Scores::kPlain ? largest[r] >= top : largest[r] > top;
        }
        const bool moved = Arch::any(moves);
        if (kApart && !XATTN_RARELY(moved)) {
            take(base);
            if (Scores::kNatural) to_log2(base, s);
            return false;
        }
        if (moved) move(largest, factor);
        take(base);
        if (Scores::kPlain && moved) make_exact(p, base, s);
        if (Scores::kNatural) to_log2(base, s);
        return moved;
    }

    // What is subtracted from the scores of a row; 0 where it has seen no key.
    XATTN_DEVICE static float base_of(float reference) {
        return reference == none() ? 0.0f : reference - Scores::kLift;
    }
    XATTN_DEVICE float base(int r) const { return base_of(reference[r]); }

    // How much less a row's sum and output weigh when its reference becomes `top`. Without a key they are 0, or NaN.
    XATTN_DEVICE static float factor(float from, float top) {
        return from == none() ? 1.0f : Scores::exponential(from - top);
    }

  private:
    XATTN_DEVICE void take(float (&base)[kRows]) const {
        XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) base[r] = this->base(r);
    }
    XATTN_DEVICE void move(const float (&largest)[kRows], float (&factors)[kRows]) {
        XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) {
            const float top = Arch::row_max(Arch::max(largest[r], reference[r]));
            const float old = reference[r];
            reference[r] = top;
            factors[r] = factor(old, top);
            row_sum[r] *= factors[r];
        }
    }
    XATTN_DEVICE static bool are_far(const float (&base)[kRows], float from) {
        bool far = false;
        XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) far |= fabsf(base[r]) >= from;
        return kApart ? Arch::any(far) : far;
    }
    // Natural bases in log2 units, and 0 where rows are far out.
    template <class Accumulator, int n>
    XATTN_DEVICE static void to_log2(float (&base)[kRows], Accumulator (&s)[n]) {
        if (XATTN_RARELY(are_far(base, kFarNatural))) {
            XATTN_UNROLL
            for (int i = 0; i < n; ++i) XATTN_UNROLL
            for (int e = 0; e < Arch::kElements; ++e) s[i].x[e] -= base[Arch::row_slot(e)];
            XATTN_UNROLL
            for (int r = 0; r < kRows; ++r) base[r] = 0.0f;
        }
        XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) base[r] *= kLog2e;
    }
    // Where a row is far out: products of which Scores::weight makes, with a base of 0, what twice rounded scores give.
    template <class Params, class Accumulator, int n>
    XATTN_DEVICE static void make_exact(const Params& p, float (&base)[kRows], Accumulator (&s)[n]) {
        if (!are_far(base, kFar)) return;
        const float inverse = Arch::divide(1.0f, p.scale);
        XATTN_UNROLL
        for (int i = 0; i < n; ++i) XATTN_UNROLL
        for (int e = 0; e < Arch::kElements; ++e)
            s[i].x[e] = (Arch::product(s[i].x[e], p.scale) - base[Arch::row_slot(e)]) * inverse;
        XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) base[r] = 0.0f;
    }
};

}  // namespace xattn
