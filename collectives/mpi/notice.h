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

namespace sherd::mpi {

/// A group: which run of a body it belongs to, and its number there. Unique among the groups of any process.
struct GroupId {
  std::uint32_t run = 0, number = 0;
  friend auto operator<=>(const GroupId&, const GroupId&) = default;
};

struct Notice {
  enum class Kind : std::uint8_t {
    departed,  ///< the sender's body of run `group.run` is over; `value`: frames it sent to the reader so
               ///< far; `flag`: and what it had under way is done
    goodbye,   ///< the sender takes part in nothing any more; `value` as above, `flag`: without a fault
    died,      ///< never sent: its connection ended without a goodbye
    report,    ///< a fault of `group`, to the process that decides which one all members throw
    fault,     ///< the decision
    renewal,   ///< the sender wants `group` renewed, because of the fault; `value`: its first free group
               ///< number
  };
  Kind kind = Kind::departed;
  Departure how = Departure::left;
  bool flag = false;
  GroupId group{};
  std::uint64_t sequence = 0, value = 0;
  std::vector<std::int32_t> ranks;    ///< of a fault
  std::vector<std::int32_t> members;  ///< of the group: the processes that a fault is sent to
  std::string text;

  /// Appends this notice to `out`, its length first.
  void write(std::string& out) const;
  /// Reads the first notice of `in` from `at`, which moves behind it. False when it is not complete yet.
  /// Throws StateError when it is malformed.
  static bool read(const std::string& in, std::size_t& at, Notice& notice);
};

}  // namespace sherd::mpi
