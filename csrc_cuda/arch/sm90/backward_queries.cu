// Entry of the sm90 backward kernel over queries. The image's configuration is a header, config.h, that the compiler is
// given.
#include "arch/sm90/backward_queries.h"
#include "config.h"

using Kernel = xattn::Sm90BackwardQueries<xattn::Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads)
    xattn_backward(const __grid_constant__ xattn::Sm90BackwardParams params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    Kernel::run(params, static_cast<xattn::u32>(__cvta_generic_to_shared(shared)));
}
