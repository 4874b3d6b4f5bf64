// The interface of what moves calls: implemented for threads, processes and dry runs.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/collective.h"
#include "collectives/offer.h"

namespace sherd {

class MeetingBoard;

/// One rank's end of one sequence of calls: the collectives of a channel, or the messages from one rank to
/// another. Calls are numbered from 0 and complete in order. Every function may throw CollectiveError. None
/// waits for a peer that is gone or has posted a different call: those are faults.
class SHERD_API Line {
 public:
  virtual ~Line();
  /// Makes this rank's part known to the peers and returns the call's number. While the line is full it
  /// waits, or keeps the call until there is room, which is found whenever this rank waits for anything.
  virtual std::uint64_t post(const Collective& collective, const Signature& signature, WhenFull full) = 0;
  /// Returns when the outputs of call `sequence` and of those before hold their values.
  virtual void wait(std::uint64_t sequence) = 0;
  /// Returns when the peers have read this rank's tensors of call `sequence`, which may then be written.
  virtual void wait_inputs(std::uint64_t sequence) = 0;
  /// Whether `wait` would return at once. Goes on with all calls of this rank as far as the peers allow.
  virtual bool done(std::uint64_t sequence) = 0;
  /// Whether `wait` and `wait_inputs` would.
  virtual bool inputs_done(std::uint64_t sequence) = 0;
  /// Calls posted so far.
  virtual std::uint64_t posted() const = 0;
};

/// One rank's end of a group. Used and destroyed on that rank's thread, as are the lines it returns, which it
/// owns.
class SHERD_API Transport {
 public:
  virtual ~Transport();
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// False in a dry run, which has no other ranks: then making a group exchanges nothing.
  virtual bool has_peers() const { return true; }
  virtual const GroupKey& key() const = 0;
  /// Whether it moves tensors on `device`: those of the host, and on meta, of which nothing moves.
  virtual bool reaches(Device device) const { return device.is_cpu() || device.type == DeviceType::meta; }

  /// The collectives of a channel.
  virtual Line& channel(int index) = 0;
  /// The messages from `source` to `destination`, of which this rank is one.
  virtual Line& messages(int index, int source, int destination) = 0;

  /// A new group among some of this group's ranks is made in two steps with an all_gather in between. Every
  /// rank of this group calls `offer` with the new group it will be in (`members`, ranks of this group;
  /// empty: none); the members call `join` with the offers of all ranks. `join` throws StateError when
  /// `offers` are not those, because an interception dropped the all_gather.
  virtual Offer offer(std::span<const int> members, const std::string& name) = 0;
  virtual std::unique_ptr<Transport> join(std::span<const int> members, std::span<const Offer> offers,
                                          const std::string& name) = 0;

  /// A new transport for the same group, once all ranks have asked for it; throws CollectiveError when one is
  /// gone.
  virtual std::unique_ptr<Transport> renew() = 0;

  /// Whether a fault has ended this group's use (until `renew`).
  virtual bool failed() const = 0;

  /// Goes on with all calls of this rank as far as the peers allow.
  virtual void step() {}
  /// Where the ranks find each other's memory for meetings of their devices; null where they are not threads
  /// of one process.
  virtual MeetingBoard* meetings() { return nullptr; }
  /// Ends this group's use, because this rank's device cannot do its part of the last call of a channel.
  virtual void give_up(const Signature&, int /*channel*/, std::string_view /*why*/) noexcept {}
};

/// The StateError of `join`.
[[noreturn]] void refuse_to_join(const std::string& name);

}  // namespace sherd
