#include "runtime/cuda/graph_memory.h"

#include <array>

#include "runtime/cuda/check.h"
#include "runtime/cuda/rank.h"

namespace sherd::cuda {

GraphMemory& GraphMemory::of(int device) {
  static std::array<GraphMemory, most_devices>& all = []() -> auto& {
    auto& made = *new std::array<GraphMemory, most_devices>;
    for (std::size_t i = 0; i < made.size(); ++i) made[i].device_ = static_cast<int>(i);
    return made;
  }();
  return all[static_cast<std::size_t>(device)];
}

cudaMemPool_t GraphMemory::kind() {
  std::call_once(kind_made_, [&] {
    cudaMemPoolProps props{};
    props.allocType = cudaMemAllocationTypePinned;
    props.location = {cudaMemLocationTypeDevice, device_};
    check_cuda(cudaMemPoolCreate(&kind_, &props), "cuda memory");
  });
  return kind_;
}

void GraphMemory::begin() {
  const std::scoped_lock lock(mutex_);
  ++graphs_;
}

void GraphMemory::end(const std::function<void()>& destroy) noexcept {
  const std::scoped_lock lock(mutex_);
  destroy();
  if (--graphs_ == 0) cudaDeviceGraphMemTrim(device_);
}

void GraphMemory::trim(const std::function<void()>& wait) {
  const std::scoped_lock lock(mutex_);
  wait();
  check_cuda(cudaDeviceGraphMemTrim(device_), "cuda memory");
}

}  // namespace sherd::cuda
