// Lists of tensors laid end to end and cut into fixed tiles, which threads share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/parallel.h"

namespace sherd::cpu {

inline constexpr std::int64_t chunk = 1 << 14;  // elements of one tile, counted over the whole list

/// Calls `body(slot, begin, end, tile)` for the pieces of the list's elements laid end to end that each tile
/// covers.
template <class Slot, class F>
void for_elements(std::span<const Slot> slots, const F& body) {
  std::vector<std::int64_t> starts{0};
  starts.reserve(slots.size() + 1);
  for (const Slot& s : slots) starts.push_back(starts.back() + static_cast<std::int64_t>(s.size()));
  parallel_for(starts.back(), chunk, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t tile = begin / chunk;
    auto i =
        static_cast<std::size_t>(std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin()) - 1;
    for (; begin < end; ++i) {
      const std::int64_t stop = std::min(end, starts[i + 1]);
      if (begin < stop) body(slots[i], begin - starts[i], stop - starts[i], tile);
      begin = stop;
    }
  });
}

template <class Slot>
std::int64_t tile_count(std::span<const Slot> slots) {
  std::int64_t n = 0;
  for (const Slot& s : slots) n += static_cast<std::int64_t>(s.size());
  return (n + chunk - 1) / chunk;
}

}  // namespace sherd::cpu
