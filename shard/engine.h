// The engine of a rank: what backwards gather, free and reduce, over all its models, since they share the
// channels. All of it follows from program position and policy; docs/design_sharding.md has a picture.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "runtime/subscription.h"
#include "shard/alive.h"
#include "shard/early_steps.h"
#include "shard/outside.h"
#include "shard/plan.h"
#include "shard/root.h"

namespace sherd::shard {

class Engine {
 public:
  Engine();
  static Engine& current();

  /// A scope of the engine's own calls, before which nothing is due.
  class OwnCalls {
   public:
    OwnCalls();
    ~OwnCalls();
    OwnCalls(const OwnCalls&) = delete;
    OwnCalls& operator=(const OwnCalls&) = delete;

   private:
    Engine& engine_;
    bool outer_;
  };

  /// A unit, and the root that it has by itself.
  void add(const std::shared_ptr<Unit>& unit, const std::shared_ptr<Root>& root) {
    remember(units_, unit);
    remember(roots_, root);
  }
  /// A unit's next one.
  void add(const std::shared_ptr<Root>& root) { remember(roots_, root); }
  /// Those of the rank's sharded modules.
  std::vector<std::shared_ptr<Unit>> units() const { return alive<Unit>(units_); }

  /// This rank's block of `ranks` ranks of `shard`: one for all groups that ask alike, on all ranks of
  /// `shard`.
  Group block_of(const Group& shard, int ranks);
  /// How many models there are among `ranks` with one more. The count begins anew with a renewal: before it
  /// some ranks may have come further than others.
  int count_model(const Group& ranks);
  /// The last `models` that were counted, from number `first` on, are one; unless others are among them.
  void count_as_one(const GroupKey& ranks, int first, std::ptrdiff_t models);
  std::uint64_t next_record() { return ++last_record_; }

  /// The program asks for a group: begins to gather it, for its module's next forward or until `reshard`.
  void unshard(ParameterGroup& group);
  /// An op needs what is not here.
  void demand(Gathered& gathered);
  /// StateError within a backward that may have stepped the group, here or on a peer: what is gathered now
  /// would be values of two steps.
  void check_unstepped(ParameterGroup& group);

  // ---- backward, from sinks ----
  void begin(std::uint64_t run, ParameterGroup& group);
  void begin(std::uint64_t run, Record& record);
  void begun(std::uint64_t run);
  void arrived(std::uint64_t run);
  void finish(std::uint64_t run);
  void abort(std::uint64_t run) noexcept;
  /// A backward that reaches sharded parameters is under way; it is at its walk or later.
  bool in_backward() const { return backward_.has_value(); }
  bool walking() const { return backward_ && backward_->begun; }
  /// Of that one; else empty.
  const Plan& plan() const;
  EarlySteps& early_steps() { return early_; }
  Outside& outside() { return outside_; }
  /// Changes whenever a unit becomes a part of another root.
  std::uint64_t roots_changed() const { return roots_changed_; }
  void note_root_changed() { ++roots_changed_; }

 private:
  /// A backward under way.
  struct Backward {
    std::uint64_t run;
    // What it reaches.
    std::vector<Record*> records{};
    std::vector<std::shared_ptr<ParameterGroup>> groups{};
    std::unordered_set<const ParameterGroup*> known{};

    bool begun = false;
    Plan plan{};
    // Cursors: steps that the walk has passed; gathers, which the program may ask for earlier, and
    // reductions, which may wait for gradients; what is given back.
    std::size_t passed = 0, gathered = 0, reduced = 0, released = 0;
    /// The same of averages that were given to come down, and the last of those.
    std::size_t down = 0;
    Gradients* coming = nullptr;
    /// Steps whose groups were stepped within the walk, or are to be stepped at its end; the former.
    std::size_t settled = 0;
    std::vector<ParameterGroup*> stepped{};
    std::exception_ptr step_failed{};  ///< what the last of those threw
  };
  Backward& in_run(std::uint64_t run);
  Backward* of_run(std::uint64_t run) { return backward_ && backward_->run == run ? &*backward_ : nullptr; }
  std::uint64_t passes(std::uint64_t place);
  void gather_up_to(std::size_t end);
  void hold(Gathered& gathered);
  enum class When : std::uint8_t { complete, now };
  void reduce_in_turn(When when);
  void bring_down();
  bool steps_in_walk(ParameterGroup& group);
  void step_early();
  void tell_units() const;
  void before_call();
  void renewed(const Group& ranks);

  /// Kept as long as the group that it was cut from.
  struct Block {
    std::weak_ptr<const void> shard;
    Group block;
    int ranks;
  };
  std::vector<std::weak_ptr<Root>> roots_;
  std::vector<std::weak_ptr<Unit>> units_;
  std::vector<Block> blocks_;
  std::vector<ModelAmong> models_;  ///< the last one among each group of ranks
  std::uint64_t last_record_ = 0, roots_changed_ = 0;
  Outside outside_;
  std::optional<Backward> backward_;
  EarlySteps early_{*this};
  bool own_calls_ = false;
  Subscription calls_, renewals_;
};

}  // namespace sherd::shard
