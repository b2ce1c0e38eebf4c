// What the source of a user's functions is written with (xattn/fusion/lower.py): captured tensors, and the operations
// whose meaning is not C++'s. Names of floats' functions (logf, sinf, ...) are those of every compiler here.
//
// Nothing is read beside a captured tensor: an index out of range gives 0, and `found` becomes false.
#pragma once

#include "kernels/params.h"

namespace xattn {

// A captured tensor; sizes and strides in elements, below 2^31. There is an element at 0, be the tensor empty: it is
// read where an index is out of range, so that nothing jumps.
template <class T, int dims>
struct Table {
    const T* data;
    s32 size[dims];
    s32 stride[dims];
};
template <class T>
struct Table<T, 0> {
    const T* data;
};

namespace user {

template <class A>
XATTN_DEVICE float value(float x) {
    return x;
}
template <class A>
XATTN_DEVICE double value(double x) {
    return x;
}
template <class A>
XATTN_DEVICE float value(bf16 x) {
    return A::template to_float<bf16>(x.bits);
}
template <class A>
XATTN_DEVICE float value(fp16 x) {
    return A::template to_float<fp16>(x.bits);
}
template <class A>
XATTN_DEVICE s64 value(s64 x) {
    return x;
}
template <class A>
XATTN_DEVICE s32 value(s32 x) {
    return x;
}
template <class A>
XATTN_DEVICE s32 value(s16 x) {
    return x;
}
template <class A>
XATTN_DEVICE s32 value(s8 x) {
    return x;
}
template <class A>
XATTN_DEVICE s32 value(u8 x) {
    return x;
}
template <class A>
XATTN_DEVICE bool value(bool x) {
    return x;
}

// The offset of an index along a dimension. Those below 0 count from the end.
XATTN_DEVICE s64 along(s32 size, s32 stride, s32 i, bool& in) {
    i += i < 0 ? size : 0;
    in &= u32(i) < u32(size);
    return s64(i) * stride;
}
XATTN_DEVICE s64 along(s32 size, s32 stride, s64 i, bool& in) {
    const bool fits = i >= -s64(size) && i < size;
    in &= fits;
    return along(size, stride, fits ? s32(i) : 0, in);
}

// The element of a captured tensor at indices of all its dimensions.
template <class A, class T, int dims, class... Index>
XATTN_DEVICE auto at(const Table<T, dims>& t, bool& found, Index... index) {
    static_assert(sizeof...(Index) == dims, "an index for each dimension");
    bool in = true;
    s64 offset = 0;
    int d = 0;
    ((offset += along(t.size[d], t.stride[d], index, in), ++d), ...);
    found &= in;
    const auto x = value<A>(t.data[in ? offset : 0]);
    return in ? x : decltype(x)(0);
}
template <class A, class T>
XATTN_DEVICE auto at(const Table<T, 0>& t, bool&) {
    return value<A>(*t.data);
}

// ---- a run of channels of a row of the output
struct Channel {
    s32 first;
};
XATTN_DEVICE s64 along(s32, s32 stride, Channel d, bool&) { return s64(d.first) * stride; }
template <class Index>
XATTN_DEVICE void note_channel(s32, s32, Index, s32&, s32&) {}
XATTN_DEVICE void note_channel(s32 size, s32 stride, Channel d, s32& left, s32& step) {
    left = size - d.first, step = stride;
}

template <int n>
struct alignas(4 * n) Words {
    u32 x[n];
};
template <class A>
XATTN_DEVICE float element(float, u32 bits) {
    return A::number(bits);
}
template <class A>
XATTN_DEVICE bool element(bool, u32 bits) {
    return (bits & 255) != 0;
}
template <class A>
XATTN_DEVICE bf16 element(bf16, u32 bits) {
    return {u16(bits)};
}
template <class A>
XATTN_DEVICE fp16 element(fp16, u32 bits) {
    return {u16(bits)};
}
template <class A, class Whole>
XATTN_DEVICE Whole element(Whole, u32 bits) {
    return Whole(bits);
}

// The elements of a captured tensor at N channels, at indices of its other dimensions. `wide`: the channels lie side by
// side, all that the output has, and each run starts at a multiple of its bytes, or of 16: then they are held as they
// lie, and nothing jumps.
template <class A, class T, int N, bool wide>
struct Run {
    using Value = decltype(value<A>(T{}));
    static constexpr int kBytes = N * int(sizeof(T)), kWords = kBytes / 4, kAtOnce = kWords < 4 ? kWords : 4;
    static constexpr bool kHeld = wide && kWords > 0 && sizeof(T) <= 4;
    bool there;
    u32 held[kHeld ? kWords : 1];
    Value x[kHeld ? 1 : N];

