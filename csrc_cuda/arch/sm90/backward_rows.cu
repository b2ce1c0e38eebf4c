// Entry of the sm90 backward kernel over rows. The image's configuration is a header, config.h, that the compiler is
// given.
#include "arch/sm90/backward_rows.h"
#include "config.h"

using Kernel = xattn::Sm90BackwardRows<xattn::Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads)
    xattn_backward(const __grid_constant__ xattn::Sm90BackwardParams params) {
    Kernel::run(params);
}
