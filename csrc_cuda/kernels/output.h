// What happens to the output between its division by the sums of rows and memory: the user's epilogue, on runs of
// channels of a row as float32, and the element that is stored.
#pragma once

#include "kernels/fp8.h"
#include "kernels/scores.h"
#include "kernels/user_functions.h"

namespace xattn {

template <class Arch, class Config>
struct Output {
    using Functions = typename Config::Functions;
    using Usual = typename WideOf<typename Config::Element>::Type;
    using Element = typename Choose<Same<typename Functions::Out, void>::value, Usual, typename Functions::Out>::Type;
    static constexpr int kBytes = sizeof(Element);
    // Whether it is more than rounded to the usual element.
    static constexpr bool kChanged = Functions::kEpilogue || !Same<Element, Usual>::value;

    // A row's first channel.
    XATTN_DEVICE static Element* at(const Operand& out, s64 offset) { return static_cast<Element*>(out.data) + offset; }

    // The epilogue of N channels from `col` on: what it reads beside them, which may be asked for long before they are
    // there, and itself. `found` becomes false where it asks for what a captured tensor has not got, which is to be
    // reported.
    template <int N, class F = Functions, bool there = F::kEpilogue>
    struct Epilogue {
        XATTN_DEVICE void load(const ForwardParams&, s32, s32, s32, s32, bool&) {}
        XATTN_DEVICE void apply(const ForwardParams&, float (&)[N], s32, s32, s32, s32, bool&) const {}
    };
    template <int N, class F>
    struct Epilogue<N, F, true> {
        typename F::template Epilogue<Arch, N> of;
        XATTN_DEVICE void load(const ForwardParams& p, s32 sequence, s32 head, s32 q_idx, s32 col, bool& found) {
            of.load(static_cast<const typename F::Params&>(p), sequence, head, q_idx, col, found);
        }
        XATTN_DEVICE void apply(const ForwardParams& p, float (&x)[N], s32 sequence, s32 head, s32 q_idx, s32 col,
                                bool& found) const {
            of.apply(static_cast<const typename F::Params&>(p), x, sequence, head, q_idx, col, found);
        }
    };
    template <int N>
    XATTN_DEVICE static void apply(const ForwardParams& p, float (&x)[N], s32 sequence, s32 head, s32 q_idx, s32 col,
                                   bool& found) {
        Epilogue<N> epilogue;
        epilogue.load(p, sequence, head, q_idx, col, found);
        epilogue.apply(p, x, sequence, head, q_idx, col, found);
    }
    XATTN_DEVICE static void report(const ForwardParams& p, bool found) {
        if (Functions::kEpilogue && XATTN_RARELY(!found) && p.status) p.status[int(Status::captured)] = 1;
    }

    // N elements, to a multiple of their bytes or of 16.
    template <int N>
    XATTN_DEVICE static void store(Element* to, const float (&x)[N]) {
        constexpr int bytes = N * kBytes, each = bytes < 16 ? bytes : 16, count = each / kBytes;
        XATTN_UNROLL
        for (int piece = 0; piece < bytes / each; ++piece) {
            if constexpr (each < 4) {
                static_assert(each == 2, "pairs at least");
                *reinterpret_cast<u16*>(to) = u16(word(x, 0, count));
            } else {
                user::Words<each / 4> w;
                XATTN_UNROLL
                for (int i = 0; i < each / 4; ++i) w.x[i] = word(x, piece * count + i * (4 / kBytes), 4 / kBytes);
                *reinterpret_cast<user::Words<each / 4>*>(to + piece * count) = w;
            }
        }
    }
    template <int N>
    XATTN_DEVICE static void clear(Element* to) {
        constexpr int bytes = N * kBytes, each = bytes < 16 ? bytes : 16;
        XATTN_UNROLL
        for (int piece = 0; piece < bytes / each; ++piece)
            *reinterpret_cast<user::Words<each / 4>*>(to + piece * each / kBytes) = {};
    }

  private:
    // `count` elements from number `first` on, the first in the lowest bits.
    template <int N>
    XATTN_DEVICE static u32 word(const float (&x)[N], int first, int count) {
        if constexpr (kBytes == 4) {
            return Arch::bits(x[first]);
        } else if constexpr (kBytes == 2) {
            return Arch::template pack<Element>(x[first], x[first + 1]);
        } else {
            u32 y = 0;
            XATTN_UNROLL
            for (int i = 0; i < count; i += 2) y |= pair(Element{}, x[first + i], x[first + i + 1]) << (8 * i);
            return y;
        }
    }
    // As torch converts: what an 8-bit float does not hold becomes its largest number, NaN in e4m3fnuz; whole numbers
    // are cut off towards 0, and to 8 bits.
    XATTN_DEVICE static u32 pair(e4m3, float low, float high) { return Arch::rounded_pair(low, high); }
    template <class Other>
    XATTN_DEVICE static u32 pair(Other e, float low, float high) {
        return code(e, low) | code(e, high) << 8;
    }
    XATTN_DEVICE static u32 code(e4m3fnuz, float x) {
        return x >= 248.0f || x <= -248.0f ? Fp8<e4m3fnuz>::nan(0) : Arch::template rounded<e4m3fnuz>(x);
    }
    template <class Whole>
    XATTN_DEVICE static u32 code(Whole, float x) {
        return x > -2147483648.0f && x < 2147483648.0f ? u32(s32(x)) & 255 : 0;
    }
};

}  // namespace xattn
