// What happens to a score between the product and the softmax, by logical position: scale, softcap, score_mod, ALiBi,
// attn_mask, masks, mask_mod.
//
// Without softcap, score_mod, ALiBi or attn_mask the products stay as they are, and the scale, which must be positive
// then, enters the softmax as one multiply-add. any_scale is for scales that are not.
//
// Where heads are packed, the rows of a tile are the queries of all heads that share a key head: row r is query
// r / gqa_ratio of head r % gqa_ratio of those.
//
// Scores are in log2 units. With a score_mod or an added mask they are in natural units: the lowest float, which masks
// hold, has no finite value in log2.
#pragma once

#include "kernels/dropout.h"
#include "kernels/params.h"
#include "kernels/sequence.h"
#include "kernels/user_functions.h"

namespace xattn {

enum class Mask { none, boolean, added16, added32, tree };

// The scale of plain scores where it is not the launch's.
struct Factor {
    float scale;
};

// How large the weights of a row become, in powers of 2: its reference moves where a score exceeds it by more than
// `slack`, and all weights are 2^lift times as large, which the division by their sum takes back. An 8-bit weight, of
// 2^-9 to 448, holds small ones then.
template <class Element>
struct WeightRange {
    static constexpr float slack = 8.0f, lift = 0.0f;
};
template <>
struct WeightRange<e4m3> {
    static constexpr float slack = 0.0f, lift = 8.0f;
};

// What results are rounded to, and 16-bit masks hold, beside elements of q.
template <class Element>
struct WideOf {
    using Type = Element;
};
template <>
struct WideOf<e4m3> {
    using Type = bf16;
};

// kScaled: products have factors beside the launch's scale.
template <class Arch, class Config, bool kPackHeads = false, bool kScaled = false>
struct Scores {
    using Functions = typename Config::Functions;
    static constexpr bool kPlain = !Config::any_scale && !Config::softcap && !Functions::kScoreMod && !Config::alibi &&
                                   Config::attn_mask == Mask::none;
    static constexpr bool kModifies = !kPlain || Functions::kMaskMod;
    static constexpr bool kAdded = Config::attn_mask == Mask::added16 || Config::attn_mask == Mask::added32;
    static constexpr bool kNatural = kAdded || Functions::kScoreMod;
    static constexpr float kUnit = kNatural ? 1.0f : kLog2e;    // a natural logarithm in these units
    static constexpr float kToLog2 = kNatural ? kLog2e : 1.0f;  // these units in log2
    static constexpr float kSlack = WeightRange<typename Config::Element>::slack / kToLog2,
                           kLift = WeightRange<typename Config::Element>::lift / kToLog2;
    static constexpr int kKeyGroups = Config::tile_n / 16;
    using Accumulator = typename Arch::Accumulator;

    const ForwardParams& p;
    Visible visible;
    const float* slopes;  // of the head, or of the first of the heads that are packed
    float slope;          // of the head
    const u8* mask_row;   // attn_mask at (sequence, head, 0, 0); a tree at the sequence's first query
    // For the user's functions; head: the first of the heads that are packed, else their functions have loaded it.
    s32 sequence, head;
    typename Functions::template ScoreMod<Arch> score_mod;
    typename Functions::template MaskMod<Arch> mask_mod;
    s32 row0;  // the warp's first row
    int lane;
    // Of products, beside the scale: of all, and of the lane's rows. Where scores are not plain, and kScaled.
    float factor = 1.0f;
    float row_factor[Arch::kRowsPerLane];

