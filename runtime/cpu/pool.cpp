#include "runtime/cpu/pool.h"

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "runtime/bytes_taken.h"
#include "runtime/context.h"
#include "runtime/error.h"
#include "runtime/log.h"

namespace sherd {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool caching = false;  // a cached block would hide a use after free
#else
constexpr bool caching = true;
#endif

constexpr std::size_t huge_page = std::size_t{2} << 20;

[[noreturn]] void refuse(CpuPool& pool, std::size_t bytes) {
  const std::string limit =
      pool.limit() == CpuPool::no_limit
          ? ""
          : fmt::format(", this rank's pool has {} of its limit of {}", pool.system_bytes(), pool.limit());
  fail<OutOfMemoryError>(
      "cpu: no memory for {} bytes{}; use smaller batches or free tensors; tensors of this rank hold {}; its "
      "pool keeps {} for later",
      bytes, limit, pool.ledger().held(DeviceType::cpu).text(),
      bytes_text(static_cast<std::int64_t>(pool.cached_bytes())));
}

/// How many small blocks move from the shelf to the hand at a time.
std::size_t batch_of(std::size_t bytes) { return std::max<std::size_t>(1, (std::size_t{64} << 10) / bytes); }

/// How many blocks to ask the system for beside the one that is wanted. The number of small blocks in use at
/// once varies from step to step with the moment at which peer ranks have read them, and later steps shall
/// ask for none.
std::size_t spares_of(std::size_t bytes) {
  constexpr std::size_t slab = std::size_t{8} << 10;
  return caching && bytes <= 8 * slab ? std::max<std::size_t>(1, slab / bytes) : 0;
}

}  // namespace

/// A free block.
struct CpuPool::Block {
  Block* next;
};

struct CpuPool::SizeClass {
  int index;
  std::size_t bytes;
  bool small() const { return index < hand_classes; }
};

/// The part of a pool that other threads use: its blocks that are not in the hand. A block in use points to
/// its shelf (the word after its capacity), so the shelf outlives the pool until the last block is returned.
struct CpuPool::Shelf {
  std::mutex mutex;
  std::array<Block*, classes> free{};
  std::size_t bytes = 0;
  std::atomic<std::size_t> of_system = 0;  // bytes of all the pool's blocks, wherever they are
  MemoryLedger ledger;
  std::int64_t in_use = 0;  // minus blocks returned here; `end` adds the pool's own count
  bool ended = false;
  Shelf *next = nullptr, *previous = nullptr;  // among all shelves

  static Shelf*& of(void* data, SizeClass c) {
    return *reinterpret_cast<Shelf**>(static_cast<std::byte*>(data) + c.bytes);
  }

  /// Takes back a block in use.
  void take(void* data, SizeClass c) noexcept {
    bool last = false;
    {
      const std::scoped_lock lock(mutex);
      --in_use;
      if (caching && !ended && bytes + c.bytes <= shelf_limit) {
        Block*& head = free[static_cast<std::size_t>(c.index)];
        head = new (std::exchange(data, nullptr)) Block{head};
        bytes += c.bytes;
      }
      last = ended && in_use == 0;
    }
    if (data != nullptr) of_system -= c.bytes;
    std::free(data);
    if (last) forget();
  }
  /// A list of at most `count` free blocks of a class, and their bytes.
  Block* give(SizeClass c, std::size_t count, std::size_t& given) noexcept {
    const std::scoped_lock lock(mutex);
    Block*& head = free[static_cast<std::size_t>(c.index)];
    Block *first = head, *last = nullptr;
    for (; count > 0 && head != nullptr; --count, given += c.bytes, bytes -= c.bytes)
      head = (last = head)->next;
    if (last != nullptr) last->next = nullptr;
    return last != nullptr ? first : nullptr;
  }
  /// Frees what lies here; returns the bytes.
  std::size_t trim() noexcept {
    const std::scoped_lock lock(mutex);
    return free_all();
  }
  /// The pool is being destroyed; its own count of blocks in use was `rest`.
  void end(std::int64_t rest) noexcept {
    bool last = false;
    {
      const std::scoped_lock lock(mutex);
      free_all();
      ended = true;
      in_use += rest;
      last = in_use == 0;
    }
    if (last) forget();  // else `take` of the last block does
  }

