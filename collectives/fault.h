// Faults: why a group cannot go on, in words that are the same on every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/collective.h"

namespace sherd {

/// The CollectiveError that all ranks of a group throw. `ranks`: those at fault, as ranks of the world, so
/// that a rank that leaves because of it can say in another group whose fault it was.
struct Fault {
  std::string text;
  std::vector<int> ranks;
  std::uint64_t sequence = 0;
  /// Throws it in the group of these ranks of the world. A rank at fault that is not in the group is in the
  /// text only.
  [[noreturn]] void raise(std::span<const int> world_ranks) const;
};

/// Names a call at the beginning of a message.
struct CallPlace {
  std::string_view group;
  std::span<const int> world_ranks;  ///< of the group's ranks
  int channel = 0;
  int source = -1, destination = -1;  ///< of a send or recv; else -1
  std::uint64_t sequence = 0;
};

/// The place and the call: "send #0 from rank 0 to rank 1 on channel 0 of group world, send(f32, 4
/// elements)".
std::string describe(const CallPlace& place, const Signature& signature);
/// What a rank is in that waits in `renew`. `heard`: the fault that made it renew; null if it had heard none.
std::string describe_renewal(std::string_view group, const Fault* heard);

/// A rank of the group and the call that it posted, or waits in.
struct RankCall {
  int rank;
  const Signature* signature;
};

/// The fault of ranks that posted different calls at one place. `posts`: all that have come, in rank order.
/// The call that most of them posted counts as right and the other ranks are at fault; where no call has
/// most, nobody can tell, and all are. The text has every call and who posted it.
Fault mismatch(const CallPlace& place, std::span<const RankCall> posts);

enum class Departure : std::uint8_t { left, threw, died };
/// How a rank left, in words for messages: "left the body", "threw "..."", "died (...)". `reason`: what it
/// threw, or how its process ended. `heard`: the fault that it was told of before, if there was one.
std::string parting(Departure how, std::string_view reason, const Fault* heard);

/// A rank of the group that is gone.
struct Leaver {
  int rank;
  Departure how;
  std::string_view parting;
  std::span<const int> blames;          ///< ranks of the world at fault in what it had heard
  const std::optional<Signature> last;  ///< its last call in this group
};
/// The fault of a rank that is gone and never posted its part of the call that `waiting` is in. `made` and
/// `missed`: how many ranks have made the call, and how many left without it and blame nobody. At fault is
/// whom the leaver blames; else the leaver, or, if it just returned, whichever of the two are fewer (all
/// where they are as many), `waiting` standing for those that made it.
Fault departed(const CallPlace& place, const Leaver& leaver, RankCall waiting, std::size_t made,
               std::size_t missed);

/// The fault of a group in which the call `signature` of `rank` could not be moved to or from `peer`: nothing
/// gives a hint which of them is at fault. `failure`: what failed and why.
Fault not_moved(const CallPlace& place, RankCall call, int peer, std::string_view failure);

/// The fault of a group in which `call.rank`'s device could not move its part. `failure`: what it says.
Fault device_failed(const CallPlace& place, RankCall call, std::string_view failure);

/// The fault of a group that `rank` renews. `heard`: the fault that made it do so; null if it had heard none.
Fault renewing(std::string_view group, std::span<const int> world_ranks, int rank, const Fault* heard);

/// A rank in a circle of waiting: cycle[i] is in a call that only cycle[i + 1] could complete, the last in
/// one that only the first could.
struct Blocked {
  int world_rank;
  std::string call;
  std::vector<int> blames{};  ///< ranks of the world at fault in what it had heard, if it renews
};
/// The fault of ranks that wait for each other in a circle: of those whom they blame, or else of them all.
Fault deadlock(const CallPlace& place, std::span<const Blocked> cycle);

}  // namespace sherd
