// NVIDIA's driver. Types and numbers of the driver API are declared here as its manual gives them (ABI facts); its
// headers are not needed.
#include <cstring>
#include <map>
#include <mutex>
#include <type_traits>

#include "driver.h"

namespace xattn::launcher {

namespace {

using Context = void*;
using Module = void*;
using Function = void*;

constexpr int kMaxDynamicShared = 8;                     // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kNonPortableCluster = 14;                  // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
constexpr int kJitErrorLog = 5, kJitErrorLogBytes = 6;   // CU_JIT_ERROR_LOG_BUFFER, .._SIZE_BYTES
constexpr std::uint32_t kClusterDimension = 4;           // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr std::uint32_t kProgrammaticSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

struct LaunchAttribute {
    std::uint32_t id;
    std::uint32_t pad;
    union {
        std::uint32_t dims[3];
        int flag;
        char bytes[64];
    } value;
};

struct LaunchConfig {
    std::uint32_t grid[3];
    std::uint32_t block[3];
    std::uint32_t shared_bytes;
    void* stream;
    LaunchAttribute* attributes;
    std::uint32_t num_attributes;
};

class CudaDriver final : public Driver {
  public:
    CudaDriver() : library_({"libcuda.so.1", "libcuda.so"}, "NVIDIA's driver (libcuda)") {
        const auto find = [&](auto& function, const char* name, bool needed = true) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(library_.find(name, needed));
        };
        find(error_name_, "cuGetErrorName");
        find(error_string_, "cuGetErrorString");
        find(init_, "cuInit");
        find(device_get_, "cuDeviceGet");
        find(retain_, "cuDevicePrimaryCtxRetain");
        find(current_, "cuCtxGetCurrent");
        find(push_, "cuCtxPushCurrent_v2");
        find(pop_, "cuCtxPopCurrent_v2");
        find(load_, "cuModuleLoadDataEx");
        find(function_, "cuModuleGetFunction");
        find(attribute_, "cuFuncSetAttribute");
        find(launch_, "cuLaunchKernel");
        find(launch_ex_, "cuLaunchKernelEx", false);
        find(encode_, "cuTensorMapEncodeTiled", false);
        find(stream_id_, "cuStreamGetId", false);
        find(is_capturing_, "cuStreamIsCapturing", false);
    }

    void* enter(int device) override {
        const Context primary = primary_context(device);
        Context current = nullptr;
        check(current_(&current), "cuCtxGetCurrent");
        if (current == primary) return nullptr;
        check(push_(primary), "cuCtxPushCurrent");
        return primary;
    }

    void leave(void* entered) override {
        Context popped = nullptr;
        if (entered) pop_(&popped);
    }

    void* load(const std::string& image, const std::string& symbol, std::uint32_t shared_bytes) override {
        char log[2048] = "";
        int options[] = {kJitErrorLog, kJitErrorLogBytes};
        void* values[] = {log, reinterpret_cast<void*>(sizeof log)};
        Module module = nullptr;
        const int status = load_(&module, image.c_str(), 2, options, values);
        if (status && log[0]) throw DriverError(text(status, "loading") + ": " + log);
        check(status, "loading");
        Function found = nullptr;
        check(function_(&found, module, symbol.c_str()), ("finding kernel " + symbol).c_str());
        const std::string what = "asking for " + std::to_string(shared_bytes) + " bytes of shared memory";
        check(attribute_(found, kMaxDynamicShared, int(shared_bytes)), what.c_str());
        return found;
    }

    void encode(const TensorMap& m, void* address, void* descriptor) override {
        if (!encode_)
            throw DriverError("the driver has no cuTensorMapEncodeTiled: tensor maps need CUDA 12.0 or newer");
        const std::uint32_t steps[TensorMap::kMaxRank] = {1, 1, 1, 1, 1};
        check(encode_(descriptor, m.element, m.rank, address, m.sizes, m.strides + 1, m.box, steps, 0, m.swizzle,
                      m.l2_promotion, 0),
              "cuTensorMapEncodeTiled");
    }