    // `first_query`: the sequence's first in q, for trees.
    XATTN_DEVICE Scores(const ForwardParams& params, const Visible& v, s32 sequence_, s32 head_, s32 first_row,
                        int lane_, s64 first_query = 0)
        : p(params),
          visible(v),
          slopes(nullptr),
          slope(0.0f),
          mask_row(nullptr),
          sequence(sequence_),
          head(head_),
          row0(first_row),
          lane(lane_) {
        XATTN_UNROLL
        for (int r = 0; kScaled && r < Arch::kRowsPerLane; ++r) row_factor[r] = 1.0f;
        if (Config::alibi) {
            slopes = p.alibi + sequence * p.alibi_batch_stride + head;
            if (!kPackHeads) slope = slopes[0] * kUnit;
        }
        if constexpr (!kPackHeads && Functions::kScoreMod) score_mod.load(captured(), sequence, head);
        if constexpr (!kPackHeads && Functions::kMaskMod) mask_mod.load(captured(), sequence, head);
        if (Config::attn_mask == Mask::tree) {
            mask_row = static_cast<const u8*>(p.mask) + first_query * p.mask_row_stride;
        } else if (Config::attn_mask != Mask::none) {
            mask_row = static_cast<const u8*>(p.mask) +
                       (sequence * p.mask_batch_stride + head * p.mask_head_stride) * kMaskBytes;
        }
    }

    // Products to scores, where they are not plain; those that a mask_mod hides become -infinity.
    XATTN_DEVICE void modify(Accumulator (&s)[kKeyGroups], int group, s32 key0) const {
        if (!kModifies) return;
        u64 missing = lacks_head();  // bit n * kElements + e: the user asked for what a captured tensor has not got
        const float scale = this->scale(), cap = p.softcap * (kUnit * kLn2);
        XATTN_UNROLL
        for (int n = 0; n < kKeyGroups; ++n) XATTN_UNROLL
        for (int e = 0; e < Arch::kElements; ++e) {
            const s32 place = row0 + group * 16 + Arch::row_of(lane, Arch::row_slot(e)), row = query(p, place),
                      key = key0 + n * 16 + Arch::col_of(lane, e);
            float x = s[n].x[e];
            if (kScaled) x *= row_factor[Arch::row_slot(e)];
            if (!kPlain) x *= scale;
            if (Config::softcap) x = cap * Arch::tanh(x);
            if constexpr (Functions::kScoreMod) {
                const Element at = element(place, row, key);
                bool found = true;
                x = loaded(score_mod, at, found).at(captured(), x, sequence, at.head, at.q_idx, at.kv_idx, found);
                if (kNotes) missing |= u64(found ? 0 : 1) << (n * Arch::kElements + e);
            }
            if (Config::alibi) {
                const s32 distance = row + visible.shift - key;
                const float by = kPackHeads ? slopes[place - row * s32(p.gqa_ratio.value)] * kUnit : slope;
                x -= by * float(distance < 0 ? -distance : distance);
            }
            if (Config::attn_mask != Mask::none && row < row_end() && key < visible.seqlen_k)
                x = attn_mask(x, row, key);
            if constexpr (Functions::kMaskMod) {
                const Element at = element(place, row, key);
                bool found = true;
                if (!loaded(mask_mod, at, found).at(captured(), sequence, at.head, at.q_idx, at.kv_idx, found))
                    x = -Arch::infinity();
                if (kNotes) missing |= u64(found ? 0 : 1) << (n * Arch::kElements + e);
            }
            s[n].x[e] = x;
        }
        if (Functions::kReads && XATTN_RARELY(missing != 0)) report(missing, group, key0);
    }

    // Weights that dropout takes become 0.
    XATTN_DEVICE void drop(const Dropout& dropout, Accumulator (&w)[kKeyGroups], int group, s32 key0) const {
        Dropout::Row rows[Arch::kRowsPerLane];
        XATTN_UNROLL
        for (int r = 0; r < Arch::kRowsPerLane; ++r) {
            const s32 place = row0 + group * 16 + Arch::row_of(lane, r), row = query(p, place);
            rows[r] = {Config::paged ? row + visible.shift : row,
                       kPackHeads ? head + place - row * s32(p.gqa_ratio.value) : head};
        }
        dropout.template drop<Arch>(w, rows, sequence, key0, lane);
    }

