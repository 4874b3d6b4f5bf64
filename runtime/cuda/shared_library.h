// A library of CUDA that is loaded when it is first needed: it is large, and a program that starts without a
// GPU needs none of it.
#pragma once

#include <dlfcn.h>

#include <string>
#include <string_view>

#include "runtime/error.h"

namespace sherd::cuda {

/// Never unloaded, since what it made may be destroyed last.
class SharedLibrary {
 public:
  /// By file name, where the loader searches; then in the folder of the toolkit that this was built with.
  explicit SharedLibrary(std::string name) : name_(std::move(name)) {
    for (const std::string& path : {name_, SHERD_CUDA_LIBRARIES "/" + name_})
      if (!library_) library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  bool found() const { return library_ != nullptr; }
  const std::string& name() const { return name_; }

  template <class F>
  void load(const char* function, F& address) const {
    address = reinterpret_cast<F>(dlsym(library_, function));
    check<DeviceError>(address != nullptr,
                       "{} has no function {}; install the version that Sherd was built with", name_,
                       function);
  }

 private:
  std::string name_;
  void* library_ = nullptr;
};

}  // namespace sherd::cuda
