// The forward body on the CPU, as an architecture under test runs it. XATTN_ARCH_HEADER, XATTN_ISA_HEADER and config.h
// choose which.
#include <algorithm>
#include <cstdio>

#include "kernels/attention_forward.h"
#include XATTN_ARCH_HEADER
#include XATTN_ISA_HEADER
#include "config.h"

// Runs `blocks` thread blocks, lanes in an order drawn from `seed`. Returns 0, or 1 with a message.
extern "C" int xattn_forward(const xattn::ForwardParams* params, xattn::u32 blocks, xattn::u64 seed, char* message,
                             int message_size) {
    using Kernel = xattn::AttentionForward<xattn::XATTN_ARCH<xattn::XATTN_ISA>, xattn::Config>;
    try {
        for (xattn::u32 b = 0; b < blocks; ++b) {
            xattn::host::Block block(Kernel::kThreads, Kernel::kThreads / xattn::Config::num_warps,
                                     Kernel::kSharedBytes, seed + b);
            block.run(b, [&] { Kernel::run(*params, 0); });
        }
        return 0;
    } catch (const std::exception& error) {
        std::snprintf(message, size_t(message_size), "%s", error.what());
        return 1;
    }
}