    // The query at a row of the tile.
    XATTN_DEVICE static s32 query(const ForwardParams& p, s32 row) {
        return kPackHeads ? s32(quotient(u32(row), p.gqa_ratio)) : row;
    }

    // The keys of a block that rows see, as columns of the lane's elements count them: [first, last].
    struct Limits {
        s32 first[Arch::kRowsPerLane], last[Arch::kRowsPerLane];
    };
    XATTN_DEVICE static Limits limits(const ForwardParams& p, const Visible& visible, s32 row0, int lane, s32 key0) {
        Limits limits;
        const s32 at = key0 + Arch::col_of(lane, 0);
        XATTN_UNROLL
        for (int r = 0; r < Arch::kRowsPerLane; ++r) {
            const s32 row = query(p, row0 + Arch::row_of(lane, r));
            limits.first[r] = visible.first(row) - at, limits.last[r] = visible.last(row) - at;
        }
        return limits;
    }

    // Scores of keys that a row does not see become -infinity.
    XATTN_DEVICE static void mask(const ForwardParams& p, Accumulator (&s)[kKeyGroups], const Limits& limits) {
        if (p.window_left < 0)
            mask<false>(s, limits);
        else
            mask<true>(s, limits);
    }
    XATTN_DEVICE void mask(Accumulator (&s)[kKeyGroups], int group, s32 key0) const {
        mask(p, s, limits(p, visible, Arch::fresh(row0) + group * 16, lane, key0));
    }

    // The largest products of rows as scores. Here and below, `p` is what has the scale: ForwardParams or Factor.
    template <class Params>
    XATTN_DEVICE static void to_scores(const Params& p, float (&largest)[Arch::kRowsPerLane]) {
        if (!kPlain) return;
        XATTN_UNROLL
        for (int r = 0; r < Arch::kRowsPerLane; ++r) largest[r] *= p.scale;
    }

    // A key's weight relative to its row's base, which is in log2 units here.
    template <class Params>
    XATTN_DEVICE static float weight(const Params& p, float s, float base) {
        return Arch::exp2(kPlain ? Arch::fma(s, p.scale, -base) : kNatural ? Arch::fma(s, kLog2e, -base) : s - base);
    }
    XATTN_DEVICE static float exponential(float difference) { return Arch::exp2(difference * kToLog2); }

    // Of a row, from its reference and the sum of its weights.
    XATTN_DEVICE static float lse(float base, float sum) {
        if (sum == 0.0f) return -Arch::infinity();
        return kNatural ? Arch::fma(Arch::log2(sum), kLn2, base) : (base + Arch::log2(sum)) * kLn2;
    }

    // One more key with that logit and value 0: changes the base, the sum and the output's factor. One of infinity
    // takes all there is.
    XATTN_DEVICE static void add_sink(float logit, float& base, float& sum, float& inverse) {
        const float sink = logit * kUnit;
        const float top = sum == 0.0f ? sink : Arch::max(base, sink);
        const float scale = sum == 0.0f ? 0.0f : exponential(base - top);
        sum = sum * scale + (sink == top ? 1.0f : exponential(sink - top));
        inverse = Arch::divide(scale, sum);
        base = top;
    }

  private:
    // Of products, in these units. It stays finite with a factor that is, so that 0 times it is 0.
    XATTN_DEVICE float scale() const {
        const float unscaled = Config::softcap ? p.scale : p.scale * (kUnit * kLn2);
        if (!kScaled) return unscaled;
        const float most = 3.402823466e38f, scale = unscaled * factor;
        if (factor == 1.0f || !(factor >= -most && factor <= most)) return scale;
        return scale > most ? most : scale < -most ? -most : scale;
    }

