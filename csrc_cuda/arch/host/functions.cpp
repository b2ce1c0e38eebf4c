// A user's functions on the CPU, element by element.
#include "arch/sm80/arch.h"
#include "arch/host/isa_nvidia.h"
#include "kernels/user_functions.h"
#include "config.h"

// `at`: b, h, q_idx, kv_idx.
template <class Arch, class Functions>
float call(const typename Functions::Params& params, float score, const xattn::s32* at, bool& found) {
    if constexpr (Functions::kScoreMod) {
        typename Functions::template ScoreMod<Arch> mod;
        mod.load(params, at[0], at[1]);
        found = mod.found;
        return mod.at(params, score, at[0], at[1], at[2], at[3], found);
    } else {
        typename Functions::template MaskMod<Arch> mod;
        mod.load(params, at[0], at[1]);
        found = mod.found;
        return mod.at(params, at[0], at[1], at[2], at[3], found) ? 1.0f : 0.0f;
    }
}

// `at`: (count, 4). Where there is no score_mod, `result` is 1 where the mask_mod keeps a key.
extern "C" void xattn_functions(const xattn::Config::Functions::Params* params, const float* score,
                                const xattn::s32* at, xattn::s64 count, float* result, bool* found) {
    using Arch = xattn::Sm80<xattn::IsaHostNvidia>;
    for (xattn::s64 n = 0; n < count; ++n) {
        found[n] = true;
        result[n] = call<Arch, xattn::Config::Functions>(*params, score[n], at + 4 * n, found[n]);
    }
}
