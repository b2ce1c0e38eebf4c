// The cdna layer of the decode body on the CPU.
#include "arch/host/run.h"
#include "arch/cdna/arch.h"
#include "arch/host/isa_amd.h"
#include "kernels/attention_decode.h"
#include "config.h"

extern "C" int xattn_decode(const xattn::Config::Functions::Params* params, xattn::u32 blocks, xattn::u64 seed,
                            char* message, int message_size) {
    using Arch = xattn::Cdna<xattn::IsaHostAmd>;
    using Kernel = xattn::AttentionDecode<Arch, xattn::Config>;
    return xattn::host::run<Arch, Kernel>(*params, blocks, seed, message, message_size);
}
