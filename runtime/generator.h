// The random state of a rank: a key and a position. Random ops take both by value, so they can be run again.
#pragma once

#include <cstdint>

#include "runtime/export.h"

namespace sherd {

/// Where a random op starts reading the counter-based stream (Philox 4x32-10): four 32-bit words a counter
/// step.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  friend bool operator==(const RandomKey&, const RandomKey&) = default;
};

/// The seed of one of the many streams that `seed` names; stream 0 is its own. Streams of different seeds are
/// unrelated, unlike those of `seed + stream`, where stream 1 of a seed is stream 0 of the next.
SHERD_API std::uint64_t derived_seed(std::uint64_t seed, std::uint64_t stream);

/// Hands out disjoint pieces of one stream.
class Generator {
 public:
  static constexpr std::uint64_t default_seed = 67280421310721;

  explicit Generator(std::uint64_t seed = default_seed) : state_{seed, 0} {}
  explicit Generator(RandomKey state) : state_(state) {}
  void seed(std::uint64_t seed) { state_ = {seed, 0}; }
  RandomKey state() const { return state_; }
  void set_state(RandomKey state) { state_ = state; }
  /// A key for `elements` words; the generator moves past them.
  RandomKey reserve(std::int64_t elements) {
    const RandomKey key = state_;
    state_.offset += (static_cast<std::uint64_t>(elements) + 3) / 4;
    return key;
  }

 private:
  RandomKey state_;
};

}  // namespace sherd
