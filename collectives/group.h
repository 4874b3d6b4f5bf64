// Ranks that work together, as a value; and the calls that they make.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/collective.h"

namespace sherd {

class GroupEnd;
class Line;
class Transport;

/// A call that was enqueued and may still be under way. May be dropped, on any thread: the peers get what was
/// posted, and the tensors' memory lives until they have it. Only a long all_reduce has to be waited for
/// before its rank's body ends, because this rank computes a part of it.
class SHERD_API Work {
 public:
  Work() = default;

  /// Returns when the outputs are there (and those of earlier calls on this channel). Throws CollectiveError.
  void wait();
  /// Returns when the peers have read this rank's inputs, so that they may be written or handed back.
  void wait_inputs();
  /// Whether `wait` would return at once.
  bool done() const;
  /// The same call without its outputs, whose memory may then go: for `wait_inputs`.
  Work without_outputs() const {
    Work work = *this;
    work.outputs_.clear();
    return work;
  }
  /// Whether there is a call behind this handle.
  bool posted() const { return static_cast<bool>(group_); }
  /// Number of the call on its channel, from 0.
  std::uint64_t sequence() const { return sequence_; }

 private:
  friend class Group;
  Line& line() const;

  std::shared_ptr<GroupEnd> group_;
  std::shared_ptr<Transport> transport_;  // the one it was posted to: `renew` replaces the group's
  CollectiveKind kind_ = CollectiveKind::barrier;
  int peer_ = -1, channel_ = 0;
  std::uint64_t sequence_ = 0;
  Tensors outputs_;
};

/// What a call may say beside its tensors.
struct CallOptions {
  std::string label{};  ///< for messages and logs; the same on every rank
  int channel = 0;
};

/// A handle on a group of ranks; copies are the same group. Only the rank (thread) that made the group uses
/// it: on another thread every call is a StateError. Any thread may drop a handle at any time, also when the
/// rank is gone. Every rank of the group makes the same calls in the same order on each channel; a rank that
/// does not is named in a CollectiveError on every rank. After one the group refuses all calls until `renew`.
class SHERD_API Group {
 public:
  /// No group: what a rank outside a sub-group holds.
  Group() = default;
  explicit Group(std::shared_ptr<GroupEnd> end);

  bool defined() const { return static_cast<bool>(end_); }
  int rank() const;
  int size() const;
  /// "world", or what the group was cut from and how.
  const std::string& name() const;
  /// The members' ranks in the world, in order.
  std::span<const int> world_ranks() const;

  // ---- calls ----
  /// The one way in: checks, counts, logs, lets a test intercept, and posts. Returns at once unless the
  /// channel is full.
  [[nodiscard]] Work enqueue(Collective collective) const;
  /// `enqueue`, then waits for outputs and inputs.
  void call(Collective collective) const;

  /// `output` gets W times the elements of `input`, in rank order.
  void all_gather(const Tensor& output, const Tensor& input, CallOptions options = {}) const;
  /// `output` gets this rank's slice of the combined inputs.
  void reduce_scatter(const Tensor& output, const Tensor& input, ReduceOp reduction = {},
                      CallOptions options = {}) const;
  /// In place.
  void all_reduce(const Tensor& tensor, ReduceOp reduction = {}, CallOptions options = {}) const;
  /// In place; `root`'s values arrive everywhere.
  void broadcast(const Tensor& tensor, int root, CallOptions options = {}) const;
  /// Slice p of `output` comes from rank p, who took its slice `rank()` for it.
  void all_to_all(const Tensor& output, const Tensor& input, CallOptions options = {}) const;
  /// Returns when `destination` has it.
  void send(const Tensor& tensor, int destination, CallOptions options = {}) const;
  void recv(const Tensor& tensor, int source, CallOptions options = {}) const;
  /// Returns when every rank has come here.
  void barrier(CallOptions options = {}) const;

  // ---- groups from this one: every rank of this group calls, with the same arguments ----
  /// The listed ranks of this group, in that order; a rank that is not listed gets no group.
  Group subgroup(std::span<const int> ranks) const;
  Group subgroup(std::initializer_list<int> ranks) const {
    return subgroup(std::span(ranks.begin(), ranks.size()));
  }
  /// Of several lists without common ranks, the group of the list this rank is in.
  Group split(const std::vector<std::vector<int>>& lists, std::string_view name) const;
  /// This rank's group of `count` consecutive ranks. `count` divides the size (ValueError).
  Group blocks(int count) const;
  /// The ranks that differ from this one by multiples of `stride`. `stride` divides the size (ValueError).
  Group strided(int stride) const;

  /// After a CollectiveError: makes this group usable again, once every rank of it has called this. Works
  /// that were under way stay failed. Throws CollectiveError when a rank is gone for good.
  void renew() const;
  bool failed() const;

  friend bool operator==(const Group&, const Group&) = default;

 private:
  std::shared_ptr<GroupEnd> end_;
};

}  // namespace sherd
