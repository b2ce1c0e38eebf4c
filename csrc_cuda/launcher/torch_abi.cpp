#include "torch_abi.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace xattn::launcher {

namespace {

// torch is loaded with local symbols: ask the library that is already there, never load another.
void* open_loaded(std::initializer_list<const char*> names) {
    for (const char* name : names)
        if (void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD)) return library;
    return nullptr;
}

Torch load() {
    void* library = open_loaded({"libtorch.so", "libtorch_cpu.so"});
    if (!library) throw std::runtime_error("torch is not loaded in this process");
    Torch torch;
#define XATTN_FIND(name, result, parameters)                                    \
    torch.name = reinterpret_cast<result(*) parameters>(dlsym(library, #name)); \
    if (!torch.name) throw std::runtime_error("this torch has no " #name ": xattn needs torch >= 2.10");
    XATTN_TORCH_FUNCTIONS(XATTN_FIND)
#undef XATTN_FIND
    return torch;
}

using CurrentStream = int (*)(std::int32_t, void**);

CurrentStream find_current_stream() {
    void* library = open_loaded({"libtorch_cuda.so", "libtorch_hip.so"});
    void* found = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    if (!found) throw std::runtime_error("this torch is built without CUDA and without ROCm: it has no current stream");
    return reinterpret_cast<CurrentStream>(found);
}

}  // namespace

const Torch& Torch::get() {
    static const Torch torch = load();
    return torch;
}

void* Torch::current_stream(int device) {
    static const CurrentStream current = find_current_stream();
    void* stream = nullptr;
    check_torch(current(device, &stream), "aoti_torch_get_current_cuda_stream");
    return stream;
}

void check_torch(int status, const char* call) {
    if (status) throw std::runtime_error(std::string("torch refused ") + call);
}

}  // namespace xattn::launcher
