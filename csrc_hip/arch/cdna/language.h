// The few names of the HIP language that kernels use, for compilers without the HIP headers (plain clang). HIPRTC and
// hipcc bring their own.
#pragma once

#if !defined(__HIPCC_RTC__) && !defined(HIP_INCLUDE_HIP_HIP_RUNTIME_H)
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))

__device__ __forceinline__ float fabsf(float x) { return __builtin_fabsf(x); }
__device__ __forceinline__ float copysignf(float x, float y) { return __builtin_copysignf(x, y); }
__device__ __forceinline__ float floorf(float x) { return __builtin_floorf(x); }
__device__ __forceinline__ float ceilf(float x) { return __builtin_ceilf(x); }
__device__ __forceinline__ float truncf(float x) { return __builtin_truncf(x); }
__device__ __forceinline__ float rintf(float x) { return __builtin_rintf(x); }
__device__ __forceinline__ float sqrtf(float x) { return __builtin_sqrtf(x); }
__device__ __forceinline__ float expf(float x) { return __builtin_expf(x); }
__device__ __forceinline__ float logf(float x) { return __builtin_logf(x); }
__device__ __forceinline__ float log2f(float x) { return __builtin_log2f(x); }
__device__ __forceinline__ float log10f(float x) { return __builtin_log10f(x); }
__device__ __forceinline__ float sinf(float x) { return __builtin_sinf(x); }
__device__ __forceinline__ float cosf(float x) { return __builtin_cosf(x); }
__device__ __forceinline__ float fmodf(float x, float y) { return __builtin_fmodf(x, y); }
__device__ __forceinline__ float powf(float x, float y) { return __builtin_powf(x, y); }
#endif
