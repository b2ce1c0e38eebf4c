// What a warp carries from key block to key block: scores, output and softmax of its rows, and the steps that work on
// them.
#pragma once

#include "kernels/softmax.h"

namespace xattn {

// S: the Scores. kRowGroups: 16-row groups of the warp. The layouts are those of the tiles in shared memory. Cache:
// what keys and values are there; those of 8 bits are widened on their way into registers. Element: what is multiplied.
template <class Arch, class Config, class S, int kRowGroups, class LayoutQ, class LayoutK, class LayoutV,
          class Cache = typename Config::Element, class Element = typename Config::Element>
struct WarpTile {
    using Accumulator = typename Arch::Accumulator;  // a 16 x 16 tile of float32
    using OperandA = typename Arch::OperandA;        // 16 rows x 16
    using OperandB = typename Arch::OperandB;        // 16 keys x 16
    using Shared = typename Arch::Shared;
    static constexpr int kDim = Config::head_dim, kDimV = Config::head_dim_v, kKeyGroups = Config::tile_n / 16;
    static constexpr int kRows = Arch::kRowsPerLane;  // rows a lane holds of a group
    static constexpr bool kKeepQ = Config::keep_q;    // Q in registers instead of reading it again for every block
    static constexpr bool kNarrow = sizeof(Cache) == 1;
    static constexpr int kAtOnce = kNarrow ? 2 : 1;  // operands of 16 columns that one load of keys or values gives

    Accumulator acc_s[kRowGroups][kKeyGroups];
    Accumulator acc_o[kRowGroups][kDimV / 16];
    OperandA q[kKeepQ ? kRowGroups : 1][kKeepQ ? kDim / 16 : 1];
    Softmax<Arch, S, kRows> soft[kRowGroups];
    Dropout dropout;  // where there is any

    XATTN_DEVICE void softmax_reset() {
        XATTN_UNROLL
        for (int g = 0; g < kRowGroups; ++g) soft[g].reset();
    }
    XATTN_DEVICE void clear_output() {
        XATTN_UNROLL
        for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
        for (int d = 0; d < kDimV / 16; ++d) acc_o[g][d].clear();
    }
    // Rows without a key are 0, whatever the values of keys that they do not see. `inverse`: what rows are multiplied
    // by.
    XATTN_DEVICE void clear_empty(int g, const float (&inverse)[kRows]) {
        bool empty = false;
        XATTN_UNROLL
        for (int r = 0; r < kRows; ++r) empty |= inverse[r] == 0.0f;
        if (!Arch::any(empty)) return;
        XATTN_UNROLL
        for (int d = 0; d < kDimV / 16; ++d) XATTN_UNROLL
        for (int e = 0; e < Arch::kElements; ++e)
            if (inverse[Arch::row_slot(e)] == 0.0f) acc_o[g][d].x[e] = 0.0f;
    }
    XATTN_DEVICE void keep_q(Shared pq) {
        XATTN_UNROLL
        for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
        for (int c = 0; c < kDim / 16; ++c) q[kKeepQ ? g : 0][kKeepQ ? c : 0] = load_q(pq, g, c);
    }
    XATTN_DEVICE static OperandA load_q(Shared pq, int g, int c) {
        return Arch::template load_rows<LayoutQ>(pq, g * 16, c * 16);
    }

    // acc_s = Q K^T
    XATTN_DEVICE void multiply_qk(Shared pq, Shared pk) {
        XATTN_UNROLL
        for (int g = 0; g < kRowGroups; ++g) XATTN_UNROLL
        for (int n = 0; n < kKeyGroups; ++n) acc_s[g][n].clear();
        XATTN_UNROLL
        for (int c = 0; c < kDim / 16; c += kAtOnce) {
            OperandA a[kAtOnce][kRowGroups];
            XATTN_UNROLL
            for (int i = 0; i < kAtOnce; ++i) XATTN_UNROLL
            for (int g = 0; g < kRowGroups; ++g)
                a[i][g] = kKeepQ ? q[kKeepQ ? g : 0][kKeepQ ? c + i : 0] : load_q(pq, g, c + i);
            XATTN_UNROLL
            for (int n = 0; n < kKeyGroups; ++n) {
                OperandB b[kAtOnce];
                load_keys(b, pk, n * 16, c * 16);
                XATTN_UNROLL
                for (int i = 0; i < kAtOnce; ++i) XATTN_UNROLL
                for (int g = 0; g < kRowGroups; ++g) Arch::template multiply<Element>(acc_s[g][n], a[i][g], b[i]);
            }
        }
    }

