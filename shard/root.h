// An outermost module that runs, with all below it: the list of what its forwards use, and the cursor in it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "shard/group.h"
#include "shard/model_numbers.h"
#include "shard/record.h"

namespace sherd::shard {

class Engine;
class Unit;

/// What becomes of gathered parameters after forward.
enum class AfterForward : std::uint8_t { free, keep, slice };

/// How far ahead a root's groups are gathered.
struct SchedulePolicy {
  int forward_prefetch = 1;
  BackwardPrefetch backward_prefetch = 1;

  /// So many groups in both, in a backward at the same moment as before.
  void gather_ahead(int groups) {
    forward_prefetch = groups;
    const bool post = backward_prefetch.after_reduction();
    backward_prefetch = post ? BackwardPrefetch::post(groups) : BackwardPrefetch::pre(groups);
  }
};

/// Its forwards gather by one cursor: what needs a group names a place, and only `advance` posts, that place
/// and those that the last forward's list has behind it. A forward that departs from the list goes on place
/// by place, and is the next one's list.
class Root {
 public:
  explicit Root(SchedulePolicy policy) : policy_(policy) {}

  const SchedulePolicy& policy() const { return policy_; }
  void gather_ahead(int groups) { policy_.gather_ahead(groups); }
  /// The list of the last forward; null before one.
  const Record* last() const { return last_.get(); }
  bool running() const { return depth_ > 0; }
  /// Of its modules that run.
  int depth() const { return depth_; }
  /// Of the last forward, or the one under way.
  Precision precision() const { return precision_; }
  /// Says whether it is another one.
  bool compute_in(Precision precision) { return std::exchange(precision_, precision) != precision; }

  // ---- what is below ----
  void add(const std::shared_ptr<ParameterGroup>& group);
  void add(const std::shared_ptr<Unit>& unit);
  std::vector<std::shared_ptr<Unit>> units() const;
  /// Those of its modules.
  std::vector<std::shared_ptr<ParameterGroup>> groups() const;
  /// And those that are retired, which graphs have, on some ranks.
  std::vector<std::shared_ptr<ParameterGroup>> groups_of_graphs() const;

  ModelNumbers& numbers() { return numbers_; }
  /// What ran alone so far becomes a part of this root.
  void take_over(Root& inner);

  // ---- forward ----
  /// A module begins; the outermost one opens a record. `tied`: groups of other roots whose parameters are
  /// members below it.
  void enter(Engine& engine, std::span<const std::shared_ptr<ParameterGroup>> tied);
  /// Gathers a group for its module.
  void begin_use(Engine& engine, ParameterGroup& group);
  void end_use(ParameterGroup& group, AfterForward after);
  /// A module is over. Of the outermost one, marks the outputs, so that a backward hears of the forward.
  void leave(std::span<Tensor* const> outputs);
  /// In place of `end_use` and `leave`.
  void fail(std::span<const std::shared_ptr<ParameterGroup>> of_module) noexcept;
  /// The program asks for a group: begins to gather it, for its module's next forward or until `reshard`.
  void unshard(Engine& engine, Gathered& gathered);
  /// An op needs what is not here: begins to gather it, until the cursor goes on.
  void read(Engine& engine, Gathered& gathered);

  /// A group's memory is given back.
  void freed(const Gathered& gathered) {
    if (now_) now_->freed(gathered);
  }
  /// After a fault: nothing that was guessed counts.
  void renewed() { last_ = nullptr; }
  /// Whether the forward under way is to have a backward that reduces gradients.
  bool trains() const;
  /// Gives back what was gathered ahead, or read outside its module.
  void end_listed();

 private:
  void advance(Engine& engine, Gathered& wanted, Record::Moment moment);
  void gather_ahead(const Gathered& from, Record::Moment moment);
  bool follows(const Gathered& wanted, Record::Moment moment);
  void end_reads(const Gathered* but);
  void find_kept(Engine& engine, std::span<const std::shared_ptr<Gathered>> kept);
  void drop_stale(std::vector<std::shared_ptr<Gathered>> kept) const;

  SchedulePolicy policy_;
  Precision precision_ = Precision::reduced;
  ModelNumbers numbers_;
  std::vector<std::weak_ptr<Unit>> units_;
  std::vector<std::weak_ptr<ParameterGroup>> groups_;
  int depth_ = 0;
  std::shared_ptr<Record> now_, last_;
  std::uint64_t left_ = 0;  ///< place at which the last forward ended
  bool departed_ = false;   ///< this forward, from the last one's list
  // Leased by the list: gathered ahead, and read outside their modules at the cursor.
  std::vector<std::weak_ptr<Gathered>> ahead_, reads_;
};

}  // namespace sherd::shard
