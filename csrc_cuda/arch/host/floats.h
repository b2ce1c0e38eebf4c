// 16-bit floats on the CPU: widening, and rounding to nearest even.
#pragma once

#include <string.h>

#include "kernels/platform.h"

namespace xattn::host {

inline u32 bits_of(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}
inline float float_of(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}

inline float to_float(bf16 x) { return float_of(u32(x.bits) << 16); }
inline float to_float(fp16 x) {
    const u32 sign = u32(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, fraction = x.bits & 1023;
    if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    const float magnitude = float(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

template <class Element>
u16 round_to(float x);

template <>
inline u16 round_to<bf16>(float x) {
    const u32 b = bits_of(x);
    if (x != x) return u16(b >> 16 | 0x40);
    return u16((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
template <>
inline u16 round_to<fp16>(float x) {
    const u32 b = bits_of(x), sign = (b >> 16) & 0x8000, magnitude = b & 0x7fffffff;
    if (magnitude > 0x7f800000) return u16(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return u16(sign | 0x7c00);  // 65520 and more
    if (magnitude < 0x38800000) {                            // below the smallest normal: multiples of 2^-24
        const float scaled = float_of(magnitude) * 0x1p24f;
        u32 n = u32(scaled);
        const float rest = scaled - float(n);
        n += rest > 0.5f || (rest == 0.5f && (n & 1));
        return u16(sign | n);
    }
    return u16(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

}  // namespace xattn::host
