// Where the random numbers of a replayed step come from. An op keeps the key that it drew with when the step
// was captured; a replay draws elsewhere, and kernels ask here.
#pragma once

#include "runtime/generator.h"

namespace sherd {

/// The numbers that a captured step drew, and where the replay under way draws its own. One a rank, in a slot
/// of its Context; outside a replay it covers nothing.
struct RandomReplay {
  RandomKey first{};      ///< of the captured step
  std::uint64_t end = 0;  ///< the offset after its last
  RandomKey start{};      ///< of the replay
  /// While a device records the step: where the device will find `start`. The host's is not set then.
  const RandomKey* on_device = nullptr;

  bool covers(RandomKey key) const {
    return key.seed == first.seed && key.offset >= first.offset && key.offset < end;
  }
};

/// The rank's.
SHERD_API RandomReplay& random_replay();

/// The key that a kernel draws with, for an op that holds `key`.
SHERD_API RandomKey key_to_draw(RandomKey key);

/// A scope of one replay.
class SHERD_API ReplayingRandom {
 public:
  explicit ReplayingRandom(const RandomReplay& replay);
  ~ReplayingRandom();
  ReplayingRandom(const ReplayingRandom&) = delete;
  ReplayingRandom& operator=(const ReplayingRandom&) = delete;

 private:
  RandomReplay outer_;
};

}  // namespace sherd
