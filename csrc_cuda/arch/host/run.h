// A kernel body on the CPU, as an architecture under test runs it.
#pragma once

#include "arch/host/fibres.h"
#include "kernels/params.h"

namespace xattn::host {

// Runs `blocks` thread blocks, lanes in an order drawn from `seed`. Returns 0, or 1 with a message.
template <class Arch, class Kernel, class Params>
int run(const Params& params, u32 blocks, u64 seed, char* message, int message_size) {
    for (u32 b = 0; b < blocks; ++b) {
        Block block(Kernel::kThreads, Arch::kWarpSize, Kernel::kSharedBytes, seed + b);
        const char* error = block.run(b, [&] { Kernel::run(params, 0); });
        if (error[0]) {
            snprintf(message, size_t(message_size), "%s", error);
            return 1;
        }
    }
    return 0;
}

}  // namespace xattn::host