    template <bool bounded_left>
    XATTN_DEVICE static void mask(Accumulator (&s)[kKeyGroups], const Limits& limits) {
        XATTN_UNROLL
        for (int n = 0; n < kKeyGroups; ++n) XATTN_UNROLL
        for (int e = 0; e < Arch::kElements; ++e) {
            const int r = Arch::row_slot(e), key = n * 16 + Arch::col_of(0, e);  // of lane 0
            if ((bounded_left && key < limits.first[r]) || key > limits.last[r]) s[n].x[e] = -Arch::infinity();
        }
    }

    static constexpr int kMaskBytes = Config::attn_mask == Mask::added16   ? 2
                                      : Config::attn_mask == Mask::added32 ? 4
                                                                           : 1;

    XATTN_DEVICE s32 row_end() const { return visible.seqlen_k - visible.shift; }  // seqlen_q

    // ---- the user's functions
    struct Element {
        s32 head, q_idx, kv_idx;
    };
    // Whether an element of a captured tensor can be missing for one score and not for all of a head.
    static constexpr bool kNotes = Functions::kReadsEach || (kPackHeads && Functions::kReads);
    XATTN_DEVICE u64 lacks_head() const {
        bool found = true;
        if constexpr (!kPackHeads && Functions::kReads && Functions::kScoreMod) found &= score_mod.found;
        if constexpr (!kPackHeads && Functions::kReads && Functions::kMaskMod) found &= mask_mod.found;
        return found ? 0 : ~u64(0) >> (64 - kKeyGroups * Arch::kElements);
    }
    // A function with what it has loaded of an element's head.
    template <class Mod>
    XATTN_DEVICE Mod loaded(Mod mod, const Element& at, bool& found) const {
        if (kPackHeads) {
            mod.load(captured(), sequence, at.head);
            found = mod.found;
        }
        return mod;
    }
    static_assert(!Functions::kReads || kKeyGroups * Arch::kElements <= 64, "a bit for each");
    // What is missing counts where its row sees its key.
    XATTN_DEVICE void report(u64 missing, int group, s32 key0) const {
        for (int i = 0; missing != 0; ++i, missing >>= 1) {
            const int n = i / Arch::kElements, e = i % Arch::kElements;
            const s32 row = query(p, row0 + group * 16 + Arch::row_of(lane, Arch::row_slot(e)));
            const s32 key = key0 + n * 16 + Arch::col_of(lane, e);
            const bool seen = row < row_end() && key >= visible.first(row) && key <= visible.last(row);
            if (missing & 1 && seen && p.status) p.status[int(Status::captured)] = 1;
        }
    }
    // What they are asked for; rows and keys of a tile that do not exist are taken for the last that do, so that none
    // but those asks for an element.
    XATTN_DEVICE Element element(s32 place, s32 row, s32 key) const {
        const s32 query = kNotes ? min_of(row, row_end() - 1) : row;
        return {kPackHeads ? head + place - row * s32(p.gqa_ratio.value) : head,
                Config::paged ? query + visible.shift : query, kNotes ? min_of(key, visible.seqlen_k - 1) : key};
    }
    XATTN_DEVICE const typename Functions::Params& captured() const {
        return static_cast<const typename Functions::Params&>(p);
    }

    XATTN_DEVICE float attn_mask(float x, s32 row, s32 key) const {
        if (Config::attn_mask == Mask::tree) {
            const s32 token = key - visible.shift;
            return token < 0 || mask_row[row * p.mask_row_stride + token * p.mask_col_stride] ? x : -Arch::infinity();
        }
        const u8* at = mask_row + (row * p.mask_row_stride + key * p.mask_col_stride) * kMaskBytes;
        if (Config::attn_mask == Mask::boolean) return *at ? x : -Arch::infinity();
        const float added = Config::attn_mask == Mask::added16
                                ? Arch::template to_float<typename WideOf<typename Config::Element>::Type>(
                                      *reinterpret_cast<const u16*>(at))
                                : *reinterpret_cast<const float*>(at);
        return added == -Arch::infinity() ? added : x + added;  // it hides NaN, too
    }
};

}  // namespace xattn
