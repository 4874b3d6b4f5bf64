// Groups of ranks and the calls that they make.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/collective.h"
#include "collectives/group_key.h"

namespace sherd {

class GroupEnd;
class Line;
class Transport;
namespace ops {
enum class Until : std::uint8_t;
}

/// A call that was enqueued and may still be under way. Used on its rank's thread (StateError), dropped on
/// any: the peers get what was posted, and the tensors' memory lives until they have it. Only a long
/// all_reduce must be waited for before its rank's body ends, because this rank computes a part of it. After
/// `renew` of its group, waiting for it throws CollectiveError.
class SHERD_API Work {
 public:
  Work() = default;

  /// Returns when the outputs of this and of earlier calls on its channel hold their values. Throws
  /// CollectiveError.
  void wait();
  /// Returns when the peers have read this rank's inputs, which may then be written or freed. Throws
  /// CollectiveError.
  void wait_inputs();
  /// Whether `wait` would return at once.
  bool done() const;
  /// The same call without holding its outputs, whose memory may then be freed: for a later `wait_inputs`.
  Work without_outputs() const {
    Work work = *this;
    work.outputs_.clear();
    return work;
  }
  /// False for a default Work, and for a call that an Interception did not pass on.
  bool posted() const { return static_cast<bool>(group_); }
  /// Number of the call on its channel, from 0.
  std::uint64_t sequence() const { return sequence_; }

 private:
  friend class Group;
  Line& line() const;
  void wait(ops::Until until, const Tensors& written);

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

/// A handle on a group of ranks; copies name the same group. Only the rank (thread) that made it uses it: on
/// another thread every call is a StateError. Any thread may drop a handle at any time, also when the rank is
/// gone. Every rank of the group makes the same calls in the same order on each channel; a rank that does not
/// is named in a CollectiveError on every rank, and from then on every call of the group throws that, until
/// `renew`. On a handle without group everything but `defined` and `==` is a StateError.
class SHERD_API Group {
 public:
  /// No group: what a rank outside a subgroup gets.
  Group() = default;
  explicit Group(std::shared_ptr<GroupEnd> end);

  bool defined() const { return static_cast<bool>(end_); }
  int rank() const;
  int size() const;
  /// "world", or what the group was cut from and how.
  const std::string& name() const;
  /// The members' ranks in the world, in order.
  std::span<const int> world_ranks() const;
  /// Expires with the last handle on the group.
  std::weak_ptr<const void> watch() const { return end_; }
  /// The same bytes on every rank of this group, and on no other group; new ones after `renew`.
  const GroupKey& key() const;

  // ---- calls ----
  /// Posts a call. While its channel has its fill of calls under way, waits, or returns at once and the call
  /// is posted when there is room. First the rank's interceptions get the call, newest first; what they pass
  /// on is checked, counted, logged and posted. Errors as `validate`, or CollectiveError.
  [[nodiscard]] Work enqueue(Collective collective, WhenFull full = WhenFull::wait) const;
  /// `enqueue`, then waits for outputs and inputs.
  void call(Collective collective) const;

  /// `output` gets W times the elements of `input`, in rank order.
  void all_gather(const Tensor& output, const Tensor& input, CallOptions options = {}) const;
  /// `output` gets this rank's slice of the combined inputs.
  void reduce_scatter(const Tensor& output, const Tensor& input, ReduceOp reduction = {},
                      CallOptions options = {}) const;
  /// In place.
  void all_reduce(const Tensor& tensor, ReduceOp reduction = {}, CallOptions options = {}) const;
  /// In place: the values of rank `root` on every rank.
  void broadcast(const Tensor& tensor, int root, CallOptions options = {}) const;
  /// Slice p of `output` is the slice of rank p's `input` that has this rank's number. Not in place.
  void all_to_all(const Tensor& output, const Tensor& input, CallOptions options = {}) const;
  /// Returns when `destination` has received it.
  void send(const Tensor& tensor, int destination, CallOptions options = {}) const;
  /// Returns when the values that `source` sent are in `tensor`, of the same dtype and number of elements.
  void recv(const Tensor& tensor, int source, CallOptions options = {}) const;
  /// Returns when every rank has come here.
  void barrier(CallOptions options = {}) const;

  // ---- groups from this one: every rank of this group calls, with the same arguments ----
  /// The listed ranks of this group, in that order; a rank that is not listed gets an undefined handle.
  /// ValueError for a rank that is not in the group or listed twice.
  Group subgroup(std::span<const int> ranks) const;
  Group subgroup(std::initializer_list<int> ranks) const {
    return subgroup(std::span(ranks.begin(), ranks.size()));
  }
  /// The group of the list that this rank is in; undefined where it is in none. The lists have no rank in
  /// common (ValueError). `name` is for messages.
  Group split(const std::vector<std::vector<int>>& lists, std::string_view name) const;
  /// This rank's group of `count` consecutive ranks. `count` divides the size (ValueError).
  Group blocks(int count) const;
  /// The ranks that differ from this one by multiples of `stride`. `stride` divides the size (ValueError).
  Group strided(int stride) const;

  /// After a CollectiveError: makes this group usable again; returns once every rank of it has called this.
  /// Works from before stay failed; renewing a group that has not failed fails it, and with it calls that a
  /// peer is still in. Throws CollectiveError when a rank is gone for good.
  void renew() const;
  /// Whether a fault has ended the group, until `renew`.
  bool failed() const;

  friend bool operator==(const Group&, const Group&) = default;

 private:
  std::shared_ptr<GroupEnd> end_;
};

}  // namespace sherd