    template <int dims, class... Index>
    XATTN_DEVICE void load(const Table<T, dims>& t, bool& found, Index... index) {
        static_assert(sizeof...(Index) == dims, "an index for each dimension");
        bool in = true;
        s64 offset = 0;
        s32 left = 0, step = 0;
        int d = 0;
        ((offset += along(t.size[d], t.stride[d], index, in), note_channel(t.size[d], t.stride[d], index, left, step),
          ++d),
         ...);
        found &= in;
        there = in;
        if constexpr (kHeld) {
            const auto* at = reinterpret_cast<const Words<kAtOnce>*>(t.data + (in ? offset : 0));
            XATTN_UNROLL
            for (int n = 0; n < kWords / kAtOnce; ++n) {
                const Words<kAtOnce> w = at[n];
                XATTN_UNROLL
                for (int i = 0; i < kAtOnce; ++i) held[n * kAtOnce + i] = w.x[i];
            }
        } else {
            XATTN_UNROLL
            for (int i = 0; i < N; ++i) {
                const bool here = in && i < left;
                found &= i < left;
                const auto y = value<A>(t.data[here ? offset + s64(i) * step : 0]);
                x[i] = here ? y : Value(0);
            }
        }
    }
    XATTN_DEVICE Value at(int i) const {
        if constexpr (kHeld) {
            const int byte = i * int(sizeof(T));
            const Value y = value<A>(element<A>(T{}, held[byte / 4] >> (8 * (byte % 4))));
            return there ? y : Value(0);
        } else {
            return x[i];
        }
    }
};

// ---- whole numbers: quotients towards minus infinity, remainders of the divisor's sign, both 0 for a divisor of 0;
// what overflows wraps
template <class T>
XATTN_DEVICE T quotient(T a, T b) {
    return b == 0 ? 0 : b == -1 ? T(0 - u64(a)) : a / b;
}
template <class T>
XATTN_DEVICE T rest(T a, T b) {
    return b == 0 || b == -1 ? 0 : a % b;
}
template <class T>
XATTN_DEVICE T floor_quotient(T a, T b) {
    const T r = rest(a, b);
    return quotient(a, b) - (r != 0 && (r < 0) != (b < 0) ? 1 : 0);
}
template <class T>
XATTN_DEVICE T remainder(T a, T b) {
    const T r = rest(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
// Bits that are shifted out are lost, be it all of them.
XATTN_DEVICE s64 shift_left(s64 a, s64 n) { return n < 0 || n > 63 ? 0 : s64(u64(a) << n); }
XATTN_DEVICE s64 shift_right(s64 a, s64 n) { return a >> (n < 0 || n > 63 ? 63 : n); }
// Towards 0; what s64 does not hold gives its lowest.
template <class T>
XATTN_DEVICE s64 whole(T x) {
    return x >= T(-9223372036854775808.0) && x < T(9223372036854775808.0) ? s64(x) : s64(1ull << 63);
}
template <class T>
XATTN_DEVICE T sign(T x) {
    return T(x > 0) - T(x < 0);
}

// ---- floats. Of two numbers, one of them NaN, minimum and maximum are NaN.
template <class T>
XATTN_DEVICE T minimum(T a, T b) {
    return a < b || a != a ? a : b;
}
template <class T>
XATTN_DEVICE T maximum(T a, T b) {
    return a > b || a != a ? a : b;
}
template <class A, class Element>
XATTN_DEVICE float rounded(float x) {
    return A::template to_float<Element>(u16(A::template pack<Element>(x, 0.0f)));
}
XATTN_DEVICE float remainder(float a, float b) {
    const float r = fmodf(a, b);
    return r != 0.0f && (r < 0.0f) != (b < 0.0f) ? r + b : r;
}
template <class A>
XATTN_DEVICE float floor_quotient(float a, float b) {
    if (b == 0.0f) return A::exact_quotient(a, b);
    const float r = fmodf(a, b);
    float q = A::exact_quotient(a - r, b);
    if (r != 0.0f && (r < 0.0f) != (b < 0.0f)) q -= 1.0f;
    const float f = floorf(q);
    return q - f > 0.5f ? f + 1.0f : f;
}
// Kahan's: the rounding of 1 + x, and of exp(x), cancels.
template <class A>
XATTN_DEVICE float log1p(float x) {
    const float u = 1.0f + x;
    return u == 1.0f || u == A::infinity() ? x : logf(u) * A::exact_quotient(x, u - 1.0f);
}
template <class A>
XATTN_DEVICE float expm1(float x) {
    const float u = expf(x), v = u - 1.0f;
    return u == 1.0f ? x : v == -1.0f || u == A::infinity() ? v : v * A::exact_quotient(x, logf(u));
}
template <class A>
XATTN_DEVICE float sigmoid(float x) {
    return A::exact_quotient(1.0f, 1.0f + expf(-x));
}
template <class A>
XATTN_DEVICE float tanh(float x) {
    return A::tanh(x);
}
XATTN_DEVICE float rsqrt(float x) { return 1.0f / sqrtf(x); }

// ---- the same of numbers that come of a score: fast, within some units in the last place
template <class A>
XATTN_DEVICE float fast_exp(float x) {
    return A::exp2(x * kLog2e);
}
template <class A>
XATTN_DEVICE float fast_log(float x) {
    return A::log2(x) * kLn2;
}
template <class A>
XATTN_DEVICE float fast_sigmoid(float x) {
    const float e = fast_exp<A>(x < 0.0f ? x : -x);
    const float y = A::divide(1.0f, 1.0f + e);
    return x < 0.0f ? e * y : y;
}

}  // namespace user
}  // namespace xattn
