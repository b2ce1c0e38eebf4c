// Entry of the CDNA append kernel. The image's configuration is a header, config.h, that the compiler is given.
#include "arch/cdna/language.h"

#include "arch/cdna/arch.h"
#include "arch/cdna/isa.h"
#include "kernels/append.h"
#include "config.h"

extern "C" __global__ void __launch_bounds__(256) xattn_append(const xattn::AppendParams params) {
    using Kernel = xattn::Append<xattn::Cdna<xattn::IsaCdna>, xattn::Config>;
    Kernel::run(params, 0);
}
