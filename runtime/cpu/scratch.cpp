#include "runtime/cpu/scratch.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

namespace sherd::cpu {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool keeping = false;  // a kept block would hide a use after free
#else
constexpr bool keeping = true;
#endif

/// Before each block, in a line of its own.
struct alignas(64) Header {
  std::size_t bytes;
};

/// Whether the thread has let go of what it kept: other objects of the thread may end later, and use scratch.
/// It has no destructor, so it may be looked at then.
thread_local bool kept_no_more = false;

/// A thread's blocks that nobody uses.
class Kept {
 public:
  ~Kept() {
    kept_no_more = true;
    for (Header* block : blocks_) std::free(block);
  }

  Header* take(std::size_t bytes) {
    Header** best = nullptr;
    for (Header*& block : blocks_)
      if (block && block->bytes >= bytes && (!best || block->bytes < (*best)->bytes)) best = &block;
    return best ? std::exchange(*best, nullptr) : nullptr;
  }
  /// Keeps it in the place of the smallest, if it is larger; returns what is left over.
  Header* keep(Header* block) {
    if (block->bytes > most) return block;
    Header** const least = std::min_element(
        blocks_.begin(), blocks_.end(), [](const Header* a, const Header* b) { return size(a) < size(b); });
    return size(*least) < block->bytes ? std::exchange(*least, block) : block;
  }

 private:
  static constexpr std::size_t most = std::size_t{2} << 20;
  static std::size_t size(const Header* block) { return block ? block->bytes : 0; }
  std::array<Header*, 4> blocks_{};
};

/// Null where nothing is kept.
Kept* kept() {
  if (!keeping || kept_no_more) return nullptr;
  static thread_local Kept blocks;
  return &blocks;
}

}  // namespace

void* take_scratch(std::size_t bytes) noexcept {
  bytes = (bytes + 63) / 64 * 64;
  Kept* const here = kept();
  Header* block = here ? here->take(bytes) : nullptr;
  if (!block) {
    block = static_cast<Header*>(std::aligned_alloc(64, sizeof(Header) + bytes));
    if (!block) return nullptr;
    block->bytes = bytes;
  }
  return block + 1;
}

void give_scratch_back(void* p) noexcept {
  Header* const block = static_cast<Header*>(p) - 1;
  Kept* const here = kept();
  std::free(here ? here->keep(block) : block);
}

}  // namespace sherd::cpu
