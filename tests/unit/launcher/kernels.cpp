// Kernels for the stand-in drivers: the forward body of an architecture (LAYER), one that fails, one that shows words
// of its parameter block.
#include LAYER

extern "C" int xattn_fail(const void*, unsigned, unsigned long long, char*, int) { return 1; }

extern "C" int xattn_copy_map(const void* params, unsigned, unsigned long long, char*, int) {
    const auto* words = static_cast<const xattn::u64*>(params);
    auto* seen = reinterpret_cast<xattn::u64*>(words[0]);
    for (int n = 0; n < 16; ++n) seen[n] = words[8 + n];
    return 0;
}
