// What a module is given when it is sharded: its groups, its casts, and what its parameters show.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "nn/module.h"
#include "shard/below.h"
#include "shard/engine.h"

namespace sherd::shard {

enum class Phase : std::uint8_t;

/// When a module's floating inputs are cast to the parameters' precision.
enum class InputCast : std::uint8_t { never, when_root, with_parameters, always };

struct UnitPolicy {
  InputCast input_cast = InputCast::never;
  std::optional<DType> param_dtype, output_dtype, buffer_dtype;
  Precision evaluation = Precision::reduced;
  std::optional<Device> device;  ///< where a root's inputs go
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  AfterForward after_forward = AfterForward::free;
  WritebackCheck writeback_check = WritebackCheck::on;
  SchedulePolicy schedule;
  Ignored ignored;
  std::string type;  ///< name of its module's class
};

/// A parameter's place among all of the outermost sharded module, in the order of its members.
struct MemberOrder {
  std::uint64_t root = 0;  ///< another for every outermost module
  std::size_t index = 0;
};

/// What a module's member holds, whatever object that is at a time.
using Slot = std::shared_ptr<const nn::Parameter>;

/// A group's parameters, as objects.
struct Members {
  std::shared_ptr<ParameterGroup> group;
  std::vector<nn::Parameter> parameters;
  std::vector<MemberOrder> order{};           ///< of each
  std::vector<std::vector<Slot>> slots{};     ///< of each: of the member that has it, and of those tied to it
  nn::Parameter flat;                         ///< in their place, if the group has one flat parameter
  std::array<std::vector<Tensor>, 2> used{};  ///< what forward reads, by `Precision`; made when it is needed
  std::vector<Tensor> summoned{};             ///< in its place, while a scope shows the parameters whole

