// The forward body on the CPU, as an architecture under test runs it: what forward_sm80.cpp and forward_cdna.cpp share.
#pragma once

#include <cstdio>

#include "arch/host/fibres.h"
#include "kernels/attention_forward.h"

namespace xattn::host {

// Runs `blocks` thread blocks, lanes in an order drawn from `seed`. Returns 0, or 1 with a message.
template <class Arch, class Config>
int run_forward(const ForwardParams& params, u32 blocks, u64 seed, char* message, int message_size) {
    using Kernel = AttentionForward<Arch, Config>;
    try {
        for (u32 b = 0; b < blocks; ++b) {
            Block block(Kernel::kThreads, Arch::kWarpSize, Kernel::kSharedBytes, seed + b);
            block.run(b, [&] { Kernel::run(params, 0); });
        }
        return 0;
    } catch (const std::exception& error) {
        std::snprintf(message, size_t(message_size), "%s", error.what());
        return 1;
    }
}

}  // namespace xattn::host
