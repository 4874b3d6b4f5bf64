// What one launch over a list works on. Safe to include in device code.
#pragma once

#include <cstdint>

namespace sherd::cuda {

/// What one launch works on, `n` elements each: at most `most`, longer lists take several launches. Blocks
/// take chunks of them (slots.cuh).
template <class Slot, int most_slots>
struct Slots {
  static constexpr int most = most_slots;
  /// Elements that a block takes.
  static constexpr std::int64_t chunk = 1 << 14;
  int count = 0;
  std::int64_t first_chunk[most + 1] = {};  ///< of each slot, and the number of all
  Slot slot[most];

  void add(const Slot& next) {
    slot[count] = next;
    first_chunk[count + 1] = first_chunk[count] + (next.n + chunk - 1) / chunk;
    ++count;
  }
  unsigned blocks() const { return static_cast<unsigned>(first_chunk[count]); }
};

}  // namespace sherd::cuda
