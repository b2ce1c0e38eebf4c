// A user's functions on the CPU, element by element.
#include "arch/sm80/arch.h"
#include "arch/host/isa_nvidia.h"
#include "kernels/user_functions.h"
#include "config.h"

using Functions = xattn::Config::Functions;
using Arch = xattn::Sm80<xattn::IsaHostNvidia>;

// `at`: (count, 4) of b, h, q_idx, kv_idx. Where there is no score_mod, `result` is 1 where the mask_mod keeps a key.
extern "C" void xattn_functions(const Functions::Params* params, const float* score, const xattn::s32* at,
                                xattn::s64 count, float* result, bool* found) {
    for (xattn::s64 n = 0; n < count; ++n, at += 4) {
        found[n] = true;
        if constexpr (Functions::kScoreMod)
            result[n] = Functions::score_mod<Arch>(*params, score[n], at[0], at[1], at[2], at[3], found[n]);
        else
            result[n] = Functions::mask_mod<Arch>(*params, at[0], at[1], at[2], at[3], found[n]);
    }
}
