// Working memory of one tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace sherd::cpu {

/// Memory that is kept by the thread that gave it back, for its next call: fresh pages from the system cost
/// more than small tiles compute. Null without memory.
void* take_scratch(std::size_t bytes) noexcept;
void give_scratch_back(void* p) noexcept;

struct FreeMemory {
  void operator()(void* p) const { give_scratch_back(p); }
};
template <class T>
using Scratch = std::unique_ptr<T[], FreeMemory>;

/// `count` uninitialised elements, aligned to 64 bytes. Null without memory; the caller throws, since it
/// knows what for.
template <class T>
Scratch<T> scratch(std::int64_t count) noexcept {
  return Scratch<T>(static_cast<T*>(take_scratch(static_cast<std::size_t>(count) * sizeof(T))));
}

}  // namespace sherd::cpu
