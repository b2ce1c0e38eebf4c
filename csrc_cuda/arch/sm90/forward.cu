// Entry of the sm90 forward kernel. The image's configuration is a header, config.h, that the compiler is given.
#include "arch/sm90/forward.h"
#include "config.h"

using Kernel = xattn::Sm90Forward<xattn::Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1)
    xattn_forward(const __grid_constant__ Kernel::Params params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    Kernel::run(params, static_cast<xattn::u32>(__cvta_generic_to_shared(shared)));
}
