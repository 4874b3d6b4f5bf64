// The caching allocator of one rank for CPU memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "runtime/export.h"

namespace sherd {

/// Size classes (64-byte steps up to 1 KiB, then eight a doubling), each a stack of free blocks. Belongs to
/// one thread at a time, so it needs no lock; a block may be given back to another thread's pool than it came
/// from. Large blocks stay mapped: getting fresh pages from the kernel costs more than writing them.
class SHERD_API CpuPool {
 public:
  CpuPool() = default;
  CpuPool(const CpuPool&) = delete;
  CpuPool& operator=(const CpuPool&) = delete;
  ~CpuPool();

  /// At least `bytes`, 64-byte aligned; `bytes` becomes the capacity. Throws OutOfMemoryError.
  void* allocate(std::size_t& bytes);
  /// `bytes` is the capacity that `allocate` gave.
  void deallocate(void* data, std::size_t bytes) noexcept;
  /// Gives every cached block back to the system.
  void trim() noexcept;

  std::size_t cached_bytes() const { return cached_bytes_; }
  /// Requests that went to the system since the start; zero growth is the goal of a steady step.
  std::uint64_t system_allocations() const { return system_allocations_; }

  /// Deallocates into the calling thread's pool, or to the system when the thread has none any more.
  static void give_back(void* data, std::size_t bytes) noexcept;

 private:
  struct Block {
    Block* next;
  };
  static constexpr int classes = 512;
  static constexpr std::size_t cache_limit = std::size_t{8} << 30;

  std::array<Block*, classes> free_{};
  std::size_t cached_bytes_ = 0;
  std::uint64_t system_allocations_ = 0;
};

}  // namespace sherd
