// The cdna layer of the forward body on the CPU.
#include "arch/host/forward.h"
#include "arch/cdna/arch.h"
#include "arch/host/isa_amd.h"
#include "config.h"

extern "C" int xattn_forward(const xattn::ForwardParams* params, xattn::u32 blocks, xattn::u64 seed, char* message,
                             int message_size) {
    using Arch = xattn::Cdna<xattn::IsaHostAmd>;
    return xattn::host::run_forward<Arch, xattn::Config>(*params, blocks, seed, message, message_size);
}
