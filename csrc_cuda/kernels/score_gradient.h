// What the backward knows of a score, by logical position: its weight in the softmax, had again from lse, and how the
// score moves with the product. The meaning is that of scores.h.
//
// Weights are exp2(score - lse), both in the units of scores.h; a row without lse (it sees no key, or a sink takes all)
// has lse +infinity here, so that its weights are 0.
#pragma once

#include "kernels/backward_params.h"
#include "kernels/dropout.h"
#include "kernels/scores.h"

namespace xattn {

template <class Arch, class Config>
struct ScoreGradient {
    static constexpr bool kMasked = Config::attn_mask != Mask::none;
    static constexpr bool kAdded = Config::attn_mask == Mask::added16 || Config::attn_mask == Mask::added32;
    static constexpr bool kPlain = !Config::softcap && !Config::alibi && !kMasked;
    static constexpr float kUnit = kAdded ? 1.0f : kLog2e;    // a natural logarithm in these units
    static constexpr float kToLog2 = kAdded ? kLog2e : 1.0f;  // these units in log2

    const ForwardParams& p;
    s32 shift, seqlen_q, seqlen_k;
    float slope;
    const u8* mask_row;  // attn_mask at (sequence, head, 0, 0)

    XATTN_DEVICE ScoreGradient(const ForwardParams& params, const Sequence& seq, s32 sequence, s32 head)
        : p(params),
          shift(seq.seqlen_k - seq.seqlen_q),
          seqlen_q(seq.seqlen_q),
          seqlen_k(seq.seqlen_k),
          slope(0.0f),
          mask_row(nullptr) {
        if (Config::alibi) slope = p.alibi[sequence * p.alibi_batch_stride + head] * kUnit;
        if (kMasked) {
            mask_row = static_cast<const u8*>(p.mask) +
                       (sequence * p.mask_batch_stride + head * p.mask_head_stride) * kMaskBytes;
        }
    }

    // lse as memory holds it in the units of scores; where it is infinite, nothing of the row has a weight.
    XATTN_DEVICE static float lse(float stored) { return unbounded(stored) ? Arch::infinity() : stored * kUnit; }
    XATTN_DEVICE static bool unbounded(float x) { return x == Arch::infinity() || x == -Arch::infinity(); }

    // The weight of a product at (row, key); `factor` becomes what the score moves by, relative to its scale.
    XATTN_DEVICE float weight(float product, s32 row, s32 key, float lse, float& factor) const {
        if (kPlain) return Arch::exp2(Arch::fma(product, p.scale, -lse));
        float x = product * (Config::softcap ? p.scale : p.scale * (kUnit * kLn2));
        if (Config::softcap) {
            const float t = Arch::tanh_by_jumps(x);
            factor = Arch::fma(-t, t, 1.0f);
            x = p.softcap * (kUnit * kLn2) * t;
        }
        if (Config::alibi) {
            const s32 distance = row + shift - key;
            x -= slope * float(distance < 0 ? -distance : distance);
        }
        if (kMasked && row < seqlen_q && key < seqlen_k) x = masked(x, row, key);
        return Arch::exp2((x - lse) * kToLog2);
    }

    // The gradient of a weight, from that of what dropout makes of it.
    XATTN_DEVICE float through_dropout(float of_weight, bool kept) const {
        return kept ? of_weight * p.dropout_scale : 0.0f;
    }

    // The gradient of a product, but for softmax_scale, from that of its weight. A weight of 0 moves nothing, whatever
    // stands behind it; where a warp sees its whole tile there is none that is hidden.
    XATTN_DEVICE static float of_product(float weight, float of_weight, float delta, float factor, bool whole) {
        float x = weight * (of_weight - delta);
        if (Config::softcap) x *= factor;
        return (kMasked || !whole) && weight == 0.0f ? 0.0f : x;
    }

  private:
    static constexpr int kMaskBytes = Config::attn_mask == Mask::added16   ? 2
                                      : Config::attn_mask == Mask::added32 ? 4
                                                                           : 1;

    XATTN_DEVICE float masked(float x, s32 row, s32 key) const {
        const u8* at = mask_row + (row * p.mask_row_stride + key * p.mask_col_stride) * kMaskBytes;
        if (Config::attn_mask == Mask::boolean) return *at ? x : -Arch::infinity();
        const float added = Config::attn_mask == Mask::added16
                                ? Arch::template to_float<typename Config::Element>(*reinterpret_cast<const u16*>(at))
                                : *reinterpret_cast<const float*>(at);
        return added == -Arch::infinity() ? added : x + added;
    }
};

}  // namespace xattn