  static void free_list(Block*& head) noexcept {
    while (Block* block = head) {
      head = block->next;
      std::free(block);
    }
  }

 private:
  std::size_t free_all() noexcept {
    for (Block*& head : free) free_list(head);
    of_system -= bytes;
    return std::exchange(bytes, 0);
  }
  void forget() noexcept;
};

/// All shelves of the process, for `trim_all`. Never destroyed, because blocks are returned after `main` too.
struct CpuPool::Shelves {
  std::mutex mutex;
  Shelf* first = nullptr;

  void add(Shelf& shelf) {
    const std::scoped_lock lock(mutex);
    shelf.next = first;
    if (first != nullptr) first->previous = &shelf;
    first = &shelf;
  }
  void remove(const Shelf& shelf) noexcept {
    const std::scoped_lock lock(mutex);
    (shelf.previous != nullptr ? shelf.previous->next : first) = shelf.next;
    if (shelf.next != nullptr) shelf.next->previous = shelf.previous;
  }
  std::size_t trim() noexcept {
    const std::scoped_lock lock(mutex);
    std::size_t bytes = 0;
    for (Shelf* shelf = first; shelf != nullptr; shelf = shelf->next) bytes += shelf->trim();
    return bytes;
  }

  /// A child of `fork` has only the thread that called it: no lock may be held by another one then.
  void before_fork() {
    mutex.lock();
    for (Shelf* shelf = first; shelf != nullptr; shelf = shelf->next) shelf->mutex.lock();
  }
  void after_fork() {
    for (Shelf* shelf = first; shelf != nullptr; shelf = shelf->next) shelf->mutex.unlock();
    mutex.unlock();
  }
};

CpuPool::Shelves& CpuPool::shelves() {
  static constinit Shelves all;
  static_assert(std::is_trivially_destructible_v<Shelves>);
  [[maybe_unused]] static const int watched =
      pthread_atfork([] { all.before_fork(); }, [] { all.after_fork(); }, [] { all.after_fork(); });
  return all;
}

void CpuPool::Shelf::forget() noexcept {
  shelves().remove(*this);
  const std::unique_ptr<Shelf> gone(this);
}

/// Number and bytes. 64-byte steps up to 1 KiB (16 classes), then eight steps a power of two.
static std::pair<int, std::size_t> size_class(std::size_t bytes) {
  if (bytes <= 1024) {
    const std::size_t step = bytes == 0 ? 1 : (bytes + 63) / 64;
    return {static_cast<int>(step - 1), step * 64};
  }
  const int log = std::bit_width(bytes - 1) - 1;  // 2^log < bytes <= 2^(log+1)
  const std::size_t step = std::size_t{1} << (log - 3);
  const std::size_t steps = (bytes - (std::size_t{1} << log) + step - 1) / step;  // 1..8
  return {16 + (log - 10) * 8 + static_cast<int>(steps) - 1, (std::size_t{1} << log) + steps * step};
}

CpuPool::SizeClass CpuPool::class_of(std::size_t bytes) {
  const auto [index, rounded] = size_class(bytes);
  return {index, rounded};
}

std::size_t bytes_taken(Device device, std::size_t bytes) {
  if (device.type == DeviceType::meta) return 0;
  return device.is_cpu() ? size_class(bytes).second : std::max<std::size_t>(bytes, 1);
}

/// Null when there is no memory.
void* CpuPool::system_allocate(SizeClass c, Shelf* home) noexcept {
  const bool large = c.bytes >= 2 * huge_page;
  void* data = nullptr;
  if (posix_memalign(&data, large ? huge_page : 64, c.bytes + sizeof(Shelf*)) != 0) return nullptr;
  if (large) madvise(data, c.bytes, MADV_HUGEPAGE);  // advice: failing costs speed only
  Shelf::of(data, c) = home;
  home->of_system += c.bytes;
  return data;
}

