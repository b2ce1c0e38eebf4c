// Entry of the plain CDNA backward kernel over keys. The image's configuration is a header, config.h, that the compiler is
// given.
#include "arch/cdna/language.h"

#include "arch/cdna/arch.h"
#include "arch/cdna/isa.h"
#include "kernels/backward_keys.h"
#include "config.h"

extern "C" __global__ void __launch_bounds__(xattn::Config::num_warps * 64)
    xattn_backward(const xattn::BackwardParams params) {
    extern __shared__ unsigned char shared[];
    using Kernel = xattn::BackwardKeys<xattn::Cdna<xattn::IsaCdna>, xattn::Config>;
    Kernel::run(params, (xattn::u32)(__attribute__((address_space(3))) unsigned char*)shared);
}