    // Scores become weights, relative to each row's reference; the output follows where a reference moves. Sums are of
    // all weights, also of those that are dropped then.
    XATTN_DEVICE void softmax(const S& scores, s32 key0, bool whole) {
        XATTN_UNROLL
        for (int g = 0; g < kRowGroups; ++g) {
            scores.modify(acc_s[g], g, key0);
            if (!whole) scores.mask(acc_s[g], g, key0);
            float largest[kRows], factor[kRows], base[kRows];
            XATTN_UNROLL
            for (int r = 0; r < kRows; ++r) largest[r] = -Arch::infinity();
            XATTN_UNROLL
            for (int n = 0; n < kKeyGroups; ++n) XATTN_UNROLL
            for (int e = 0; e < Arch::kElements; ++e)
                largest[Arch::row_slot(e)] = Arch::max(largest[Arch::row_slot(e)], acc_s[g][n].x[e]);
            S::to_scores(scores.p, largest);
            if (soft[g].move_reference(scores.p, largest, factor, base, acc_s[g])) {
                XATTN_UNROLL
                for (int d = 0; d < kDimV / 16; ++d) XATTN_UNROLL
                for (int e = 0; e < Arch::kElements; ++e) acc_o[g][d].x[e] *= factor[Arch::row_slot(e)];
            }
            XATTN_UNROLL
            for (int n = 0; n < kKeyGroups; ++n) XATTN_UNROLL
            for (int e = 0; e < Arch::kElements; ++e) {
                const int r = Arch::row_slot(e);
                const float w = S::weight(scores.p, acc_s[g][n].x[e], base[r]);
                acc_s[g][n].x[e] = w;
                soft[g].row_sum[r] += w;
            }
            if constexpr (Config::dropout) scores.drop(dropout, acc_s[g], g, key0);
        }
    }

    // acc_o += P V
    XATTN_DEVICE void multiply_pv(Shared pv) {
        XATTN_UNROLL
        for (int n = 0; n < kKeyGroups; ++n) {
            OperandA a[kRowGroups];
            XATTN_UNROLL
            for (int g = 0; g < kRowGroups; ++g) a[g] = Arch::template weights<Element>(acc_s[g][n]);
            XATTN_UNROLL
            for (int d = 0; d < kDimV / 16; d += kAtOnce) {
                OperandB b[kAtOnce];
                load_values(b, pv, n * 16, d * 16);
                XATTN_UNROLL
                for (int i = 0; i < kAtOnce; ++i) XATTN_UNROLL
                for (int g = 0; g < kRowGroups; ++g) Arch::template multiply<Element>(acc_o[g][d + i], a[g], b[i]);
            }
        }
    }

    // The column of acc_o, within its 16, of a lane's element.
    XATTN_DEVICE static int output_col(int lane, int e) {
        return kNarrow ? Arch::narrow_col_of(lane, e) : Arch::col_of(lane, e);
    }
    XATTN_DEVICE static Shared keys_pointer(Shared tile, int lane) {
        if constexpr (kNarrow)
            return Arch::template narrow_keys_pointer<LayoutK>(tile, lane);
        else
            return Arch::template keys_pointer<LayoutK>(tile, lane);
    }
    XATTN_DEVICE static Shared values_pointer(Shared tile, int lane) {
        if constexpr (kNarrow)
            return Arch::template narrow_values_pointer<LayoutV>(tile, lane);
        else
            return Arch::template values_pointer<LayoutV>(tile, lane);
    }

  private:
    XATTN_DEVICE static void load_keys(OperandB (&b)[kAtOnce], Shared pk, int key, int col) {
        if constexpr (kNarrow)
            Arch::template load_narrow_keys<Element, Cache, LayoutK>(b, pk, key, col);
        else
            b[0] = Arch::template load_keys<LayoutK>(pk, key, col);
    }
    XATTN_DEVICE static void load_values(OperandB (&b)[kAtOnce], Shared pv, int key, int col) {
        if constexpr (kNarrow)
            Arch::template load_narrow_values<Element, Cache, LayoutV>(b, pv, key, col);
        else
            b[0] = Arch::template load_values<LayoutV>(pv, key, col);
    }
};

}  // namespace xattn
