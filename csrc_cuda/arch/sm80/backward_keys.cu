// Entry of the sm80 backward kernel over keys. The image's configuration is a header, config.h, that the compiler is
// given.
#include "arch/sm80/arch.h"
#include "arch/sm80/isa.h"
#include "kernels/backward_keys.h"
#include "config.h"

extern "C" __global__ void __launch_bounds__(xattn::Config::num_warps * 32, xattn::Config::min_blocks)
    xattn_backward(const __grid_constant__ xattn::BackwardParams params) {
    extern __shared__ __align__(128) unsigned char shared[];
    using Kernel = xattn::BackwardKeys<xattn::Sm80<xattn::IsaSm80>, xattn::Config>;
    Kernel::run(params, static_cast<xattn::u32>(__cvta_generic_to_shared(shared)));
}
