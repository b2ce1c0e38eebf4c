// A GPU driver behind one table of calls. CUDA's and HIP's are opened with dlopen when they are first needed; this
// library links neither.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace xattn::launcher {

// Numbers shared with xattn/launch.py.
enum class Vendor : std::uint32_t { nvidia = 0, amd = 1 };

struct Shape {
    std::uint32_t grid[3];
    std::uint32_t block[3];
    std::uint32_t cluster[3];  // {1, 1, 1}: none
    std::uint32_t shared_bytes;
    std::uint32_t overlap;  // 1: may start before the kernel ahead of it in the stream has ended (it waits itself)
};

// How a kernel sees a tensor through the tensor memory accelerator: the arguments of cuTensorMapEncodeTiled.
struct TensorMap {
    static constexpr int kMaxRank = 5;
    std::uint32_t offset;   // of the 128-byte descriptor in the parameter block
    std::uint32_t tensor;   // which tensor's address
    std::uint32_t element;  // CUtensorMapDataType
    std::uint32_t rank;
    std::uint64_t sizes[kMaxRank];    // innermost first
    std::uint64_t strides[kMaxRank];  // in bytes; [0] is the element's size
    std::uint32_t box[kMaxRank];
    std::uint32_t swizzle;       // CUtensorMapSwizzle
    std::uint32_t l2_promotion;  // CUtensorMapL2promotion
};

// What orders the launches of a stream.
struct StreamState {
    bool known;      // the driver can say the rest
    bool capturing;  // into a graph
    std::uint64_t id;
};

struct DriverError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Driver {
  public:
    // Throws DriverError where the vendor's driver cannot be opened.
    static Driver& of(Vendor vendor);

    virtual ~Driver() = default;
    // Makes the primary context of a device current in this thread; what it returns is given to leave().
    virtual void* enter(int device) = 0;
    virtual void leave(void* entered) = 0;
    // The kernel `symbol` of an image, in the current context, allowed that much dynamic shared memory.
    virtual void* load(const std::string& image, const std::string& symbol, std::uint32_t shared_bytes) = 0;
    virtual void encode(const TensorMap& map, void* address, void* descriptor) = 0;
    virtual StreamState state_of(void*) { return {false, false, 0}; }
    virtual void launch(void* kernel, const Shape& shape, void* stream, void* params) = 0;

  protected:
    // For messages: "launch of 16 blocks of 128 threads, 24576 bytes of shared memory".
    static std::string words(const Shape& shape);
};

// The context of a device, current as long as this lives.
class InContext {
  public:
    InContext(Driver& driver, int device) : driver_(driver), entered_(driver.enter(device)) {}
    ~InContext() { driver_.leave(entered_); }
    InContext(const InContext&) = delete;
    InContext& operator=(const InContext&) = delete;

  private:
    Driver& driver_;
    void* entered_;
};

// The vendors' drivers: driver_cuda.cpp, driver_hip.cpp.
Driver& cuda_driver();
Driver& hip_driver();

// A library of the system that is opened by name, and its functions; DriverError names what is missing. One that the
// process has already comes first: handles of torch's driver mean nothing to another copy of it.
class SystemLibrary {
  public:
    SystemLibrary(std::initializer_list<const char*> names, const char* purpose);
    // `needed`: throws where the function is missing; otherwise null stands for it.
    void* find(const char* function, bool needed = true) const;

  private:
    void* library_ = nullptr;
    const char* purpose_;
};

}  // namespace xattn::launcher
