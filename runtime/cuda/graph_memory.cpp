#include "runtime/cuda/graph_memory.h"

#include <array>

#include "runtime/cuda/check.h"
#include "runtime/cuda/rank.h"

namespace sherd::cuda {

GraphMemory& GraphMemory::of(int device) {
  static std::array<GraphMemory, most_devices>& all = *new std::array<GraphMemory, most_devices>;
  return all[static_cast<std::size_t>(device)];
}

cudaMemPool_t GraphMemory::kind(int device) {
  std::call_once(kind_made_, [&] {
    cudaMemPoolProps props{};
    props.allocType = cudaMemAllocationTypePinned;
    props.location = {cudaMemLocationTypeDevice, device};
    check_cuda(cudaMemPoolCreate(&kind_, &props), "cuda memory");
  });
  return kind_;
}

void GraphMemory::begin() {
  const std::scoped_lock lock(mutex_);
  ++graphs_;
}

void GraphMemory::end(int device, const std::function<void()>& destroy) noexcept {
  const std::scoped_lock lock(mutex_);
  destroy();
  if (--graphs_ == 0) cudaDeviceGraphMemTrim(device);
}

void GraphMemory::trim(int device, const std::function<void()>& wait) {
  const std::scoped_lock lock(mutex_);
  wait();
  check_cuda(cudaDeviceGraphMemTrim(device), "cuda memory");
}

}  // namespace sherd::cuda
