// Small blocks of device memory that a rank freed and will want again: asking the driver costs as much as
// launching a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <bit>
#include <cstddef>
#include <vector>

#include "runtime/cuda/memory.h"

namespace sherd::cuda {

/// Freed blocks of one stream, by size. Whoever frees has waited for what other streams do with a block, and
/// work of this stream comes in order, so a block is used again at once. Not for blocks of a recording, which
/// are the recording's own, nor for those that another rank took from the driver: they would pile up here.
/// Other ranks cannot get what is kept, so it is bounded.
class BlockCache {
 public:
  explicit BlockCache(cudaStream_t stream) : stream_(stream) {}
  ~BlockCache() { trim(); }
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  /// What is asked of the driver for `bytes`: small sizes have few classes.
  static std::size_t rounded(std::size_t bytes) {
    return bytes > largest ? bytes : std::bit_ceil(bytes < smallest ? smallest : bytes);
  }
  /// A block for `bytes`, or null.
  void* take(std::size_t bytes) {
    if (bytes > largest || blocks_[index_of(bytes)].empty()) return nullptr;
    std::vector<void*>& list = blocks_[index_of(bytes)];
    void* block = list.back();
    list.pop_back();
    kept_ -= rounded(bytes);
    return block;
  }
  /// False where the block is not kept.
  bool keep(void* block, std::size_t bytes) {
    if (bytes > largest || kept_ + rounded(bytes) > most) return false;
    kept_ += rounded(bytes);
    blocks_[index_of(bytes)].push_back(block);
    return true;
  }
  /// Gives all back to the driver.
  void trim() noexcept {
    for (std::vector<void*>& list : blocks_) {
      for (void* block : list) free_block(block, stream_);
      list.clear();
    }
    kept_ = 0;
  }

  /// The most bytes that are kept.
  static constexpr std::size_t most = std::size_t{256} << 20;

 private:
  static constexpr std::size_t smallest = 512, largest = std::size_t{1} << 20;
  static std::size_t index_of(std::size_t bytes) {
    return static_cast<std::size_t>(std::countr_zero(rounded(bytes)) - std::countr_zero(smallest));
  }
  cudaStream_t stream_;
  std::size_t kept_ = 0;
  std::array<std::vector<void*>, 12> blocks_;  // 512 bytes to 1 MiB
};

}  // namespace sherd::cuda
