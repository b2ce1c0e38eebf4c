#include "driver.h"

#include <dlfcn.h>

namespace xattn::launcher {

Driver& Driver::of(Vendor vendor) { return vendor == Vendor::nvidia ? cuda_driver() : hip_driver(); }

std::string Driver::words(const Shape& s) {
    return "launch of " + std::to_string(std::uint64_t(s.grid[0]) * s.grid[1] * s.grid[2]) + " blocks of " +
           std::to_string(s.block[0] * s.block[1] * s.block[2]) + " threads, " + std::to_string(s.shared_bytes) +
           " bytes of shared memory";
}

SystemLibrary::SystemLibrary(std::initializer_list<const char*> names, const char* purpose) : purpose_(purpose) {
    for (const char* name : names) {
        library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (library_) return;
    }
    std::string tried;
    for (const char* name : names) {
        library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (library_) return;
        tried += (tried.empty() ? "" : ", ") + std::string(name);
    }
    throw DriverError(std::string("opening ") + purpose_ + " failed: none of " + tried + " can be loaded");
}

void* SystemLibrary::find(const char* function, bool needed) const {
    void* found = dlsym(library_, function);
    if (!found && needed) throw DriverError(std::string(purpose_) + " has no " + function + ": it is too old");
    return found;
}

}  // namespace xattn::launcher
