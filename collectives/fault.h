// Why a group ended: the evidence, in words that every rank throws alike.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/collective.h"

namespace sherd {

/// What all ranks of the group throw. Ranks are the group's.
struct Fault {
  std::string text;
  std::vector<int> ranks;
  std::uint64_t sequence = 0;
  [[noreturn]] void raise() const;
};

/// Which call, for the opening of a message.
struct CallPlace {
  std::string_view group;
  int channel = 0;
  int source = -1, destination = -1;  ///< of a message
  std::uint64_t sequence = 0;
};

/// The text with a space for every line break and other control character: what users named, or threw, may
/// have them, and a message is one line.
std::string one_line(std::string text);

/// The place and the call: "send #0 from rank 0 to rank 1 on channel 0 of group world, send(f32, 4
/// elements)".
std::string describe(const CallPlace& place, const Signature& signature);

/// One rank's part in a call.
struct RankCall {
  int rank;
  const Signature& signature;
};

/// Two ranks posted different calls.
Fault mismatch(const CallPlace& place, RankCall one, RankCall other);

enum class Departure : std::uint8_t { left, threw, died };
/// `rank` is gone and never posted what `waiting` is in. `reason`: what it threw, or how its process ended.
/// `last`: its last call here.
Fault departed(const CallPlace& place, int rank, Departure how, std::string_view reason,
               const std::optional<Signature>& last, RankCall waiting);

/// `cycle[i]` is in a call that only `cycle[i+1]` could complete, and the last waits for the first.
struct Blocked {
  int world_rank;
  std::string call;
};
/// `ranks`: those of the group that are in it.
Fault deadlock(const CallPlace& place, std::vector<int> ranks, const std::vector<Blocked>& cycle);

}  // namespace sherd
