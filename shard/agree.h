// One end for all ranks of what each does for itself.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "collectives/group.h"
#include "runtime/export.h"

namespace sherd::shard {

/// Beside its type what `together` throws has this where another rank's `act` threw, and this one's did not,
/// or is not the first of the ranks that did: of one fault that many meet (a full disk) one rank tells.
struct SHERD_API OfAnotherRank {
  explicit OfAnotherRank(int who) : rank(who) {}
  virtual ~OfAnotherRank();
  int rank;  ///< of the group, the first that threw
};

/// Runs `act`, and returns when every rank of `ranks` has run its own; without ranks it just runs. Where it
/// threw on any, all throw: the exception itself there, elsewhere one that says whose it was (FileError,
/// ValueError or StateError). The group goes on; a CollectiveError in `act` is thrown as it is. Ranks that do
/// something else meanwhile hear of this one by `call`, the function that the program called.
void together(const Group& ranks, std::string_view call, const std::function<void()>& act);
/// The same, in the same call, and gives what every rank's `act` returned.
std::vector<std::uint64_t> together_all(const Group& ranks, std::string_view call,
                                        const std::function<std::uint64_t()>& act);

/// The numbers of all ranks, rank by rank, each of which gives as many; without ranks this one's. Collective.
std::vector<std::int64_t> of_all_ranks(const Group& ranks, std::span<const std::int64_t> own,
                                       const CallOptions& options);

/// The same of as many numbers as each rank has: a list a rank.
std::vector<std::vector<std::int64_t>> lists_of_all(const Group& ranks, std::span<const std::int64_t> own,
                                                    const CallOptions& options);

/// For each of `flags` whether any rank of `ranks` says so, in one call of the gathers' channel; without
/// ranks what this one says. Collective.
std::vector<bool> said_by_any(const Group& ranks, const std::vector<bool>& flags, std::string_view label);

}  // namespace sherd::shard
