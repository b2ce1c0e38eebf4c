// What the stand-ins for drivers share: an image is the path of a shared library of the host build, a launch runs it on
// the CPU, or, while its stream is captured, notes it down for a replay. What the launcher asked for is counted.
#include <dlfcn.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

using Kernel = int (*)(const void*, unsigned, unsigned long long, char*, int);

int modules = 0, launches = 0;
unsigned last_shape[7];
void* last_stream = nullptr;
int last_device = -1;
unsigned long long stream_id = 1;
int capturing = 0;
unsigned param_bytes = 0;  // of the next launches: a real driver knows it from the image
std::vector<std::function<int()>> graph;

// 0, or 1 where the kernel fails.
inline int launch(void* function, const unsigned (&shape)[7], void* stream, int device, void** params) {
    ++launches;
    std::memcpy(last_shape, shape, sizeof shape);
    last_stream = stream, last_device = device;
    const unsigned blocks = shape[0] * shape[1] * shape[2];
    const auto run = [=](const void* block) {
        char message[256];
        return reinterpret_cast<Kernel>(function)(block, blocks, 0, message, sizeof message);
    };
    if (!capturing) return run(params[0]);
    const std::string kept(static_cast<const char*>(params[0]), param_bytes);
    graph.push_back([=] { return run(kept.data()); });
    return 0;
}

}  // namespace fake

EXPORT int fake_modules() { return fake::modules; }
EXPORT int fake_launches() { return fake::launches; }
EXPORT unsigned fake_shape(int n) { return fake::last_shape[n]; }
EXPORT unsigned long long fake_stream_of_launch() { return reinterpret_cast<unsigned long long>(fake::last_stream); }
EXPORT int fake_device_of_launch() { return fake::last_device; }
EXPORT void fake_stream(unsigned long long id, int captures) { fake::stream_id = id, fake::capturing = captures; }
EXPORT void fake_param_bytes(unsigned bytes) { fake::param_bytes = bytes; }
// Runs what was captured; returns how many launches that was, or -1.
EXPORT int fake_replay() {
    for (const auto& run : fake::graph)
        if (run()) return -1;
    return int(fake::graph.size());
}
EXPORT void fake_forget_graph() { fake::graph.clear(); }
