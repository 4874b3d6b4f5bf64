// The optimizers of a rank that step within backwards: a part of its engine.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "nn/optimizer.h"

namespace sherd::shard {

class Engine;
class ParameterGroup;

class EarlySteps {
 public:
  explicit EarlySteps(const Engine& engine) : engine_(engine) {}
  static EarlySteps& current();

  void add(nn::Optimizer& optimizer);
  void remove(const std::weak_ptr<const void>& optimizer) noexcept;

  /// A backward begins: its groups may be others than in the last one, since a module that is moved or cast
  /// has new ones. The errors of `add` for parameters that an optimizer was given since; StateError where one
  /// is gone.
  void begin();
  bool any() const { return !steppers_.empty(); }
  /// StateError if a scope ended since, when some ranks may have stepped and others not.
  void check_whole() const;
  /// Whether one of the group's parameters is stepped here.
  bool steps(const ParameterGroup& group);
  /// Steps the group's parameters, whose averages are in `.grad`. Within the walk peers may come to it later:
  /// what all ranks are to do with the write is left to `written`.
  enum class When : std::uint8_t { in_walk, at_end };
  void step(ParameterGroup& group, When when);
  /// Tells the owners of parameters that were stepped within the walk, at its end.
  void written(const ParameterGroup& group);
  /// A backward ends, or throws: what it has stepped then is a part of a step.
  void over() { stepped_.clear(); }
  void broke_off() noexcept;
  /// While a step runs.
  bool stepping() const { return stepping_ != nullptr; }
  /// The group of the step that runs within a walk, or null.
  ParameterGroup* in_walk() const { return when_ == When::in_walk ? stepping_ : nullptr; }
  /// Whether only this may step the parameter now.
  bool claims(const nn::Parameter& parameter);

 private:
  struct Stepper {
    nn::Optimizer* optimizer;
    std::weak_ptr<const void> alive;
    std::size_t groups_checked = 0;  ///< of the optimizer's, which gets more
    std::size_t groups_known = 0;    ///< whose parameters are here:
    std::unordered_set<const void*> ids{};
    bool known = false;  ///< the next one, in this backward
    std::unordered_map<const ParameterGroup*, std::vector<nn::Parameter>> parameters{};
  };
  static void check_new_groups(Stepper& stepper);
  static const std::unordered_set<const void*>& ids(Stepper& stepper);
  const std::vector<nn::Parameter>& parameters(Stepper& stepper, const ParameterGroup& group) const;

  const Engine& engine_;
  std::vector<Stepper> steppers_;
  std::vector<nn::Parameter> stepped_;  ///< in this backward
  bool ended_within_ = false;           ///< a scope, the backward
  ParameterGroup* stepping_ = nullptr;
  When when_ = When::at_end;
};

}  // namespace sherd::shard
