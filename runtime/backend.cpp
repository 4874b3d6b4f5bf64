#include "runtime/backend.h"

#include <cstring>

#include "runtime/context.h"
#include "runtime/error.h"

#ifdef SHERD_CUDA
#include "runtime/cuda/backend.h"
#endif

namespace sherd {
namespace {

/// The host as a backend. Ops run their CPU kernels directly, so there are none to look up.
class CpuBackend final : public Backend {
 public:
  void* allocate(Device, std::size_t bytes) override { return Context::current().cpu_pool().allocate(bytes); }
  void deallocate(Device, void* data, std::size_t bytes) noexcept override {
    CpuPool::give_back(data, bytes);
  }
  void copy(void* to, Device, const void* from, Device, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  Kernel kernel(std::type_index) const override { return nullptr; }
  void synchronize(Device) override {}
};

}  // namespace

Backend& backend(DeviceType type) {
  static CpuBackend host;  // stateless
  if (type == DeviceType::cpu) return host;
#ifdef SHERD_CUDA  // the one place that asks whether this build has the back end
  if (type == DeviceType::cuda) return cuda_backend();
#endif
  fail<DeviceError>("{}: this build has no such back end; build with -Dcuda=enabled, or use cpu",
                    type == DeviceType::cuda ? "cuda" : "meta");
}

}  // namespace sherd
