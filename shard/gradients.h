// What a group does with the gradients that backwards bring: a transaction. Until `commit` no `.grad`
// changes; an abort forgets what came and keeps what earlier backwards left.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "autograd/sink.h"
#include "collectives/group.h"
#include "runtime/backend.h"
#include "runtime/tensor.h"
#include "shard/call_name.h"
#include "shard/held_averages.h"

namespace sherd::shard {

class Engine;
class ParameterGroup;

/// A sink whose backwards are the engine's.
class EngineSink : public GradSink {
 public:
  void begun(PassInfo pass) override;
  void finish(PassInfo pass) override;
  void abort(PassInfo pass) noexcept override;

 protected:
  /// Of the rank that the backward is of.
  static Engine& engine();
};

class Gradients final : public EngineSink {
 public:
  explicit Gradients(ParameterGroup& group) : group_(group) {}
  /// A `.grad`: of member `first` alone, or of all from `first` to `last` (exclusive) as one.
  void add_slot(Tensor leaf, std::size_t first, std::size_t last);
  /// Another leaf in the place of slot `i`'s, which begins without a gradient.
  void renew_slot(std::size_t i, Tensor leaf);
  /// The leaf whose gradients are member `i`'s.
  void listen(const Leaf& leaf, std::size_t i) { member_of_[&leaf] = i; }
  /// Takes over what backwards without communication left in `old`, as `change` makes it.
  void take_over(Gradients& old, const std::function<Tensor(const Tensor&)>& change);

  /// ShapeError for a `.grad` that the user put there and that is neither an average nor, where there is one,
  /// this rank's own.
  void check_replaced() const;

  /// Whether `.grad` of a member, or of the flat parameter that it is in, is this rank's own; also where this
  /// rank has all of it, and an average would look the same.
  bool own(std::size_t member) const;
  /// There was a backward without communication since the last reduction.
  bool unreduced() const { return unreduced_; }
  /// The next reduction has something to take along, whatever its backward brings.
  bool pending() const;
  /// After a fault ranks may differ in it, so all say yes: what the last backward came to is each one's own.
  void renewed() { unreduced_ = true; }
  /// All gradients that the backward announced are here.
  bool complete() const { return due_ == 0; }

  // ---- the group's turn in a backward: one of three, then `wait` and `commit` ----
  /// Forgets what came, also after an abort.
  void drop() noexcept;
  /// As this rank's own, without communication. `computed_in`: the dtype of forward, alike on all ranks.
  void keep(DType computed_in);
  /// Posts the average over the ranks, of what is here and what earlier backwards kept. Where the shard has
  /// replicas, the sum over the ranks that share it. `name`: as all ranks call it, whenever they post.
  void reduce(DType computed_in, std::shared_ptr<const CallName> name);
  /// Where the shard has replicas: waits for what `reduce` posted, and posts the sum over them, unless the
  /// program put that off.
  void pass_on();
  /// Of an average that is stepped on the host and reduced elsewhere: gives the computing device what brings
  /// it down, once all ranks have posted; says whether there is nothing more to give.
  bool set_out();
  /// Until what `set_out` began has come down.
  void land();
  /// Calls follow at the end of the walk: sums over replicas, or a communication hook's own.
  bool calls_follow() const;
  /// `reduce` was its turn.
  bool averaging() const { return turn_ == Turn::reduced || turn_ == Turn::reduced_over_shards; }
  /// Of a reduction into a shard on the host, where no calls follow: whether `wait` would return at once.
  bool here() const;
  /// Until the averages are here, where the shard is.
  void wait();
  /// The same for those of the groups whose averages stay on the first one's device: what had a gradient,
  /// where this rank had not all, is read once for all groups, since a read waits for the device.
  static void wait_on_device(std::span<const std::shared_ptr<ParameterGroup>> groups);
  /// StateError where an average would be added to one that is there, and cannot be.
  void check_average() const;
  /// Adds to `.grad`; says whether that were averages.
  bool commit();
  /// Hooks after accumulation that are due: those of `of`, for what `commit` added to `shown`.
  struct Added {
    Ref<Leaf> of, shown;
  };
  std::vector<Added> take_added();

  /// The program sets all gradients of a member to zero: also what `.grad` does not show at the moment.
  void zeroed(std::size_t member);

  /// `HeldAverages::number` of each `.grad`, `no_number` where this rank has no elements; and of how many
  /// backwards sums wait for replicas.
  std::vector<std::int64_t> averages() const;
  void forget_sums() { summed_ = {}; }

