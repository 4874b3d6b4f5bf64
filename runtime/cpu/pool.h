// The caching allocator of one rank for CPU memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "runtime/export.h"

namespace sherd {

/// Free blocks by size class (64-byte steps up to 1 KiB, then eight a doubling). A block belongs to the pool
/// that asked the system for it and comes back to that pool from whatever thread frees it, so a pool never
/// holds more than its own rank once used; when the pool has ended, the block goes to the system. Small
/// blocks lie at hand of the rank's own thread, which takes and returns them without a lock. Large blocks,
/// and those that other threads returned, lie on a shelf with a lock. They stay mapped: getting fresh pages
/// from the kernel costs more than writing them.
class SHERD_API CpuPool {
 public:
  CpuPool();
  CpuPool(const CpuPool&) = delete;
  CpuPool& operator=(const CpuPool&) = delete;
  /// Everything that is cached goes back to the system. Blocks in use stay valid.
  ~CpuPool();

  /// At least `bytes`, 64-byte aligned; `bytes` becomes the capacity. Own thread only. When the system has no
  /// more, all pools give theirs back before it is asked again; then throws OutOfMemoryError.
  void* allocate(std::size_t& bytes);
  /// Returns a block to its pool, from any thread; `bytes` is the capacity that `allocate` gave.
  static void give_back(void* data, std::size_t bytes) noexcept;

  /// Gives every cached block back to the system. Own thread only.
  void trim() noexcept;
  /// The same for all pools of the process, from any thread; small blocks at hand of other threads (at most
  /// 4 MiB each) stay there. Returns the bytes that were given back.
  static std::size_t trim_all() noexcept;

  /// Bytes of free blocks. Own thread only.
  std::size_t cached_bytes() const;
  /// Requests that went to the system since the start; zero growth is the goal of a steady step.
  std::uint64_t system_allocations() const { return system_allocations_; }

 private:
  struct Block;
  struct Shelf;
  struct Shelves;
  struct SizeClass;
  static constexpr int classes = 512;
  static constexpr int hand_classes = 64;  // up to 64 KiB
  static constexpr std::size_t hand_limit = std::size_t{4} << 20;
  static constexpr std::size_t shelf_limit = std::size_t{8} << 30;

  static SizeClass class_of(std::size_t bytes);
  static Shelves& shelves();
  static void* system_allocate(SizeClass c, Shelf* home) noexcept;
  void* allocate_slowly(SizeClass c);
  bool keep_at_hand(void* data, SizeClass c) noexcept;
  std::size_t drop_hand() noexcept;

  std::array<Block*, hand_classes> hand_{};
  std::size_t hand_bytes_ = 0;
  std::int64_t in_use_ = 0;  // blocks given out less blocks that came back to the hand
  std::uint64_t system_allocations_ = 0;
  Shelf* shelf_;  // stays behind until the last block in use has come back
};

}  // namespace sherd
