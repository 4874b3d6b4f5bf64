#include "runtime/cuda/staging.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "runtime/cuda/check.h"
#include "runtime/cuda/waiting.h"
#include "runtime/parallel.h"

namespace sherd::cuda {
namespace {

/// By all threads of the rank.
void copy_on_host(void* to, const void* from, std::size_t bytes) {
  constexpr std::int64_t block = 128 << 10;
  const auto all = static_cast<std::int64_t>(bytes);
  parallel_for((all + block - 1) / block, 1, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * block, last = std::min(end * block, all);
    std::memcpy(static_cast<std::byte*>(to) + first, static_cast<const std::byte*>(from) + first,
                static_cast<std::size_t>(last - first));
  });
}

}  // namespace

Staging::~Staging() {
  for (const Slot& slot : slots_) {
    if (slot.done != nullptr) cudaEventDestroy(slot.done);
    if (slot.memory != nullptr) cudaFreeHost(slot.memory);
  }
}

Staging::Slot* Staging::take() {
  for (std::size_t looked = 0; looked < slots_.size(); ++looked) {
    Slot& slot = slots_[next_];
    next_ = (next_ + 1) % slots_.size();
    if (slot.holds) continue;
    if (slot.memory == nullptr) check_cuda(cudaMallocHost(&slot.memory, slot_bytes), "cuda copy");
    if (slot.done == nullptr)
      check_cuda(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming), "cuda copy");
    wait_for(slot.done, "cuda copy");  // returns at once before the first record
    if (!slot.holds) return &slot;
  }
  return nullptr;
}

void Staging::copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  for (std::size_t at = 0; at < bytes; at += slot_bytes) {
    const std::size_t size = std::min(slot_bytes, bytes - at);
    const void* begin = static_cast<const std::byte*>(from) + at;
    Slot* const slot = take();
    if (slot != nullptr) copy_on_host(slot->memory, begin, size);
    check_cuda(cudaMemcpyAsync(static_cast<std::byte*>(to) + at, slot != nullptr ? slot->memory : begin, size,
                               cudaMemcpyHostToDevice, stream),
               "cuda copy");
    if (slot != nullptr)
      check_cuda(cudaEventRecord(slot->done, stream), "cuda copy");
    else
      wait_for(stream, "cuda copy");
  }
}

void Staging::read(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  struct Coming {
    Coming(Slot& slot, std::size_t at) : slot(slot), at(at) { slot.holds = true; }
    ~Coming() { slot.holds = false; }
    Coming(const Coming&) = delete;
    Coming& operator=(const Coming&) = delete;
    Slot& slot;
    std::size_t at;
  };
  constexpr std::size_t ahead = 2;  // so that there are slots for a copy within this one
  std::deque<Coming> coming;
  const auto from_at = [&](std::size_t at) { return static_cast<const std::byte*>(from) + at; };
  const auto to_at = [&](std::size_t at) { return static_cast<std::byte*>(to) + at; };
  for (std::size_t at = 0; at < bytes || !coming.empty();) {
    if (at < bytes && coming.size() < ahead) {
      if (Slot* const slot = take()) {
        coming.emplace_back(*slot, at);
        check_cuda(cudaMemcpyAsync(slot->memory, from_at(at), std::min(slot_bytes, bytes - at),
                                   cudaMemcpyDeviceToHost, stream),
                   "cuda read");
        check_cuda(cudaEventRecord(slot->done, stream), "cuda read");
        at += slot_bytes;
        continue;
      }
      if (coming.empty()) {
        wait_for(stream, "cuda read");  // the driver would, and this rank's other calls not go on
        check_cuda(cudaMemcpyAsync(to_at(at), from_at(at), bytes - at, cudaMemcpyDeviceToHost, stream),
                   "cuda read");
        wait_for(stream, "cuda read");
        return;
      }
    }
    const Coming& oldest = coming.front();
    wait_for(oldest.slot.done, "cuda read");
    copy_on_host(to_at(oldest.at), oldest.slot.memory, std::min(slot_bytes, bytes - oldest.at));
    coming.pop_front();
  }
}

}  // namespace sherd::cuda
