// AMD's driver. HIP keeps a current device for each thread where CUDA keeps a stack of contexts. Not run on AMD
// hardware.
#include <type_traits>

#include "driver.h"

namespace xattn::launcher {

namespace {

class HipDriver final : public Driver {
  public:
    HipDriver() : library_({"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}, "AMD's driver (libamdhip64)") {
        const auto find = [&](auto& function, const char* name, bool needed = true) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(library_.find(name, needed));
        };
        find(error_name_, "hipGetErrorName");
        find(error_string_, "hipGetErrorString");
        find(get_device_, "hipGetDevice");
        find(set_device_, "hipSetDevice");
        find(load_, "hipModuleLoadData");
        find(function_, "hipModuleGetFunction");
        find(launch_, "hipModuleLaunchKernel");
        find(stream_id_, "hipStreamGetId", false);  // newer than ROCm 7.0
        find(is_capturing_, "hipStreamIsCapturing", false);
    }

    // Returns the device to go back to, plus one; null: it is the current one.
    void* enter(int device) override {
        int current = 0;
        check(get_device_(&current), "hipGetDevice");
        if (current == device) return nullptr;
        check(set_device_(device), "hipSetDevice");
        return reinterpret_cast<void*>(std::uintptr_t(current) + 1);
    }

    void leave(void* entered) override {
        if (entered) set_device_(int(reinterpret_cast<std::uintptr_t>(entered) - 1));
    }

    // Dynamic LDS of a kernel needs no permission: the launch says how much.
    void* load(const std::string& image, const std::string& symbol, std::uint32_t) override {
        void *module = nullptr, *found = nullptr;
        check(load_(&module, image.c_str()), "loading");
        check(function_(&found, module, symbol.c_str()), ("finding kernel " + symbol).c_str());
        return found;
    }

    void encode(const TensorMap&, void*, void*) override {
        throw DriverError("tensor maps are NVIDIA's: an image for AMD asked for one");
    }

    // A handle may come again for another stream, so where HIP gives no id only the default stream is known.
    StreamState state_of(void* stream) override {
        std::uint64_t id = 0;
        int capturing = 0;
        const bool asked = is_capturing_ && !is_capturing_(stream, &capturing);
        const bool named = stream_id_ ? !capturing && !stream_id_(stream, &id) : !stream;
        return {asked && (capturing || named), capturing != 0, id};
    }

    void launch(void* kernel, const Shape& s, void* stream, void* params) override {
        void* parameters[] = {params};
        const int status = launch_(kernel, s.grid[0], s.grid[1], s.grid[2], s.block[0], s.block[1], s.block[2],
                                   s.shared_bytes, stream, parameters, nullptr);
        if (status) check(status, words(s).c_str());
    }

  private:
    void check(int status, const char* what) const {
        if (status)
            throw DriverError(std::string(what) + " failed: " + error_name_(status) + " (" + error_string_(status) +
                              ")");
    }

    SystemLibrary library_;
    const char* (*error_name_)(int);
    const char* (*error_string_)(int);
    int (*get_device_)(int*);
    int (*set_device_)(int);
    int (*load_)(void**, const void*);
    int (*function_)(void**, void*, const char*);
    int (*launch_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    int (*stream_id_)(void*, std::uint64_t*);
    int (*is_capturing_)(void*, int*);
};

}  // namespace

Driver& hip_driver() {
    static HipDriver driver;
    return driver;
}

}  // namespace xattn::launcher
