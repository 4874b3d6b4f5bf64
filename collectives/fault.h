// Faults: why a group cannot go on, in words that are the same on every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/collective.h"

namespace sherd {

/// The CollectiveError that all ranks of a group throw. `ranks`: those at fault, as ranks of the group.
struct Fault {
  std::string text;
  std::vector<int> ranks;
  std::uint64_t sequence = 0;
  /// Throws it.
  [[noreturn]] void raise() const;
};

/// Names a call at the beginning of a message.
struct CallPlace {
  std::string_view group;
  int channel = 0;
  int source = -1, destination = -1;  ///< of a send or recv; else -1
  std::uint64_t sequence = 0;
};

/// The place and the call: "send #0 from rank 0 to rank 1 on channel 0 of group world, send(f32, 4
/// elements)".
std::string describe(const CallPlace& place, const Signature& signature);

/// A rank and the call that it posted, or waits in.
struct RankCall {
  int rank;
  const Signature& signature;
};

/// The fault of two ranks that posted different calls at one place.
Fault mismatch(const CallPlace& place, RankCall one, RankCall other);

enum class Departure : std::uint8_t { left, threw, died };
/// The fault of a `rank` that is gone and never posted its part of the call that `waiting` is in. `reason`:
/// what it threw, or how its process ended. `last`: its last call in this group.
Fault departed(const CallPlace& place, int rank, Departure how, std::string_view reason,
               const std::optional<Signature>& last, RankCall waiting);

/// A rank in a circle of waiting: cycle[i] is in a call that only cycle[i + 1] could complete, the last in
/// one that only the first could.
struct Blocked {
  int world_rank;
  std::string call;
};
/// The fault of ranks that wait for each other in a circle. `ranks`: those of them that are in this group.
Fault deadlock(const CallPlace& place, std::vector<int> ranks, const std::vector<Blocked>& cycle);

}  // namespace sherd