CpuPool::CpuPool() : shelf_(std::make_unique<Shelf>().release()), ledger_(&shelf_->ledger) {
  shelves().add(*shelf_);
}

CpuPool::~CpuPool() {
  drop_hand();
  shelf_->end(in_use_);
}

void* CpuPool::allocate(std::size_t& bytes) {
  if (bytes >= std::size_t{1} << 46) [[unlikely]]
    refuse(*this, bytes);
  const SizeClass c = class_of(bytes);
  bytes = c.bytes;
  ++in_use_;
  if (c.small()) {
    Block*& head = hand_[static_cast<std::size_t>(c.index)];
    if (Block* block = head) {
      head = block->next;
      hand_bytes_ -= c.bytes;
      return block;
    }
  }
  return allocate_slowly(c);
}

void* CpuPool::allocate_slowly(SizeClass c) {
  std::size_t given = 0;
  if (Block* block = shelf_->give(c, c.small() ? batch_of(c.bytes) : 1, given)) {
    if (c.small()) {
      hand_[static_cast<std::size_t>(c.index)] = block->next;
      hand_bytes_ += given - c.bytes;
    }
    return block;
  }
  ++system_allocations_;
  void* data = ask_system(c);
  for (std::size_t spares = spares_of(c.bytes); spares > 0 && has_room(c); --spares) {
    void* spare = system_allocate(c, shelf_);
    if (spare == nullptr) break;
    ++in_use_;
    if (!keep_at_hand(spare, c)) {
      shelf_->take(spare, c);
      break;
    }
  }
  return data;
}

bool CpuPool::has_room(SizeClass c) const {
  return limit_ == no_limit || shelf_->of_system + c.bytes <= limit_;
}

/// A new block; before there is none, cached ones are given back.
void* CpuPool::ask_system(SizeClass c) {
  if (!has_room(c)) trim();
  void* data = has_room(c) ? system_allocate(c, shelf_) : nullptr;
  if (data == nullptr && has_room(c)) {
    const std::size_t trimmed = trim_all();
    write_log(LogLevel::warning, "cpu: no memory for {} bytes; all pools gave {} cached bytes back", c.bytes,
              trimmed);
    data = system_allocate(c, shelf_);
  }
  if (data == nullptr) {
    --in_use_;
    refuse(*this, c.bytes);
  }
  return data;
}

bool CpuPool::keep_at_hand(void* data, SizeClass c) noexcept {
  if (!caching || !c.small() || hand_bytes_ + c.bytes > hand_limit) return false;
  Block*& head = hand_[static_cast<std::size_t>(c.index)];
  head = new (data) Block{head};
  hand_bytes_ += c.bytes;
  --in_use_;
  return true;
}

void CpuPool::give_back(void* data, std::size_t bytes) noexcept {
  const SizeClass c = class_of(bytes);
  Shelf* home = Shelf::of(data, c);
  Context* context = Context::current_or_null();
  if (context != nullptr && context->cpu_pool().shelf_ == home && context->cpu_pool().keep_at_hand(data, c))
    return;
  home->take(data, c);
}

std::size_t CpuPool::drop_hand() noexcept {
  for (Block*& head : hand_) Shelf::free_list(head);
  shelf_->of_system -= hand_bytes_;
  return std::exchange(hand_bytes_, 0);
}

void CpuPool::trim() noexcept {
  drop_hand();
  shelf_->trim();
}

std::size_t CpuPool::trim_all() noexcept {
  Context* context = Context::current_or_null();
  const std::size_t bytes = (context != nullptr ? context->cpu_pool().drop_hand() : 0) + shelves().trim();
  malloc_trim(0);  // free() alone keeps small blocks in the process
  return bytes;
}

std::size_t CpuPool::cached_bytes() const {
  const std::scoped_lock lock(shelf_->mutex);
  return hand_bytes_ + shelf_->bytes;
}

std::size_t CpuPool::system_bytes() const { return shelf_->of_system; }

}  // namespace sherd
