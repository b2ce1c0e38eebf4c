// Entry of the sm80 append kernel. The image's configuration is a header, config.h, that the compiler is given.
#include "arch/sm80/arch.h"
#include "arch/sm80/isa.h"
#include "kernels/append.h"
#include "config.h"

extern "C" __global__ void __launch_bounds__(128) xattn_append(const __grid_constant__ xattn::AppendParams params) {
    using Kernel = xattn::Append<xattn::Sm80<xattn::IsaSm80>, xattn::Config>;
    Kernel::run(params, 0);
}
