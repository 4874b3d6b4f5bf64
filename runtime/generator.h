// The random state of a rank: a seed and a position in its stream. Random ops hold both as fields, so an op
// that runs again draws the same numbers.
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

/// The seed of stream number `stream` among those that belong to `seed`; stream 0 has `seed` itself. A hash
/// (Philox), so that streams of different seeds are unrelated: with `seed + stream`, stream 1 of one seed
/// would be stream 0 of the next.
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
  /// The key of the next `elements` 32-bit words, rounded up to whole counter steps; the generator moves past
  /// them.
  RandomKey reserve(std::int64_t elements) {
    const RandomKey key = state_;
    state_.offset += (static_cast<std::uint64_t>(elements) + 3) / 4;
    return key;
  }

 private:
  RandomKey state_;
};

}  // namespace sherd
