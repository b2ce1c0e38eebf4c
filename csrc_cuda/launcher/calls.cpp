#include "calls.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>

namespace xattn::launcher {

namespace {

std::shared_mutex calls_mutex;
std::map<std::int64_t, std::shared_ptr<const Call>> calls;
std::int64_t next_handle = 1;

// Kernels by (vendor, device, image, symbol, shared memory), loaded once and kept: images are few.
std::mutex kernels_mutex;
std::map<std::tuple<std::uint32_t, int, std::string, std::string, std::uint32_t>, void*> kernels;

void* kernel_of(Driver& driver, const CallDescription& d) {
    const std::lock_guard<std::mutex> lock(kernels_mutex);
    void*& kernel = kernels[{d.vendor, d.device, d.key, d.symbol, d.shape.shared_bytes}];
    if (!kernel) {
        const InContext context(driver, d.device);
        // PTX is text that must end in a zero, which std::string sees to.
        const std::string image(static_cast<const char*>(d.image), d.image_bytes);
        kernel = driver.load(image, d.symbol, d.shape.shared_bytes);
    }
    return kernel;
}

// A launch that a graph captures has a queue of its own for good: nobody knows beside what it is replayed.
constexpr std::int32_t kStreamQueues = 512;
std::mutex queues_mutex;
std::map<std::tuple<Driver*, int, std::uint64_t>, std::int32_t> stream_queues;
std::int32_t next_captured = kStreamQueues;

}  // namespace

std::int32_t queue_number(Driver& driver, int device, void* stream) {
    const StreamState state = driver.state_of(stream);
    if (!state.known) return -1;
    const std::lock_guard<std::mutex> lock(queues_mutex);
    if (state.capturing) return next_captured < kWorkQueues ? next_captured++ : -1;
    const auto found = stream_queues.find({&driver, device, state.id});
    if (found != stream_queues.end()) return found->second;
    const std::int32_t number = std::int32_t(stream_queues.size());
    if (number >= kStreamQueues) return -1;
    return stream_queues[{&driver, device, state.id}] = number;
}

std::int64_t prepare(const CallDescription& d) {
    Driver& driver = Driver::of(Vendor(d.vendor));
    const auto* params = static_cast<const unsigned char*>(d.params);
    auto call = std::make_shared<Call>(Call{driver,
                                            d,
                                            kernel_of(driver, d),
                                            d.about,
                                            {params, params + d.param_bytes},
                                            {d.slots, d.slots + d.num_slots},
                                            {d.maps, d.maps + d.num_maps},
                                            {d.outputs, d.outputs + d.num_outputs},
                                            {}});
    for (const Output& output : call->outputs) {
        std::int64_t strides[kMaxOutputRank] = {1, 1, 1, 1}, step = 1;
        for (int n = int(output.rank) - 1; n >= 0; --n) {
            strides[n] = step;
            step *= output.sizes[n] ? output.sizes[n] : 1;
        }
        call->strides.insert(call->strides.end(), strides, strides + kMaxOutputRank);
    }
    const std::unique_lock<std::shared_mutex> lock(calls_mutex);
    calls[next_handle] = std::move(call);
    return next_handle++;
}

std::shared_ptr<const Call> find(std::int64_t handle) {
    const std::shared_lock<std::shared_mutex> lock(calls_mutex);
    const auto found = calls.find(handle);
    if (found == calls.end()) throw std::runtime_error("no prepared call has handle " + std::to_string(handle));
    return found->second;
}

void forget(std::int64_t handle) {
    const std::unique_lock<std::shared_mutex> lock(calls_mutex);
    calls.erase(handle);
}

}  // namespace xattn::launcher
