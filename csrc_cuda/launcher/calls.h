// Prepared calls: a kernel of a loaded image with everything that stays the same from one launch to the next. What is
// left to a launch is the tensors' addresses, the outputs, and the stream.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "driver.h"

namespace xattn::launcher {

constexpr int kMaxOutputRank = 4;
constexpr std::uint32_t kMaxParamBytes = 4096;

// The address of a tensor goes to this offset in the parameter block. Tensors are numbered inputs first, then outputs.
struct Slot {
    std::uint32_t offset;
    std::uint32_t tensor;
};

// A dense tensor that the call allocates beside its first input.
struct Output {
    std::int32_t dtype;  // torch's number
    std::uint32_t rank;
    std::int64_t sizes[kMaxOutputRank];
};

// What Python hands over; the same fields stand in xattn/launch.py, in this order.
struct CallDescription {
    std::uint32_t vendor;
    std::int32_t device;
    std::int32_t device_type;  // torch's number; 0: the CPU, which has no stream (tests)
    std::uint32_t num_inputs;
    std::uint32_t num_slots;
    std::uint32_t num_maps;
    std::uint32_t num_outputs;
    std::uint32_t param_bytes;
    std::uint64_t image_bytes;
    Shape shape;
    std::uint32_t aligned_inputs;  // bit n: the address of input n must be a multiple of 16
    std::int32_t queue_offset;     // where the number of a work queue goes in the parameter block; -1: nowhere
    const void* image;
    const char* key;  // the image's address in the store: equal keys are loaded once
    const char* symbol;
    const char* about;  // for messages: the image's name and who compiled it
    const void* params;
    const Slot* slots;
    const TensorMap* maps;
    const Output* outputs;
};

struct Call {
    Driver& driver;
    CallDescription description;  // its pointers are not used after preparation
    void* kernel;
    std::string about;
    std::vector<unsigned char> params;
    std::vector<Slot> slots;
    std::vector<TensorMap> maps;
    std::vector<Output> outputs;
    std::vector<std::int64_t> strides;  // kMaxOutputRank of each output
};

// The number of the work queue of a launch, the same only for launches that never overlap: those of one stream, outside
// of graphs. -1: none is left, or the driver does not say enough. A kernel has kWorkQueues of them.
constexpr std::int32_t kWorkQueues = 4096;
std::int32_t queue_number(Driver& driver, int device, void* stream);

// Loads the image if this device has not got it yet. Throws DriverError.
std::int64_t prepare(const CallDescription& description);
// The call of a handle, alive as long as the pointer is. Throws std::runtime_error for one that was forgotten.
std::shared_ptr<const Call> find(std::int64_t handle);
void forget(std::int64_t handle);

}  // namespace xattn::launcher