  /// What forward reads in `precision`; of a group that computes alike in both, the same.
  const std::vector<Tensor>& used_in(Precision precision);
  /// Whether a member that had parameter `i` has another object now.
  bool replaced(std::size_t i) const {
    return i < slots.size() &&
           std::ranges::any_of(slots[i], [&](const Slot& slot) { return slot->id() != parameters[i].id(); });
  }
};

class Unit final : public nn::ModuleExtension,
                   public nn::ParameterOwner,
                   public std::enable_shared_from_this<Unit> {
 public:
  /// Known to the rank's engine.
  static std::shared_ptr<Unit> make(UnitPolicy policy, std::vector<Members> members);
  Unit(UnitPolicy policy, std::vector<Members> members);
  ~Unit() override;
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::vector<Members>& members() const { return members_; }
  const UnitPolicy& policy() const { return policy_; }
  /// The group of one of its parameters and the place there.
  struct Place {
    const Members* members;
    std::size_t index;
  };
  /// ValueError for a flat parameter, which is many.
  Place place(const nn::Parameter& parameter) const;
  /// The same, a flat one's for its group's first: where its gradient and its ranks are.
  Place stepped_at(const nn::Parameter& parameter) const;
  void set_order(const nn::Parameter& parameter, MemberOrder order);
  /// Modules within its own that were sharded before it are parts of one model.
  void take_into_model(std::span<Unit* const> below);
  /// Members that have it, also by ties, beside those that are known: of modules that run elsewhere too.
  void add_slots(const nn::Parameter& parameter, const std::vector<Slot>& slots);
  /// Members that have parameters of others now (`held`) are theirs. A parameter without a member keeps a
  /// slot that nobody else has.
  void leave_slots(const std::unordered_set<const nn::Parameter*>& held);
  /// The group for which `parameter` is the flat one, or null.
  const Members* flattened(const nn::Parameter& parameter) const;
  /// What forwards read from now on.
  void compute_in(Precision precision);
  const Root& root() const { return *root_; }
  /// Becomes a part of the root of `outer`, in which its module is `name`. One that is a part of it already,
  /// when a module within that runs alone, keeps its label.
  void join(const Unit& outer, std::string_view name);
  /// Its root, and those of its own to come, gather so many groups ahead.
  void gather_ahead(int groups);
  /// Is a root of its own again, as when it was made, unless a forward of its root is under way.
  void leave_root();
  /// Another shard for every group that `change` gives one; graphs from before keep the old ones. Nothing is
  /// changed when it throws.
  void replace(const std::function<Tensor(const Tensor&)>& change);
  /// The wrapping that it is part of threw: neither it nor a second attempt uses it.
  void abandon() { abandoned_ = true; }
  void check_complete(const nn::Module& module) const;
  /// Whether backwards average gradients, where no scope says that they do not.
  void set_synchronising(bool synchronising);
  /// Frees what is gathered: no backward of an earlier forward is to come.
  void let_go();
  void begin_no_sync();
  void end_no_sync();

  Phase phase() const;

  // ---- parameters that are whole for a while (summon.cpp) ----
  bool running() const { return root_->running(); }
  bool summoned() const {
    return std::ranges::any_of(groups_, [](const auto& g) { return g->summoned; });
  }
  /// Shows `whole` in place of the parameters of `group`; without tensors their parts, which are not written
  /// either.
  void summon(ParameterGroup& group, std::vector<Tensor> whole);
  void dismiss(ParameterGroup& group);

  // ---- what the user put in the place of parameters (writeback.cpp) ----
  /// Takes it into the shard, before a gather; each rank for itself. ShapeError for another shape than this
  /// rank's part has, StateError while a backward is to come that needs what was gathered,
  /// NotImplementedError for ties that were changed.
  void write_back();
  /// Whether a member that had one of these, by id, has another object, or has one of these in another's
  /// place.
  bool replaced(const std::unordered_set<const void*>& ids) const;
  /// ShapeError for a gradient that is neither an average nor this rank's own.
  void check_gradients() const;
  /// A backward begins. StateError if something of what `plan` concerns was replaced since its forward.
  void begin_backward(const Plan& plan);

  // ---- ModuleExtension ----
  void enter(nn::Module& module, std::span<Tensor* const> inputs) override;
  void before_forward(nn::Module& module, std::span<Tensor* const> inputs) override;
  void after_forward(nn::Module& module, std::span<Tensor* const> outputs) override;
  void leave(nn::Module& module, std::span<Tensor* const> outputs) override;
  void result_unknown(nn::Module& module, std::string_view type) override;
  void forward_failed(nn::Module& module) noexcept override;
  bool repeats_in_programs() const override { return root_->running(); }  // else it begins as one
  void add_guards(std::vector<std::uint64_t>& words) const override;
  std::vector<nn::NamedParameter> own_parameters() const override;
  bool hides(const nn::Parameter& parameter) const override;
  void check_changeable() const override;
  void change(const std::function<Tensor(const Tensor&)>& change) override { replace(change); }
  std::shared_ptr<nn::ModuleExtension> clone(const nn::ClonedParameters& cloned) const override;
  // ---- ParameterOwner ----
  Tensor data(const nn::Parameter& parameter) const override;
  Tensor state(const nn::Parameter& parameter) const override;
  void set_data(const nn::Parameter& parameter, const Tensor& data) override;
  void set_whole(const nn::Parameter& parameter, const Tensor& whole) override;
  void before_write() override;
  std::vector<Group> ranks(const nn::Parameter& parameter) const override;
  void zeroed(const nn::Parameter& parameter) override;
  void check_steppable(const nn::Parameter& parameter) const override;
  void check_gradient_taken(const nn::Parameter& parameter) const override;
  std::string explain(const nn::Parameter& parameter, nn::WholeOf whole) const override;
  void requires_grad_changed(const nn::Parameter& parameter) override;
  void member_moved(const nn::Parameter& parameter, const nn::Parameter* from,
                    const Slot& to) noexcept override;
  nn::Parameter stepped_as(const nn::Parameter& parameter) const override;

 private:
  /// Null for a flat parameter.
  const Place* placed(const nn::Parameter& parameter) const;
  void bind(Members& members);
  void bind_one(Members& members, std::size_t i);
  bool kept_for_backward(ParameterGroup& group) const;
  AfterForward after_forward_of(const ParameterGroup& group) const;
  Members& members_of(const ParameterGroup& group);
  void refuse_summoned(std::string_view call) const;
  void check_unchanged(const Members& members, bool in_graph);
  void take_in(Members& members, std::size_t i);
  [[noreturn]] void fail_changed(const std::string& name) const;
  void use(Members& members);
  void begin_root(nn::Module& root);
  std::string name_of_mark(std::string_view moment) const;
  void repeat_begin();
  void repeat_end();
  void give_up() noexcept;
  void enter(std::span<const std::shared_ptr<ParameterGroup>> tied, bool in_program);
  void begin_use();
  void end_use();
  void leave(std::span<Tensor* const> outputs);
  void number() const;
  void apply_synchronising();
  void check_values(const nn::Module& module, std::span<Tensor* const> inputs) const;
  void cast_inputs(std::span<Tensor* const> inputs, bool root) const;

  UnitPolicy policy_;
  std::vector<Members> members_;
  std::vector<std::shared_ptr<ParameterGroup>> groups_;
  std::unordered_map<const void*, Place> places_;
  std::shared_ptr<Root> root_;
  std::string label_;  ///< name in the outermost module; empty: it is that
  Below below_;
  bool abandoned_ = false;
  StepCheck step_check_{};     ///< as a root
  std::vector<bool> running_;  ///< of each forward under way, whether a program has it whole
  Precision precision_ = Precision::reduced;
  bool synchronising_ = true;
  int no_syncs_ = 0;  ///< scopes
};

/// ShapeError, in the words of FSDP1, unless what was put in the place of a parameter or gradient has this
/// rank's shape.
void check_writeback(std::string_view what, const std::string& name, const Shape& expected,
                     const Shape& given);

/// The unit that `module` was made, or null.
Unit* unit_of(const nn::Module& module);
/// The unit that keeps a parameter's values, or null.
Unit* unit_of(const nn::Parameter& parameter);
/// The group that has a parameter, or that it is the flat one of; null for one that no unit keeps.
ParameterGroup* group_of(const nn::Parameter& parameter);
/// StateError for a parameter of which this rank has a part alone, since the module that it was sharded with
/// is gone.
void check_kept(std::string_view name, const nn::Parameter& parameter);
/// `what`, with the number of the parameter's model among the ranks that have its shards.
std::string called_of(const nn::Parameter& parameter, std::string what);
/// Those of `module` and below.
struct NamedUnit {
  std::string name;
  nn::Module* module;
  Unit* unit;
};
std::vector<NamedUnit> units_of(nn::Module& module);
/// `Unit::write_back` of all of them.
void write_back(nn::Module& module);
/// Of some of them.
void write_back(std::span<const NamedUnit> units);
/// The same of the units that have, or had, one of `parameters` and find another in its member. StateError,
/// under the name of `call`, for one that is in the module no longer: what ranks have of it is no part of
/// anything.
void write_back(std::string_view call, std::span<const nn::Parameter> parameters);

}  // namespace sherd::shard
