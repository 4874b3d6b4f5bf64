// What a module is given when it is sharded: its groups, its casts, and what its parameters show.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "nn/module.h"
#include "shard/engine.h"

namespace sherd::shard {

/// When a module's floating inputs are cast to the parameters' precision.
enum class InputCast : std::uint8_t { never, when_root, with_parameters, always };

/// What a unit leaves to the program, by names below its module.
struct Ignored {
  std::vector<std::string> parameters, modules;
  /// Whether it names a member, or a module that holds it.
  bool covers(std::string_view name) const;
  /// Takes over what a module named `name` ignores.
  void add(std::string_view name, const Ignored& of_inner);
};

struct UnitPolicy {
  InputCast input_cast = InputCast::never;
  std::optional<DType> param_dtype, output_dtype, buffer_dtype;
  Precision evaluation = Precision::reduced;
  std::optional<Device> device;  ///< where a root's inputs go
  AfterForward after_forward = AfterForward::free;
  SchedulePolicy schedule;
  Ignored ignored;
};

/// A parameter's place among all of the outermost sharded module, in the order of its members.
struct MemberOrder {
  std::uint64_t root = 0;  ///< another for every outermost module
  std::size_t index = 0;
};

/// A group's parameters, as objects.
struct Members {
  std::shared_ptr<ParameterGroup> group;
  std::vector<nn::Parameter> parameters;
  std::vector<MemberOrder> order{};           ///< of each
  nn::Parameter flat;                         ///< in their place, if the group has one flat parameter
  std::array<std::vector<Tensor>, 2> used{};  ///< what forward reads, by `Precision`; made when it is needed

  /// What forward reads in `precision`; of a group that computes alike in both, the same.
  const std::vector<Tensor>& used_in(Precision precision);
};

class Unit final : public nn::ModuleExtension, public nn::ParameterOwner {
 public:
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
  void set_order(const nn::Parameter& parameter, MemberOrder order);
  /// The group for which `parameter` is the flat one, or null.
  const Members* flattened(const nn::Parameter& parameter) const;
  /// What forwards read from now on.
  void compute_in(Precision precision);
  /// Another shard for every group that `change` gives one; graphs from before keep the old ones. Nothing is
  /// changed when it throws.
  void replace(const std::function<Tensor(const Tensor&)>& change);
  /// The wrapping that it is part of threw: neither it nor a second attempt uses it.
  void abandon() { abandoned_ = true; }
  void check_complete(const nn::Module& module) const;
  /// Whether backwards average gradients, where no scope says that they do not.
  void set_synchronising(bool synchronising);
  void begin_no_sync();
  void end_no_sync();

  // ---- ModuleExtension ----
  void before_forward(nn::Module& module, std::span<Tensor* const> inputs) override;
  void after_forward(nn::Module& module, std::span<Tensor* const> outputs) override;
  void forward_failed(nn::Module& module) noexcept override;
  std::vector<nn::NamedParameter> own_parameters() const override;
  bool hides(const nn::Parameter& parameter) const override;
  void change(const std::function<Tensor(const Tensor&)>& change) override { replace(change); }
  std::shared_ptr<nn::ModuleExtension> clone(const nn::ClonedParameters& copy_of) const override;
  // ---- ParameterOwner ----
  Tensor data(const nn::Parameter& parameter) const override;
  void set_data(const nn::Parameter& parameter, const Tensor& data) override;
  void set_whole(const nn::Parameter& parameter, const Tensor& whole) override;
  void before_write() override;
  std::vector<Group> ranks(const nn::Parameter& parameter) const override;
  void zeroed(const nn::Parameter& parameter) override;
  void check_steppable(const nn::Parameter& parameter) const override;
  std::string explain(const nn::Parameter& parameter, nn::WholeOf whole) const override;
  void requires_grad_changed(const nn::Parameter& parameter) override;

 private:
  void bind(Members& members);
  void use(Members& members);
  void take_over(nn::Module& root);
  void begin_root(nn::Module& root);
  void cast_buffers(nn::Module& root) const;
  void apply_synchronising();
  void check_values(const nn::Module& module, std::span<Tensor* const> inputs) const;
  void cast_inputs(std::span<Tensor* const> inputs, bool root) const;

  UnitPolicy policy_;
  std::vector<Members> members_;
  std::vector<std::shared_ptr<ParameterGroup>> groups_;
  std::unordered_map<const void*, Place> places_;
  std::shared_ptr<Root> root_;
  /// The parameter objects below, by member, when it ran as a root and those below got its schedule.
  std::vector<const void*> below_;
  Ignored ignored_below_;
  bool casts_buffers_ = false;  ///< of this unit or one below, as a root
  bool took_over_ = false, abandoned_ = false;
  int running_ = 0;  ///< forwards under way
  Precision precision_ = Precision::reduced;
  bool synchronising_ = true;
  int no_syncs_ = 0;  ///< scopes
};

/// The unit that `module` was made, or null.
Unit* unit_of(const nn::Module& module);
/// The unit that keeps a parameter's values, or null.
Unit* unit_of(const nn::Parameter& parameter);
/// Those of `module` and below.
struct NamedUnit {
  std::string name;
  nn::Module* module;
  Unit* unit;
};
std::vector<NamedUnit> units_of(nn::Module& module);

}  // namespace sherd::shard
