#include "autograd/capture/packing.h"

#include <algorithm>
#include <numeric>

namespace sherd {

Packing pack(std::span<const Lifetime> lives, std::size_t alignment) {
  Packing packing{std::vector<std::size_t>(lives.size(), 0)};
  const auto aligned = [&](std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; };
  std::vector<std::uint32_t> order(lives.size()), placed;  // `placed` by offset
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](std::uint32_t i) { return lives[i].bytes; });
  const auto offset = [&](std::uint32_t i) { return packing.offsets[i]; };
  for (const std::uint32_t i : order) {
    const Lifetime& own = lives[i];
    if (own.bytes == 0) break;
    std::size_t at = 0;
    for (const std::uint32_t other : placed) {
      const Lifetime& its = lives[other];
      if (its.end < own.begin || own.end < its.begin) continue;
      if (offset(other) >= at + own.bytes) break;
      at = std::max(at, aligned(offset(other) + its.bytes));
    }
    packing.offsets[i] = at;
    packing.bytes = std::max(packing.bytes, at + own.bytes);
    placed.insert(std::ranges::upper_bound(placed, at, {}, offset), i);
  }
  return packing;
}

}  // namespace sherd