    StreamState state_of(void* stream) override {
        std::uint64_t id = 0;
        int capturing = 0;
        const bool known = stream_id_ && is_capturing_ && !is_capturing_(stream, &capturing) &&
                           (capturing || !stream_id_(stream, &id));
        return {known, capturing != 0, id};
    }

    void launch(void* kernel, const Shape& s, void* stream, void* params) override {
        void* parameters[] = {params};
        LaunchAttribute attributes[2];
        std::uint32_t count = 0;
        const std::uint32_t in_cluster = s.cluster[0] * s.cluster[1] * s.cluster[2];
        if (in_cluster > 1) {
            if (in_cluster > 8) check(attribute_(kernel, kNonPortableCluster, 1), "allowing a cluster of that size");
            LaunchAttribute& a = attributes[count++] = {kClusterDimension, 0, {}};
            std::memcpy(a.value.dims, s.cluster, sizeof s.cluster);
        }
        if (s.overlap) {
            LaunchAttribute& a = attributes[count++] = {kProgrammaticSerialization, 0, {}};
            a.value.flag = 1;
        }
        int status = 0;
        if (count == 0) {
            status = launch_(kernel, s.grid[0], s.grid[1], s.grid[2], s.block[0], s.block[1], s.block[2],
                             s.shared_bytes, stream, parameters, nullptr);
        } else {
            if (!launch_ex_) throw DriverError("the driver has no cuLaunchKernelEx: clusters need CUDA 12.0 or newer");
            LaunchConfig config = {};
            std::memcpy(config.grid, s.grid, sizeof s.grid);
            std::memcpy(config.block, s.block, sizeof s.block);
            config.shared_bytes = s.shared_bytes;
            config.stream = stream;
            config.attributes = attributes;
            config.num_attributes = count;
            status = launch_ex_(&config, kernel, parameters, nullptr);
        }
        if (status) throw DriverError(text(status, words(s).c_str()));
    }

  private:
    // Kept for the life of the process, as torch keeps it.
    Context primary_context(int device) {
        const std::lock_guard<std::mutex> lock(mutex_);
        Context& context = contexts_[device];
        if (!context) {
            int handle = 0;
            check(init_(0), "cuInit");
            check(device_get_(&handle, device), "cuDeviceGet");
            check(retain_(&context, handle), "cuDevicePrimaryCtxRetain");
        }
        return context;
    }

    std::string text(int status, const char* what) const {
        const char *name = nullptr, *description = nullptr;
        error_name_(status, &name);
        error_string_(status, &description);
        return std::string(what) + " failed: " + (name ? name : std::to_string(status).c_str()) + " (" +
               (description ? description : "no description") + ")";
    }
    void check(int status, const char* what) const {
        if (status) throw DriverError(text(status, what));
    }

    SystemLibrary library_;
    std::mutex mutex_;
    std::map<int, Context> contexts_;

    int (*error_name_)(int, const char**);
    int (*error_string_)(int, const char**);
    int (*init_)(unsigned);
    int (*device_get_)(int*, int);
    int (*retain_)(Context*, int);
    int (*current_)(Context*);
    int (*push_)(Context);
    int (*pop_)(Context*);
    int (*load_)(Module*, const void*, unsigned, int*, void**);
    int (*function_)(Function*, Module, const char*);
    int (*attribute_)(Function, int, int);
    int (*launch_)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                   void**);
    int (*launch_ex_)(const LaunchConfig*, Function, void**, void**);
    int (*encode_)(void*, std::uint32_t, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*,
                   const std::uint32_t*, const std::uint32_t*, int, std::uint32_t, std::uint32_t, int);
    int (*stream_id_)(void*, std::uint64_t*);
    int (*is_capturing_)(void*, int*);
};

}  // namespace

Driver& cuda_driver() {
    static CudaDriver driver;
    return driver;
}

}  // namespace xattn::launcher
