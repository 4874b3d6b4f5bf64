// When the groups of one root module are gathered and freed in forward, and whatever a backward asks for
// outside its agenda (backward.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "shard/group.h"

namespace sherd::shard {

/// How far ahead a schedule gathers, and how much it leaves lying.
struct SchedulePolicy {
  int forward_prefetch = 1, backward_prefetch = 1;
  /// Gathered groups that nobody is using, beyond which the one that is needed last is freed.
  int cached_gathers = 2;
};

class RootCall;

class Schedule final {
 public:
  explicit Schedule(SchedulePolicy policy) : policy_(policy) {}

  // ---- forward ----
  bool in_forward() const { return depth_ > 0; }
  bool outermost() const { return depth_ == 1; }
  /// A module begins; the outermost one opens a root call.
  void enter();
  /// Gathers a group for its module.
  void use(ParameterGroup& group);
  /// The group's module is over.
  void done(ParameterGroup& group, AfterForward after);
  /// A module is over. For the outermost one, its root call, or null if nothing was recorded.
  std::shared_ptr<RootCall> leave();
  /// In place of `done` and `leave`.
  void fail(std::span<const std::shared_ptr<ParameterGroup>> groups) noexcept;

  /// An op needs a group that is not here.
  void demand(ParameterGroup& group);
  /// The last read that a backward announced is over.
  void read_over(ParameterGroup& group);
  /// Starts a gather unless the group is here or on its way.
  void start(ParameterGroup& group);
  const SchedulePolicy& policy() const { return policy_; }
  /// Groups that had backwards without communication since their last reduction.
  std::vector<std::weak_ptr<ParameterGroup>>& owed() { return owed_; }

 private:
  using Groups = std::vector<std::shared_ptr<ParameterGroup>>;
  void bring(ParameterGroup& group);
  void record(ParameterGroup& group);
  void prefetch_after(const ParameterGroup& group);
  void evict(const ParameterGroup& wanted);
  std::size_t next_use(const ParameterGroup& group) const;
  bool idle(const ParameterGroup& group) const;

  SchedulePolicy policy_;
  int depth_ = 0;
  std::shared_ptr<RootCall> call_;
  std::vector<std::weak_ptr<ParameterGroup>> uses_;       // of this root call, in order, repeated
  std::vector<std::weak_ptr<ParameterGroup>> last_uses_;  // of the one before: a guess
  std::vector<std::weak_ptr<ParameterGroup>> owed_;
  std::vector<std::weak_ptr<ParameterGroup>> here_;  // gathered or under way
};

}  // namespace sherd::shard
