#include "runtime/cpu/pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

#include "runtime/context.h"
#include "runtime/error.h"

namespace sherd {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool caching = false;  // a cached block would hide a use after free
#else
constexpr bool caching = true;
#endif

constexpr std::size_t huge_page = std::size_t{2} << 20;
/// How many blocks to ask for beside the one that is wanted. How many small ones live at once varies from
/// step to step with the moment at which peers have read them.
std::size_t spares_of(std::size_t bytes) {
  constexpr std::size_t slab = std::size_t{8} << 10;
  return bytes <= 8 * slab ? std::max<std::size_t>(1, slab / bytes) : 0;
}

struct SizeClass {
  int index;
  std::size_t bytes;
};

/// 64-byte steps up to 1 KiB (16 classes), then eight steps a power of two.
SizeClass class_of(std::size_t bytes) {
  if (bytes <= 1024) {
    const std::size_t step = bytes == 0 ? 1 : (bytes + 63) / 64;
    return {static_cast<int>(step - 1), step * 64};
  }
  const int log = std::bit_width(bytes - 1) - 1;  // 2^log < bytes <= 2^(log+1)
  const std::size_t step = std::size_t{1} << (log - 3);
  const std::size_t steps = (bytes - (std::size_t{1} << log) + step - 1) / step;  // 1..8
  return {16 + (log - 10) * 8 + static_cast<int>(steps) - 1, (std::size_t{1} << log) + steps * step};
}

void* system_allocate(std::size_t bytes) {
  const bool large = bytes >= 2 * huge_page;
  void* data = nullptr;
  if (posix_memalign(&data, large ? huge_page : 64, bytes) != 0)
    fail<OutOfMemoryError>("cpu: no memory for {} bytes", bytes);
  if (large) madvise(data, bytes, MADV_HUGEPAGE);  // advice: failing costs speed only
  return data;
}

}  // namespace

CpuPool::~CpuPool() { trim(); }

void* CpuPool::allocate(std::size_t& bytes) {
  check<OutOfMemoryError>(bytes < (std::size_t{1} << 46), "cpu: no memory for {} bytes", bytes);
  const SizeClass c = class_of(bytes);
  bytes = c.bytes;
  if (Block* block = free_[static_cast<std::size_t>(c.index)]) {
    free_[static_cast<std::size_t>(c.index)] = block->next;
    cached_bytes_ -= bytes;
    return block;
  }
  ++system_allocations_;
  for (std::size_t spares = caching ? spares_of(bytes) : 0; spares > 0; --spares)
    deallocate(system_allocate(bytes), bytes);
  return system_allocate(bytes);
}

void CpuPool::deallocate(void* data, std::size_t bytes) noexcept {
  const SizeClass c = class_of(bytes);
  if (!caching || cached_bytes_ + c.bytes > cache_limit) return std::free(data);
  Block*& head = free_[static_cast<std::size_t>(c.index)];
  head = new (data) Block{head};
  cached_bytes_ += c.bytes;
}

void CpuPool::trim() noexcept {
  for (Block*& head : free_)
    while (Block* block = head) {
      head = block->next;
      std::free(block);
    }
  cached_bytes_ = 0;
}

void CpuPool::give_back(void* data, std::size_t bytes) noexcept {
  if (Context* context = Context::current_or_null())
    context->cpu_pool().deallocate(data, bytes);
  else
    std::free(data);
}

}  // namespace sherd
