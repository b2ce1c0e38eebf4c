// The base of all device code: names for types and function qualifiers. Vendor macros appear here and in arch/, nowhere
// else. No standard library, no vendor header: NVRTC, HIPRTC, clang and the host compiler all take it.
#pragma once

#if defined(XATTN_HOST)
#define XATTN_DEVICE inline
#define XATTN_GLOBAL inline
#define XATTN_UNROLL
// Of <math.h>, which in C++ is long to parse, what kernels and users' functions call.
extern "C" {
float fabsf(float), floorf(float), ceilf(float), truncf(float), rintf(float), sqrtf(float);
float expf(float), logf(float), log2f(float), log10f(float), sinf(float), cosf(float);
float fmodf(float, float), powf(float, float), copysignf(float, float);
}
#else
#define XATTN_DEVICE __device__ __forceinline__
#define XATTN_GLOBAL __device__
#define XATTN_UNROLL _Pragma("unroll")
#endif
// A condition that hardly ever holds: what it guards is laid out of the way, so that the common path runs straight on.
#define XATTN_RARELY(condition) __builtin_expect(!!(condition), 0)

namespace xattn {

using s8 = signed char;
using u8 = unsigned char;
using s16 = short;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using s32 = int;
using s64 = long long;

// 16-bit floats are moved as bits; an Arch converts them.
struct fp16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};
// 8-bit floats of caches likewise (fp8.h).
struct e4m3 {
    u8 bits;
};
struct e4m3fnuz {
    u8 bits;
};

// 16 bytes, the unit of copies.
struct alignas(16) Chunk {
    u32 word[4];
};

template <class T>
XATTN_DEVICE constexpr T min_of(T a, T b) {
    return a < b ? a : b;
}
template <class T>
XATTN_DEVICE constexpr T max_of(T a, T b) {
    return a > b ? a : b;
}

template <bool first, class A, class B>
struct Choose {
    using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
    using Type = B;
};
template <class A, class B>
struct Same {
    static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
    static constexpr bool value = true;
};

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

}  // namespace xattn
