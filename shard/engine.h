// The engine of a rank: when groups are gathered, freed and reduced, over all its models, since they share
// the channels. All of it follows from program position and policy; docs/design_sharding.md has a picture.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "autograd/recompute.h"
#include "autograd/sink.h"
#include "runtime/subscription.h"
#include "shard/group.h"

namespace sherd::shard {

class Unit;

/// What becomes of gathered parameters after forward.
enum class AfterForward : std::uint8_t { free, keep, slice };

/// How far ahead a root's groups are gathered, and how much is left lying.
struct SchedulePolicy {
  int forward_prefetch = 1;
  BackwardPrefetch backward_prefetch = 1;
  /// Gathered groups that nobody is using, beyond which the one that is needed last is freed.
  int cached_gathers = 2;
};

/// The order in which one forward of a root used its groups: a guess for the next forward, and what a
/// backward plans by. The graph behind the forward's outputs keeps it, as the sink of a mark in it.
class Record final : public EngineSink {
 public:
  enum class Moment : std::uint8_t { begin, end, read };
  struct Use {
    std::weak_ptr<Gathered> gathered;
    Moment moment;
    std::uint64_t place;  ///< in the rank's order of recording
    bool planned;         ///< a backward will ask for it: for gradients, or to run a region again
    std::shared_ptr<const RecordedRegion> region{};  ///< that it is in, or null
    std::uint64_t freed_at = std::uint64_t(-1);      ///< place; the last: not by the end of the forward

    /// The last place at which a backward that comes to it may read the group. In a region all is read again
    /// from its end on, and until it was freed it could be read without anybody noticing.
    std::uint64_t last_read() const { return std::max({place, region ? region->end : 0, freed_at}); }
  };
  Record(std::uint64_t number, bool inputs_want_grad)
      : number_(number), inputs_want_grad_(inputs_want_grad) {}
  /// Larger for later ones, over all models of the rank.
  std::uint64_t number() const { return number_; }
  bool inputs_want_grad() const { return inputs_want_grad_; }
  const std::vector<Use>& uses() const { return uses_; }
  void add(Gathered& gathered, Moment moment);
  /// Its last use ends; or, where it is read after the forward, has no end.
  void freed(const Gathered& gathered) { set_freed_at(gathered, next_place()); }
  void read_later(const Gathered& gathered) { set_freed_at(gathered, std::uint64_t(-1)); }
  /// Whether a backward has anything to do, and whether any group of it is trained.
  bool planned() const;
  bool trainable() const;

  void begin(PassInfo pass, Leaf&) override;
  void accept(PassInfo, Leaf&, Tensor) override {}

 private:
  static std::uint64_t next_place();
  void set_freed_at(const Gathered& gathered, std::uint64_t place);

  std::uint64_t number_;
  bool inputs_want_grad_;
  std::vector<Use> uses_;
};

/// An outermost module, shared by the groups below it.
struct Root {
  SchedulePolicy policy;
  int depth = 0;  ///< of its modules that run
  std::shared_ptr<Record> now{}, last{};
  Precision precision = Precision::reduced;  ///< of the last forward
  std::vector<std::weak_ptr<Unit>> units{};
};

/// What one backward does, made before it computes anything: "gather c, gather b, reduce c, ...". Every rank
/// posts the gathers in this order and the reductions in this order, whatever its own graph reads; a
/// reduction after all gathers that stand before it.
class Plan {
 public:
  struct Step {
    enum class Kind : std::uint8_t { gather, reduce } kind;
    std::shared_ptr<Gathered> gathered;  ///< whose gradients the group's are, of a reduction
    bool early = false;                  ///< a gather as soon as all before it is done, needed or not
    ParameterGroup& group() const { return gathered->group(); }
  };
  /// Up to `end` steps a rank must have gathered before it does what was recorded before `place`.
  struct Turn {
    std::uint64_t place;
    std::size_t end;
  };

  std::uint64_t run = 0;  ///< of the backward; 0: none is under way
  std::vector<Record*> records{};
  std::vector<std::shared_ptr<ParameterGroup>> begun{};  ///< whose leaves the graph reaches
  std::unordered_set<const ParameterGroup*> knows_begun{};

