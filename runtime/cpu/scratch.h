// Working memory of one tile.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace sherd::cpu {

struct FreeMemory {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Scratch = std::unique_ptr<T[], FreeMemory>;

/// `count` uninitialised elements, aligned to 64 bytes. Null without memory; the caller throws, since it
/// knows what for.
template <class T>
Scratch<T> scratch(std::int64_t count) noexcept {
  const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
  return Scratch<T>(static_cast<T*>(std::aligned_alloc(64, bytes > 0 ? bytes : 64)));
}

}  // namespace sherd::cpu
