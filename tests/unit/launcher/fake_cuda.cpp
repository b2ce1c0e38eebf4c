// A stand-in for NVIDIA's driver; an image that starts with "refuse" is refused as one of another architecture.
#include "fake_driver.h"

namespace {

thread_local void* stack[16];
thread_local int depth = 0;
int launches_ex = 0;
unsigned last_attributes = 0;

}  // namespace

EXPORT int fake_depth() { return depth; }  // contexts on this thread's stack
EXPORT int fake_launches_ex() { return launches_ex; }
EXPORT unsigned fake_attributes() { return last_attributes; }

EXPORT int cuStreamGetId(void*, unsigned long long* id) {
    *id = fake::stream_id;
    return fake::capturing ? 906 : 0;  // not permitted
}
EXPORT int cuStreamIsCapturing(void*, int* status) {
    *status = fake::capturing;
    return 0;
}
EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuDeviceGet(int* device, int n) {
    *device = n;
    return n < 2 ? 0 : 101;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = reinterpret_cast<void*>(long(device) + 1000);
    return 0;
}
EXPORT int cuCtxGetCurrent(void** context) {
    *context = depth ? stack[depth - 1] : nullptr;
    return 0;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
    stack[depth++] = context;
    return 0;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
    *context = stack[--depth];
    return 0;
}
EXPORT int cuGetErrorName(int status, const char** name) {
    *name = status == 209   ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
            : status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                            : "CUDA_ERROR_FAKE";
    return 0;
}
EXPORT int cuGetErrorString(int, const char** text) {
    *text = "as the stand-in says";
    return 0;
}
EXPORT int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
    if (!depth) return 201;  // no context
    if (!std::memcmp(image, "refuse", 6)) return 209;
    ++fake::modules;
    *module = dlopen(static_cast<const char*>(image), RTLD_NOW);  // the image is the library's path
    return *module ? 0 : 200;
}
EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
    *function = dlsym(module, name);
    return *function ? 0 : 500;
}
EXPORT int cuFuncSetAttribute(void*, int, int value) { return value > 232448 ? 1 : 0; }
EXPORT int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** params, void**) {
    if (!depth) return 201;
    const int device = int(reinterpret_cast<long>(stack[depth - 1]) - 1000);
    return fake::launch(function, {x, y, z, bx, by, bz, shared}, stream, device, params) ? 700 : 0;
}

struct Config {
    unsigned grid[3], block[3], shared;
    void* stream;
    void* attributes;
    unsigned num_attributes;
};

EXPORT int cuLaunchKernelEx(const Config* c, void* function, void** params, void** extra) {
    ++launches_ex;
    last_attributes = c->num_attributes;
    return cuLaunchKernel(function, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2],
                          c->shared, c->stream, params, extra);
}

// Notes its arguments where the descriptor would stand.
EXPORT int cuTensorMapEncodeTiled(void* descriptor, unsigned element, unsigned rank, void* address,
                                  const unsigned long long* sizes, const unsigned long long* strides,
                                  const unsigned* box, const unsigned*, int, unsigned swizzle, unsigned promotion,
                                  int) {
    auto* words = static_cast<unsigned long long*>(descriptor);
    words[0] = reinterpret_cast<unsigned long long>(address);
    words[1] = element;
    words[2] = rank;
    words[3] = sizes[rank - 1];
    words[4] = rank > 1 ? strides[rank - 2] : 0;
    words[5] = box[rank - 1];
    words[6] = swizzle;
    words[7] = promotion;
    return 0;
}
