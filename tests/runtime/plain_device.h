// A back end of an application's own that has kernels of the primitive ops alone.
#pragma once

#include <cstdlib>
#include <cstring>
#include <map>

#include "runtime/backend.h"
#include "runtime/ops/elementwise_list.h"
#include "runtime/ops/list.h"

namespace sherd::test {

/// The host's memory under another name, so that the CPU's kernels of the primitives serve.
class PlainBackend final : public Backend {
 public:
  void* allocate(Device, std::size_t bytes) override {
    void* data = std::aligned_alloc(64, (bytes / 64 + 1) * 64);
    sizes[data] = bytes;
    return data;
  }
  void deallocate(Device, void* data, std::size_t bytes) noexcept override {
    wrong_sizes += sizes[data] != bytes;
    std::free(data);
  }
  std::map<void*, std::size_t> sizes;  // of the blocks, as asked for
  int wrong_sizes = 0;                 // blocks that came back as of another size
  void copy(void* to, Device, const void* from, Device, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void synchronize(Device) override {}
};

inline PlainBackend& plain_backend() {
  static PlainBackend instance;
  return instance;
}

inline Device plain() {
  static const DeviceType type = [] {
    const DeviceType made = register_backend("plain", plain_backend());
    backend(DeviceType::cpu);
    const auto share = [&]<class O>() { kernel_row<O>().set(made, kernel_row<O>().on(DeviceType::cpu)); };
    ops::Primitives::for_each(share);
    ops::UnaryOps::for_each(share);
    ops::ArithmeticOps::for_each(share);
    ops::ComparisonOps::for_each(share);
    share.operator()<ops::Where>();
    return made;
  }();
  return {type, 0};
}

}  // namespace sherd::test
