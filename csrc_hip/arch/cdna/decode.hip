// Entry of the plain CDNA decode kernel. The image's configuration is a header, config.h, that the compiler is given.
#include "arch/cdna/language.h"

#include "arch/cdna/arch.h"
#include "arch/cdna/isa.h"
#include "kernels/attention_decode.h"
#include "config.h"

extern "C" __global__ void __launch_bounds__(xattn::Config::num_warps * 64)
    xattn_decode(const xattn::Config::Functions::Params params) {
    extern __shared__ unsigned char shared[];
    using Kernel = xattn::AttentionDecode<xattn::Cdna<xattn::IsaCdna>, xattn::Config>;
    Kernel::run(params, (xattn::u32)(__attribute__((address_space(3))) unsigned char*)shared);
}
