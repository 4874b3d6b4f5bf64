#include "runtime/cuda/staging.h"

#include <algorithm>
#include <cstring>

#include "runtime/cuda/check.h"
#include "runtime/cuda/waiting.h"

namespace sherd::cuda {

Staging::~Staging() {
  for (const Slot& slot : slots_) {
    if (slot.read != nullptr) cudaEventDestroy(slot.read);
    if (slot.memory != nullptr) cudaFreeHost(slot.memory);
  }
}

void Staging::copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  for (std::size_t at = 0; at < bytes; at += slot_bytes) {
    Slot& slot = slots_[next_];
    next_ = (next_ + 1) % slots_.size();
    if (slot.memory == nullptr) check_cuda(cudaMallocHost(&slot.memory, slot_bytes), "cuda copy");
    if (slot.read == nullptr)
      check_cuda(cudaEventCreateWithFlags(&slot.read, cudaEventDisableTiming), "cuda copy");
    wait_for(slot.read, "cuda copy");  // returns at once before the first record
    const std::size_t size = std::min(slot_bytes, bytes - at);
    std::memcpy(slot.memory, static_cast<const std::byte*>(from) + at, size);
    check_cuda(
        cudaMemcpyAsync(static_cast<std::byte*>(to) + at, slot.memory, size, cudaMemcpyHostToDevice, stream),
        "cuda copy");
    check_cuda(cudaEventRecord(slot.read, stream), "cuda copy");
  }
}

}  // namespace sherd::cuda
