// PyTorch's stable C functions, target 2.10, found in the process's own torch at run time: one library serves every
// torch from 2.10 on, needs no torch to be built, and names what is missing instead of failing to load.
// tests/unit/test_launcher.py compares these declarations with torch's headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xattn::launcher {

using StableIValue = std::uint64_t;  // an integer, or an owned handle, as 64 bits
using BoxedKernel = void (*)(StableIValue* stack, std::uint64_t num_args, std::uint64_t num_outputs);

struct AtenTensorOpaque;
struct StableListOpaque;
struct TorchLibraryOpaque;
using TensorHandle = AtenTensorOpaque*;
using ListHandle = StableListOpaque*;
using LibraryHandle = TorchLibraryOpaque*;

constexpr std::uint64_t kTorchTarget = 0x020a000000000000;  // 2.10

// name, result (a status is 0 for success), parameters
#define XATTN_TORCH_FUNCTIONS(X)                                                                                 \
    X(aoti_torch_library_init_fragment, int, (const char*, const char*, std::uint32_t, LibraryHandle*))          \
    X(aoti_torch_library_init_impl, int, (const char*, const char*, const char*, std::uint32_t, LibraryHandle*)) \
    X(aoti_torch_library_def, int, (LibraryHandle, const char*))                                                 \
    X(torch_library_impl, int, (LibraryHandle, const char*, BoxedKernel, std::uint64_t))                         \
    X(torch_new_list_reserve_size, int, (std::size_t, ListHandle*))                                              \
    X(torch_list_size, int, (ListHandle, std::size_t*))                                                          \
    X(torch_list_get_item, int, (ListHandle, std::size_t, StableIValue*))                                        \
    X(torch_list_push_back, int, (ListHandle, StableIValue))                                                     \
    X(torch_delete_list, int, (ListHandle))                                                                      \
    X(aoti_torch_delete_tensor_object, int, (TensorHandle))                                                      \
    X(aoti_torch_get_data_ptr, int, (TensorHandle, void**))                                                      \
    X(aoti_torch_empty_strided, int,                                                                             \
      (std::int64_t, const std::int64_t*, const std::int64_t*, std::int32_t, std::int32_t, std::int32_t,         \
       TensorHandle*))

struct Torch {
#define XATTN_DECLARE(name, result, parameters) result(*name) parameters = nullptr;
    XATTN_TORCH_FUNCTIONS(XATTN_DECLARE)
#undef XATTN_DECLARE

    // The process's torch; throws std::runtime_error where it is not loaded or lacks a function.
    static const Torch& get();
    // torch's current stream of a GPU. On CPU-only builds of torch it throws.
    static void* current_stream(int device);
};

// Throws std::runtime_error where a call of torch's failed.
void check_torch(int status, const char* call);

}  // namespace xattn::launcher