  // ---- GradSink ----
  void begin(PassInfo pass, Leaf& leaf) override;
  void accept(PassInfo pass, Leaf& leaf, Tensor gradient) override;
  bool accumulates_later() const override { return true; }

 private:
  struct Slot {
    Tensor leaf;
    std::size_t first, last;  ///< members
    Shape shape{};            ///< of the whole gradient
    // While `.grad` is this rank's own whole gradient, from backwards without communication:
    bool unsynced = false;
    std::uint64_t shown = 0;  ///< the storage that it was left in
    Tensor averaged{};        ///< what it showed before
    bool added = false;       ///< by this commit
    HeldAverages averages{};  ///< in `.grad`, if it is one
    bool zeroed = false;      ///< since then
  };
  /// What a slot's `.grad` is.
  enum class Held : std::uint8_t {
    nothing,
    own_sum,    ///< this rank's own, as backwards without communication left it
    own_given,  ///< the same, which the user put there: it has the whole's shape
    average,    ///< or what the user put there as one
  };
  struct Member {
    Ref<Leaf> leaf{};   ///< of the backward under way
    Tensor gradient{};  ///< complete
  };
  enum class Turn : std::uint8_t { to_come, dropped, kept, reduced, reduced_over_shards };

  /// `wait` would read the flags of an average that stays on a device with work of its own.
  bool waits_on_device() const;
  sherd::Layout in_slot(const Slot& slot, std::size_t i) const;
  static Tensor average_in(const Slot& slot);
  /// Where this rank has all of it, what the user puts is its own only beside sums of backwards.
  static Held held_in(const Slot& slot, const Tensor& grad);
  Tensor own_sum(Slot& slot) const;
  void end_own_sum(Slot& slot) const;
  std::vector<Tensor> totals();
  static bool any(const Slot& slot, std::span<const Tensor> parts);
  bool has_zeros(const Slot& slot) const;
  bool elsewhere(const Slot& slot) const;
  Tensor laid_out(const Slot& slot, std::span<Tensor> parts, DType via, const TensorOptions& as) const;
  struct Copies {
    Tensors into{}, from{};
  };
  void lay_into(const Tensor& region, int segment, std::span<const Tensor> totals, Copies& copies) const;
  void mark_present(const Tensor& present, std::span<const Tensor> totals);
  /// Whether two calls make one average, of shards and of replicas: sums between them are not rounded.
  bool in_two_calls() const;
  /// Whether calls give sums, which are divided here.
  bool divided_here() const { return in_two_calls() || divide_by_; }
  Tensor divided(const Tensor& sum) const;
  DType reduce_dtype() const;
  DType grad_dtype() const;  ///< of averages in `.grad`
  Collective reduction(std::vector<Tensor> totals);
  void leave_to_hook(Collective& reduction);
  void run_hook();
  void commit_own();
  void commit_alone();
  void commit_over_shards();
  void commit_average();
  bool offloaded() const;
  bool comes_down() const;
  void make_average();
  Tensor brought_down(const Tensor& t) const;
  static void add_to(Slot& slot, const Tensor& part);

  ParameterGroup& group_;
  std::vector<Slot> slots_;
  std::vector<Member> members_;
  std::unordered_map<const Leaf*, std::size_t> member_of_;
  bool unreduced_ = false;
  Tensor summed_;          // as `reduced_`: of backwards since the last sum over replicas
  std::int64_t sums_ = 0;  // of how many backwards

  Turn turn_ = Turn::to_come;
  int due_ = 0;
  DType own_ = DType::f32;  // of gradients as they come, where nothing else was asked for
  Tensor reduced_;          // average, or sum in two calls: shard gradient, then a presence flag a slot
  std::shared_ptr<const CallName> called_;  ///< by all ranks, in the group's last turn
  Work reduction_;
  std::optional<double> divide_by_;  // of this reduction
  Tensor average_, flags_;           // made of it; in the end where the shard is
  std::vector<float> present_;       // the flags
  bool complete_ = false;       // this rank has a gradient for every slot: then so has the average, unread
  std::vector<Tensor> totals_;  // in place of an average, of a rank without peers that computes elsewhere
  std::unique_ptr<DeviceMark> down_;  // after what is to come down; until then all that it is made of is kept
  Tensors hooked_;                    // inputs and outputs that a communication hook reduces, side by side
};

}  // namespace sherd::shard
