// How posted calls move: the one interface that threads, MPI and dry-run implement.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collectives/collective.h"

namespace sherd {

/// One rank's end of one order of calls: a channel's collectives, or the messages from one rank to another.
/// Calls are numbered from 0 and complete in order. Everything may throw CollectiveError; nothing waits
/// longer than its peers live and keep to the order.
class SHERD_API Line {
 public:
  virtual ~Line();
  /// Makes this rank's part known to the peers and returns the call's number. Waits only while the line is
  /// full.
  virtual std::uint64_t post(const Collective& collective, const Signature& signature) = 0;
  /// Until the outputs of call `sequence` (and of those before it) are there.
  virtual void wait(std::uint64_t sequence) = 0;
  /// Until the peers have read this rank's tensors of call `sequence`, so that they may be written again.
  virtual void wait_inputs(std::uint64_t sequence) = 0;
  /// Whether `wait` would return at once.
  virtual bool done(std::uint64_t sequence) = 0;
  /// Calls posted so far.
  virtual std::uint64_t posted() const = 0;
};

/// One rank's end of a group. Belongs to that rank's thread, like everything that it hands out.
class SHERD_API Transport {
 public:
  virtual ~Transport();
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// False where the other ranks are only imagined (dry-run): then nothing is agreed on with them.
  virtual bool has_peers() const { return true; }

  /// The collectives of a channel.
  virtual Line& channel(int index) = 0;
  /// The messages from `source` to `destination`, of which this rank is one.
  virtual Line& messages(int index, int source, int destination) = 0;

  /// A new group among some of this group's ranks is made in two steps around an all_gather: every rank of
  /// this group offers a word (`members`: the new group it will be in, this group's ranks; empty: none), then
  /// the members join with the words of all ranks of this group.
  /// `join` throws StateError when `words` are none that ranks offered: an interception kept the all_gather
  /// back.
  virtual std::int64_t offer(std::span<const int> members, const std::string& name) = 0;
  virtual std::unique_ptr<Transport> join(std::span<const int> members, std::span<const std::int64_t> words,
                                          const std::string& name) = 0;

  /// The same group, fresh, once all ranks have asked for it; throws CollectiveError when one is gone.
  virtual std::unique_ptr<Transport> renew() = 0;

  /// Whether a fault has ended this group's use (until `renew`).
  virtual bool failed() const = 0;
};

[[noreturn]] void refuse_to_join(const std::string& name);

}  // namespace sherd
