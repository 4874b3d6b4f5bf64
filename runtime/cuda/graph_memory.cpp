#include "runtime/cuda/graph_memory.h"

#include <algorithm>

#include "runtime/cuda/beside_recording.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/memory.h"
#include "runtime/cuda/rank.h"

namespace sherd::cuda {

GraphMemory::GraphMemory(int device) : device_(device) {
  const BesideRecording scope;
  cudaMemPoolProps props{};
  props.allocType = cudaMemAllocationTypePinned;
  props.location = {cudaMemLocationTypeDevice, device};
  check_cuda(cudaMemPoolCreate(&pool_, &props), "cuda graph");
  const cudaError_t made = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  if (made != cudaSuccess) cudaMemPoolDestroy(pool_);
  check_cuda(made, "cuda graph");
}

GraphMemory::~GraphMemory() {
  for (const Block& block : blocks_) cudaFreeAsync(block.data, stream_);
  cudaStreamDestroy(stream_);  // both go when the driver has the blocks
  cudaMemPoolDestroy(pool_);
  cudaGetLastError();
}

void* GraphMemory::take(std::size_t bytes, int lane) {
  Block* best = nullptr;
  for (Block& block : blocks_)
    if (!block.taken && block.lane == lane && block.bytes >= bytes &&
        (best == nullptr || block.bytes < best->bytes))
      best = &block;
  if (best == nullptr) {
    const BesideRecording scope;
    Block made{nullptr, bytes, lane, false};
    const cudaError_t status = cudaMallocFromPoolAsync(&made.data, bytes, pool_, stream_);
    if (status == cudaErrorMemoryAllocation)
      refuse_memory(Device::cuda(device_),
                    fmt::format("{} bytes that a captured step makes on its way", bytes));
    check_cuda(status, "cuda graph");
    best = &blocks_.emplace_back(made);
  }
  best->taken = true;
  return best->data;
}

void GraphMemory::give(void* data) noexcept {
  const auto block = std::ranges::find(blocks_, data, &Block::data);
  if (block != blocks_.end()) block->taken = false;
}

std::size_t GraphMemory::bytes() const {
  std::size_t all = 0;
  for (const Block& block : blocks_) all += block.bytes;
  return all;
}

void GraphMemory::before(cudaStream_t stream) { Event().order(stream_, stream); }

}  // namespace sherd::cuda
