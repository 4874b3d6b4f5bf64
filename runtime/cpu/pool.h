// The caching allocator of one rank for CPU memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "runtime/export.h"
#include "runtime/memory.h"

namespace sherd {

/// Keeps freed blocks by size class (64-byte steps up to 1 KiB, then eight a doubling). A block belongs to
/// the pool that asked the system for it and returns to that pool from whatever thread frees it, so a pool
/// never holds more than its own rank once used; when the pool is gone, the block goes to the system. Free
/// small blocks lie in the "hand", which the rank's own thread uses without a lock; large ones, and those
/// that other threads returned, on a "shelf" with a lock. Large blocks stay mapped, because getting fresh
/// pages from the kernel costs more than writing them.
class SHERD_API CpuPool {
 public:
  CpuPool();
  CpuPool(const CpuPool&) = delete;
  CpuPool& operator=(const CpuPool&) = delete;
  /// Gives all cached blocks back to the system. Blocks in use stay valid.
  ~CpuPool();

  /// A block of at least `bytes`, aligned to 64 bytes; `bytes` becomes its capacity. Own thread only. When
  /// the system has no memory, all pools give back their cached blocks before it is asked again; when the
  /// limit is reached, this one does. Then OutOfMemoryError.
  void* allocate(std::size_t& bytes);
  /// Returns a block to its pool, from any thread; `bytes` is the capacity that `allocate` gave.
  static void give_back(void* data, std::size_t bytes) noexcept;

  /// Gives every cached block back to the system. Own thread only.
  void trim() noexcept;
  /// The same for all pools of the process, from any thread; the hands of other threads (at most 4 MiB each)
  /// stay as they are. Returns the number of bytes given back.
  static std::size_t trim_all() noexcept;

  /// Bytes of cached blocks. Own thread only.
  std::size_t cached_bytes() const;
  /// Bytes that this pool has of the system: blocks in use and cached ones.
  std::size_t system_bytes() const;
  /// The most that it may have of the system; as much as there is unless it is set. Own thread only. A limit
  /// below what is in use refuses the next block that is not cached, and ends no block.
  std::size_t limit() const { return limit_; }
  void set_limit(std::size_t bytes) { limit_ = bytes; }
  static constexpr std::size_t no_limit = ~std::size_t{0};
  /// What storages of this pool's rank hold. Stays as long as a block of the pool is in use.
  MemoryLedger& ledger() { return *ledger_; }
  /// Number of calls of `allocate` that had to ask the system so far; a steady training step adds none.
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
  void* ask_system(SizeClass c);
  bool has_room(SizeClass c) const;
  bool keep_at_hand(void* data, SizeClass c) noexcept;
  std::size_t drop_hand() noexcept;

  std::array<Block*, hand_classes> hand_{};
  std::size_t hand_bytes_ = 0;
  std::int64_t in_use_ = 0;  // blocks given out minus blocks returned to the hand
  std::uint64_t system_allocations_ = 0;
  std::size_t limit_ = no_limit;
  Shelf* shelf_;          // outlives the pool until its last block in use is returned
  MemoryLedger* ledger_;  // the shelf's
};

}  // namespace sherd
