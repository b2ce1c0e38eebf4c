// The launcher: torch.ops.xattn.launch, and the C functions by which xattn/launch.py prepares what it launches.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "calls.h"
#include "torch_abi.h"

namespace xattn::launcher {

namespace {

// Owns a tensor's handle.
class Tensor {
  public:
    explicit Tensor(TensorHandle handle = nullptr) : handle_(handle) {}
    Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
    Tensor& operator=(Tensor&&) = delete;
    ~Tensor() {
        if (handle_) Torch::get().aoti_torch_delete_tensor_object(handle_);
    }
    TensorHandle release() {
        TensorHandle handle = handle_;
        handle_ = nullptr;
        return handle;
    }
    void* address() const {
        void* data = nullptr;
        check_torch(Torch::get().aoti_torch_get_data_ptr(handle_, &data), "aoti_torch_get_data_ptr");
        return data;
    }

  private:
    TensorHandle handle_;
};

// Owns a list's handle.
struct List {
    ListHandle handle = nullptr;
    ~List() {
        if (handle) Torch::get().torch_delete_list(handle);
    }
};

Tensor allocate(const Call& call, std::size_t n) {
    const Output& output = call.outputs[n];
    TensorHandle handle = nullptr;
    check_torch(Torch::get().aoti_torch_empty_strided(
                    output.rank, output.sizes, &call.strides[n * kMaxOutputRank], output.dtype,
                    call.description.device_type, call.description.device_type ? call.description.device : -1, &handle),
                "aoti_torch_empty_strided");
    return Tensor(handle);
}

// launch(int call, Tensor[] inputs) -> Tensor[]: the outputs, or none where an input is not aligned as the call needs
// it.
void launch(StableIValue* stack, std::uint64_t, std::uint64_t) {
    const Torch& torch = Torch::get();
    const List inputs{reinterpret_cast<ListHandle>(stack[1])};
    const std::shared_ptr<const Call> call = find(std::int64_t(stack[0]));
    const CallDescription& d = call->description;

    std::size_t count = 0;
    check_torch(torch.torch_list_size(inputs.handle, &count), "torch_list_size");
    if (count != d.num_inputs)
        throw std::runtime_error("launch: got " + std::to_string(count) + " tensors for a call of " +
                                 std::to_string(d.num_inputs));
    List results;
    check_torch(torch.torch_new_list_reserve_size(d.num_outputs, &results.handle), "torch_new_list_reserve_size");

    std::vector<Tensor> tensors;
    std::vector<void*> addresses;
    tensors.reserve(count + d.num_outputs);
    addresses.reserve(count + d.num_outputs);
    bool aligned = true;
    for (std::size_t n = 0; n < count; ++n) {
        StableIValue value = 0;
        check_torch(torch.torch_list_get_item(inputs.handle, n, &value), "torch_list_get_item");
        tensors.emplace_back(reinterpret_cast<TensorHandle>(value));
        addresses.push_back(tensors.back().address());
        const bool must_align = d.aligned_inputs >> n & 1;
        aligned &= !must_align || reinterpret_cast<std::uintptr_t>(addresses.back()) % 16 == 0;
    }
    if (aligned) {
        for (std::size_t n = 0; n < d.num_outputs; ++n) {
            tensors.push_back(allocate(*call, n));
            addresses.push_back(tensors.back().address());
        }
        alignas(128) unsigned char params[kMaxParamBytes];
        std::memcpy(params, call->params.data(), call->params.size());
        for (const Slot& slot : call->slots) std::memcpy(params + slot.offset, &addresses[slot.tensor], sizeof(void*));
        try {
            const InContext context(call->driver, d.device);
            for (const TensorMap& map : call->maps)
                call->driver.encode(map, addresses[map.tensor], params + map.offset);
            void* stream = d.device_type ? Torch::current_stream(d.device) : nullptr;
            if (d.queue_offset >= 0) {
                const std::int32_t queue = queue_number(call->driver, d.device, stream);
                std::memcpy(params + d.queue_offset, &queue, sizeof queue);
            }
            call->driver.launch(call->kernel, d.shape, stream, params);
        } catch (const DriverError& error) {
            throw std::runtime_error(std::string(error.what()) + " for " + call->about);
        }
        for (std::size_t n = 0; n < d.num_outputs; ++n)
            check_torch(torch.torch_list_push_back(results.handle, StableIValue(tensors[count + n].release())),
                        "torch_list_push_back");
    }
    stack[0] = StableIValue(results.handle);
    results.handle = nullptr;
}

void register_ops() {
    const Torch& torch = Torch::get();
    LibraryHandle library = nullptr;
    check_torch(torch.aoti_torch_library_init_fragment("xattn", __FILE__, __LINE__, &library), "library fragment");
    check_torch(torch.aoti_torch_library_def(library, "launch(int call, Tensor[] inputs) -> Tensor[]"), "library def");
    // The callers have seen to gradients: the same kernel answers for Autograd, which saves a pass through its
    // fallback.
    for (const char* key : {"CompositeExplicitAutograd", "Autograd"}) {
        check_torch(torch.aoti_torch_library_init_impl("xattn", key, __FILE__, __LINE__, &library), "library impl");
        check_torch(torch.torch_library_impl(library, "launch", &launch, kTorchTarget), "torch_library_impl");
    }
}

// Runs `f`; what it throws goes into `message`, and `failed` is returned.
template <class F>
std::int64_t guarded(char* message, std::uint64_t size, F f) {
    try {
        return f();
    } catch (const std::exception& error) {
        std::snprintf(message, size, "%s", error.what());
        return -1;
    }
}

}  // namespace

}  // namespace xattn::launcher

#define XATTN_EXPORT extern "C" __attribute__((visibility("default")))

// Each returns -1 after writing what went wrong into `message` (`size` bytes).

// Registers torch.ops.xattn.launch. Once in a process.
XATTN_EXPORT std::int64_t xattn_register(char* message, std::uint64_t size) {
    return xattn::launcher::guarded(message, size, [] {
        xattn::launcher::register_ops();
        return std::int64_t(0);
    });
}

// Returns a handle for torch.ops.xattn.launch.
XATTN_EXPORT std::int64_t xattn_prepare(const xattn::launcher::CallDescription* description, char* message,
                                        std::uint64_t size) {
    return xattn::launcher::guarded(message, size, [&] { return xattn::launcher::prepare(*description); });
}

XATTN_EXPORT void xattn_forget(std::int64_t handle) { xattn::launcher::forget(handle); }

// sizeof(CallDescription): the caller's must be the same.
XATTN_EXPORT std::int64_t xattn_description_bytes() { return sizeof(xattn::launcher::CallDescription); }
