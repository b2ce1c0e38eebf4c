// The 8-bit floats of caches (e4m3 and e4m3fnuz) in software: widening, which an Isa takes where its architecture has
// no instruction for it, and rounding, which appends take everywhere.
//
// Formats: "FP8 Formats for Deep Learning" (Micikevicius et al., 2022) and "8-bit Numerical Formats for Deep Neural
// Networks" (Noune et al., 2022): one sign, four bits of exponent, three of fraction, no infinity.
#pragma once

#include "kernels/platform.h"

namespace xattn {

template <class Cache>
struct Fp8;
template <>
struct Fp8<e4m3> {  // NaN is all ones but the sign
    static constexpr int bias = 7;
    static constexpr float largest = 448.0f;
    static constexpr u32 largest_code = 0x7e;
    XATTN_DEVICE static u32 nan(u32 sign) { return sign | 0x7f; }
    XATTN_DEVICE static u32 with_sign(u32 code, u32 sign) { return code | sign; }
    // The highest bit of each byte that is NaN.
    XATTN_DEVICE static u32 nans(u32 word) { return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }
};
template <>
struct Fp8<e4m3fnuz> {  // NaN is what would be -0
    static constexpr int bias = 8;
    static constexpr float largest = 240.0f;
    static constexpr u32 largest_code = 0x7f;
    XATTN_DEVICE static u32 nan(u32) { return 0x80; }
    XATTN_DEVICE static u32 with_sign(u32 code, u32 sign) { return code ? code | sign : 0; }
    XATTN_DEVICE static u32 nans(u32 word) { return word & ~((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) & 0x80808080u; }
};

template <class Element>
struct Widened;  // where its exponent begins, and 2^n as its bits
template <>
struct Widened<fp16> {
    static constexpr int shift = 1, bias = 15, fraction = 10;
};
template <>
struct Widened<bf16> {
    static constexpr int shift = 4, bias = 127, fraction = 7;
};

// Four bytes as four 16-bit floats, in their order. The bits are moved to where the wider format has them, and a
// product makes up for the other bias, which is exact, of subnormal numbers too.
template <class Isa, class Element, class Cache>
XATTN_DEVICE void widen_in_software(u32 word, u32 (&x)[2]) {
    using To = Widened<Element>;
    constexpr u32 power = u32(2 * To::bias - Fp8<Cache>::bias) << To::fraction;  // 2^(difference of the biases)
    const u32 nans = Fp8<Cache>::nans(word);
    XATTN_UNROLL
    for (int i = 0; i < 2; ++i) {
        const u32 high = Isa::bytes(word, 0, i ? 0x3424 : 0x1404);  // each byte above one of 0
        x[i] = Isa::multiply_pair(Element{}, (high & 0x7f007f00u) >> To::shift | (high & 0x80008000u),
                                  power | power << 16);
    }
    if (!XATTN_RARELY(nans != 0)) return;
    XATTN_UNROLL
    for (int i = 0; i < 2; ++i) {
        const u32 of = Isa::bytes(nans, 0, i ? 0x3424 : 0x1404);
        x[i] |= of - (of >> 15);  // 0x7fff where it is NaN
    }
}

// The code of a float to nearest even; what is larger than the largest number becomes it, NaN stays NaN.
template <class Isa, class Cache>
XATTN_DEVICE u32 rounded_fp8(float x) {
    using Format = Fp8<Cache>;
    constexpr u32 least = u32(127 + 1 - Format::bias) << 23;  // of the normal numbers
    const u32 bits = Isa::bits(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return Format::nan(sign);
    if (magnitude >= Isa::bits(Format::largest)) return sign | Format::largest_code;
    if (magnitude < least) {
        // A sum whose last place is that of the subnormal numbers.
        constexpr float unit = float(1 << (23 - 2 - Format::bias));
        return Format::with_sign(Isa::bits((x < 0.0f ? -x : x) + unit) - Isa::bits(unit), sign);
    }
    const u32 m = magnitude - (u32(127 - Format::bias) << 23);
    return sign | (m + 0x7ffff + (m >> 20 & 1)) >> 20;
}
template <class Isa>
XATTN_DEVICE u32 rounded_pair_in_software(float low, float high) {
    return rounded_fp8<Isa, e4m3>(low) | rounded_fp8<Isa, e4m3>(high) << 8;
}

}  // namespace xattn
