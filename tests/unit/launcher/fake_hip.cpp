// A stand-in for AMD's driver, which checks what HIP's documentation asks of a launch. An image may also be an ELF
// file, of which only the architecture is looked at.
#include "fake_driver.h"

namespace {

enum {
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kInvalidConfiguration = 9,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kInvalidImage = 200,
    kNoBinaryForGpu = 209,
    kInvalidHandle = 400,
    kNotFound = 500,
    kLaunchFailure = 719,
    kStreamCaptureUnsupported = 900,
};

// A device has the modules that were loaded while it was the current one.
struct Module {
    int device;
    void* library;
};
struct Function {
    int device;
    void* code;
};

thread_local int current = 0;
int num_devices = 2;
unsigned arch = 0x4c;  // gfx942, as in the flags of an ELF file
unsigned lds_bytes = 65536;
std::string failing;  // this call fails, once
int failure = 0;

int fails(const char* name) {
    if (failing != name) return num_devices ? 0 : kNoDevice;
    failing.clear();
    return failure;
}

}  // namespace

EXPORT int fake_current() { return current; }
EXPORT void fake_devices(int count) { num_devices = count; }
EXPORT void fake_fail(const char* name, int status) { failing = name, failure = status; }

EXPORT const char* hipGetErrorName(int status) {
    switch (status) {
        case kInvalidValue:
            return "hipErrorInvalidValue";
        case kOutOfMemory:
            return "hipErrorOutOfMemory";
        case kInvalidConfiguration:
            return "hipErrorInvalidConfiguration";
        case kNoDevice:
            return "hipErrorNoDevice";
        case kInvalidDevice:
            return "hipErrorInvalidDevice";
        case kInvalidImage:
            return "hipErrorInvalidImage";
        case kNoBinaryForGpu:
            return "hipErrorNoBinaryForGpu";
        case kInvalidHandle:
            return "hipErrorInvalidHandle";
        case kNotFound:
            return "hipErrorNotFound";
        case kLaunchFailure:
            return "hipErrorLaunchFailure";
        default:
            return "hipErrorUnknown";
    }
}
EXPORT const char* hipGetErrorString(int) { return "as the stand-in says"; }
EXPORT int hipGetDevice(int* device) {
    *device = current;
    return fails("hipGetDevice");
}
EXPORT int hipSetDevice(int device) {
    if (const int status = fails("hipSetDevice")) return status;
    if (device < 0 || device >= num_devices) return kInvalidDevice;
    current = device;
    return 0;
}
EXPORT int hipModuleLoadData(void** module, const void* image) {
    if (const int status = fails("hipModuleLoadData")) return status;
    const auto* bytes = static_cast<const unsigned char*>(image);
    if (!std::memcmp(bytes, "\177ELF", 4)) {
        if (bytes[18] != 224) return kInvalidImage;              // e_machine: EM_AMDGPU
        return bytes[48] == arch ? kNotFound : kNoBinaryForGpu;  // e_flags: EF_AMDGPU_MACH
    }
    void* library = dlopen(static_cast<const char*>(image), RTLD_NOW);
    if (!library) return kInvalidImage;
    ++fake::modules;
    *module = new Module{current, library};
    return 0;
}
EXPORT int hipModuleGetFunction(void** function, void* module, const char* name) {
    if (const int status = fails("hipModuleGetFunction")) return status;
    const auto* from = static_cast<const Module*>(module);
    void* found = dlsym(from->library, name);
    if (!found) return kNotFound;
    *function = new Function{from->device, found};
    return 0;
}
#ifndef WITHOUT_hipModuleLaunchKernel
EXPORT int hipModuleLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                                 unsigned bz, unsigned shared, void* stream, void** params, void** extra) {
    if (const int status = fails("hipModuleLaunchKernel")) return status;
    const auto* kernel = static_cast<const Function*>(function);
    if (kernel->device != current) return kInvalidHandle;
    if (!params || extra) return kInvalidValue;
    if (!x || !y || !z || bx * by * bz == 0 || bx * by * bz > 1024) return kInvalidConfiguration;
    if (static_cast<unsigned long long>(x) * bx >> 32 || shared > lds_bytes) return kInvalidConfiguration;
    return fake::launch(kernel->code, {x, y, z, bx, by, bz, shared}, stream, current, params) ? kLaunchFailure : 0;
}
#endif
#ifndef WITHOUT_hipStreamGetId
EXPORT int hipStreamGetId(void*, unsigned long long* id) {
    *id = fake::stream_id;
    return fake::capturing ? kStreamCaptureUnsupported : 0;
}
#endif
EXPORT int hipStreamIsCapturing(void*, int* status) {
    *status = fake::capturing;
    return 0;
}
