// An outermost module that runs, with all below it: the list of what its forwards use, and the cursor in it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "shard/call_name.h"
#include "shard/group.h"
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
};

/// A model among ranks since their last renewal.
struct ModelAmong {
  std::weak_ptr<const void> ranks;
  GroupKey key;  ///< theirs, another one since each renewal
  ModelNumber number;
};

/// Whether a `Group::watch` is of `group`.
inline bool watches(const std::weak_ptr<const void>& watch, const Group& group) {
  const std::shared_ptr<const void> its = watch.lock();
  return its && its == group.watch().lock();
}

/// Of one model among the groups of ranks that it has.
class ModelNumbers {
 public:
  /// Which of the models among `ranks` it is. Counts it if it is new to them: when it is made, or first runs
  /// after a renewal.
  ModelNumber among(const Group& ranks);
  /// Those of `parts` are parts of it: they were counted before.
  void take(std::span<ModelNumbers* const> parts);
  /// Of ranks to which it is new.
  void take_over(const ModelNumbers& part);

 private:
  ModelAmong* find(const GroupKey& key);
  std::vector<ModelAmong> known_;
};

/// Its forwards gather by one cursor: what needs a group names a place, and only `advance` posts, that place
/// and those that the last forward's list has behind it. A forward that departs from the list goes on place
/// by place, and is the next one's list.
class Root {
 public:
  explicit Root(SchedulePolicy policy) : policy_(policy) {}

  const SchedulePolicy& policy() const { return policy_; }
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
  /// Also of graphs from before a module was moved or cast.
  std::vector<std::shared_ptr<ParameterGroup>> groups() const;

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
  void renewed() { last_ = nullptr, outside_.clear(); }
  /// One through forwards of all roots that has ended. What it could come to is of no later forward.
  void backward_over(std::span<Record* const> records);
  /// Gives back what was gathered ahead, or read outside its module.
  void end_listed();

 private:
  void advance(Engine& engine, Gathered& wanted, Record::Moment moment);
  void gather_ahead(const Gathered& from, Record::Moment moment);
  bool follows(const Gathered& wanted, Record::Moment moment);
  void end_reads(const Gathered* but);
  void read_outside(Gathered& gathered);
  void find_kept(std::span<const std::shared_ptr<Gathered>> kept);
  void drop_stale(std::vector<std::shared_ptr<Gathered>> kept) const;

  SchedulePolicy policy_;
  Precision precision_ = Precision::reduced;
  ModelNumbers numbers_;
  std::vector<std::weak_ptr<Unit>> units_;
  std::vector<std::weak_ptr<ParameterGroup>> groups_;
  int depth_ = 0;
  std::shared_ptr<Record> now_, last_;
  std::vector<std::weak_ptr<Record>> records_;  ///< of forwards whose graphs may be there
  /// Reads outside all forwards, and what may have been read so without notice, that no backward was over
  /// yet: forwards to come have them too.
  std::vector<Record::Use> outside_;
  std::uint64_t left_ = 0;  ///< place at which the last forward ended
  bool departed_ = false;   ///< this forward, from the last one's list
  // Leased by the list: gathered ahead, and read outside their modules at the cursor.
  std::vector<std::weak_ptr<Gathered>> ahead_, reads_;
};

}  // namespace sherd::shard
