// What processes tell each other beside their calls. Notices go over sockets, so that no call under way
// delays them.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "collectives/fault.h"
#include "collectives/offer.h"

namespace sherd::processes {

/// A group: which run of a body it belongs to, and its number there. Unique among the groups of any process.
struct GroupId {
  std::uint32_t run = 0, number = 0;
  friend auto operator<=>(const GroupId&, const GroupId&) = default;
};

/// A sequence of calls of a group: a channel's, or the messages from one rank to another.
struct LineId {
  GroupId group;
  std::int32_t channel = 0, source = -1, destination = -1;
  friend auto operator<=>(const LineId&, const LineId&) = default;
};

/// A rank that waits: for call `sequence` of `line`, or (`renews`) for a peer's renewal of the line's group.
struct Waiter {
  std::int32_t process = 0;
  bool renews = false;
  LineId line{};
  std::uint64_t sequence = 0;
  std::uint64_t wait = 0;      ///< counts what the process has waited for; the same number is the same wait
  std::uint64_t received = 0;  ///< frames and renewals that had come from the one that it waits for
  std::string call{};          ///< that it is in, in words
  std::vector<int> blames{};   ///< ranks of the world at fault in what it had heard, if it renews
};

struct Notice {
  enum class Kind : std::uint8_t {
    departed,  ///< the sender's body of run `group.run` is over; `value`: frames it sent to the reader so
               ///< far; `flag`: and what it had under way is done
    goodbye,   ///< the sender takes part in nothing any more; `value` as above, `flag`: without a fault
    died,      ///< never sent: its connection ended without a goodbye
    report,    ///< a fault of `group`, to the process that decides which one all members throw
    fault,     ///< the decision
    renewal,   ///< the sender wants `group` renewed, because of the fault; `offer`: its first free group
               ///< number and a key
    chain,     ///< each of `waiters` waits for the next, the last one for the reader
    circle,    ///< each of `waiters` waits for the next, the last one for the first
    renewal_fault,  ///< `group` cannot be renewed
  };
  Kind kind = Kind::departed;
  Departure how = Departure::left;
  bool flag = false;
  GroupId group{};
  std::uint64_t sequence = 0, value = 0;
  Offer offer{};
  std::vector<std::int32_t> ranks;    ///< of a fault
  std::vector<std::int32_t> members;  ///< of the group: the processes that a fault is sent to
  std::vector<Waiter> waiters;        ///< of a chain or circle
  std::string text;

  /// Appends this notice to `out`, its length first.
  void write(std::string& out) const;
  /// Reads the first notice of `in` from `at`, which moves behind it. False when it is not complete yet.
  /// Throws StateError when it is malformed.
  static bool read(const std::string& in, std::size_t& at, Notice& notice);
};

}  // namespace sherd::processes