  void make(std::span<const std::weak_ptr<ParameterGroup>> all);
  bool made() const { return made_; }
  const std::vector<Step>& steps() const { return steps_; }
  /// All that it concerns, each once; the groups of the reductions.
  const std::vector<std::shared_ptr<Gathered>>& gathereds() const { return gathereds_; }
  std::vector<std::shared_ptr<ParameterGroup>> groups() const;
  bool concerns(const Gathered& gathered) const { return turn_of_.contains(&gathered); }
  /// Steps up to which must be gathered before `gathered` is read; before what was recorded at `place`.
  std::size_t turn_of(const Gathered& gathered) const { return turn_of_.at(&gathered); }
  std::size_t turn_at(std::uint64_t place) const;
  std::string text() const;

  /// The cursor: steps before it, of either kind, are done.
  std::size_t gathered = 0, reduced = 0;
  /// The same of averages that were given to come down, and the last of those.
  std::size_t down = 0;
  Gradients* coming = nullptr;
  /// The same of groups that were stepped or are not to be within the walk; those that were.
  std::size_t settled = 0;
  std::vector<ParameterGroup*> stepped{};
  std::exception_ptr step_failed{};  ///< what the last of those threw

 private:
  void concern(const std::shared_ptr<Gathered>& gathered) {
    if (turn_of_.emplace(gathered.get(), 0).second) gathereds_.push_back(gathered);
  }
  bool made_ = false;
  std::vector<Step> steps_;
  std::vector<Turn> turns_;
  std::vector<std::shared_ptr<Gathered>> gathereds_;
  std::unordered_map<const Gathered*, std::size_t> turn_of_;
};

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

  void add(const std::shared_ptr<ParameterGroup>& group);
  void add(const std::shared_ptr<Unit>& unit);
  /// Those of the rank's sharded modules.
  std::vector<std::shared_ptr<Unit>> units() const;

  /// This rank's block of `ranks` ranks of `shard`: one for all groups that ask alike, on all ranks of
  /// `shard`.
  Group block_of(const Group& shard, int ranks);

  // ---- forward ----
  /// A module begins; the outermost one opens a record.
  void enter(Root& root, std::span<Tensor* const> inputs);
  /// Gathers a group for its module.
  void begin_use(ParameterGroup& group);
  void end_use(ParameterGroup& group, AfterForward after);
  /// A module is over. Of the outermost one, marks the outputs, so that a backward hears of the forward.
  void leave(Root& root, std::span<Tensor* const> outputs);
  /// In place of `end_use` and `leave`.
  void fail(Root& root, std::span<const std::shared_ptr<ParameterGroup>> groups) noexcept;

  /// The program asks for a group: begins to gather it, for its module's next forward or until `reshard`.
  void unshard(ParameterGroup& group);
  /// An op needs what is not here.
  void demand(Gathered& gathered);
  /// The last read that a backward announced is over.
  void read_over(Gathered& gathered);

  // ---- backward, from sinks ----
  void begin(std::uint64_t run, ParameterGroup& group);
  void begin(std::uint64_t run, Record& record);
  void begun(std::uint64_t run);
  void arrived(std::uint64_t run);
  void finish(std::uint64_t run);
  void abort(std::uint64_t run) noexcept;
  const Plan& plan() const { return plan_; }
  /// StateError within a backward that may have stepped the group, here or on a peer: what is gathered now
  /// would be values of two steps.
  void check_unstepped(ParameterGroup& group) const;

 private:
  using Gathereds = std::vector<std::shared_ptr<Gathered>>;
  /// Of the root's, those with a lease of `owner`.
  Gathereds leased(const Root& root, Lease owner) const;
  void drop_stale(Gathereds kept) const;
  void gather_ahead(const Gathered& gathered);
  static void prefetch(Gathered& next);
  void gather_early(std::size_t begin);
  void make_room(const Gathered& wanted);
  void begin_run(std::uint64_t run);
  void tell_units() const;
  void gather_up_to(std::size_t end, const Gathered* needed = nullptr);
  enum class When : std::uint8_t { complete, now };
  void reduce_in_turn(When when);
  void bring_down();
  static bool steps_in_walk(ParameterGroup& group);
  void step_early();
  void before_call();
  void renewed(const Group& ranks);

  /// Kept as long as the group that it was cut from.
  struct Block {
    std::weak_ptr<const void> shard;
    Group block;
    int ranks;
    bool of(const Group& group) const {
      const std::shared_ptr<const void> own = shard.lock();
      return own && own == group.watch().lock();
    }
  };
  std::vector<std::weak_ptr<ParameterGroup>> all_;
  std::vector<std::weak_ptr<Unit>> units_;
  std::vector<Block> blocks_;
  std::uint64_t last_record_ = 0;
  Plan plan_;
  bool own_calls_ = false;
  Subscription calls_, renewals_;
};

}  // namespace sherd::shard
