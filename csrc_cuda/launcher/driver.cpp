#include "driver.h"

#include <dlfcn.h>

namespace xattn::launcher {

Driver& Driver::of(Vendor vendor) { return vendor == Vendor::nvidia ? cuda_driver() : hip_driver(); }

SystemLibrary::SystemLibrary(std::initializer_list<const char*> names, const char* purpose) : purpose_(purpose) {
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
