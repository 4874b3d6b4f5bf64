#include "shard/step_in_backward.h"

#include <algorithm>

#include "runtime/context.h"
#include "shard/early_steps.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

template <class F>
void each_parameter(const nn::Optimizer& optimizer, F&& visit) {
  for (std::size_t g = 0; g < optimizer.group_count(); ++g)
    for (const nn::Parameter& p : optimizer.parameters(g)) visit(p);
}

const ParameterGroup* group_of(const nn::Parameter& p) {
  const Unit* unit = unit_of(p);
  if (unit == nullptr) return nullptr;
  const Members* flat = unit->flattened(p);
  return (flat != nullptr ? flat : unit->place(p).members)->group.get();
}

}  // namespace

StepInBackward::StepInBackward(nn::Optimizer& optimizer) : optimizer_(&optimizer) {
  EarlySteps::current().add(optimizer);
}
StepInBackward::~StepInBackward() { EarlySteps::current().remove(*optimizer_); }

EarlySteps& EarlySteps::current() { return Context::current().slot<EarlySteps>(); }

void EarlySteps::add(nn::Optimizer& optimizer) {
  check<StateError>(std::ranges::find(steppers_, &optimizer, &Stepper::optimizer) == steppers_.end(),
                    "StepInBackward: this optimizer steps within backwards already; one scope is enough");
  Stepper stepper{.optimizer = &optimizer};
  each_parameter(optimizer, [&](const nn::Parameter& p) {
    const Unit* unit = unit_of(p);
    check<ValueError>(unit != nullptr,
                      "StepInBackward: a parameter of shape {} is not sharded, and no average of it comes in "
                      "a backward; give it an optimizer of its own",
                      p.shape());
    check<ValueError>(!unit->hides(p),
                      "StepInBackward: a parameter of shape {} is part of a flat parameter, which is stepped "
                      "in its place; make the optimizer after FullyShardedDataParallel",
                      p.shape());
    stepper.ids.insert(p.id());
  });
  steppers_.push_back(std::move(stepper));
}

void EarlySteps::remove(const nn::Optimizer& optimizer) noexcept {
  std::erase_if(steppers_, [&](const Stepper& s) { return s.optimizer == &optimizer; });
}

/// Groups may be others than in the last backward: a module that is moved or cast has new ones.
bool EarlySteps::begin() {
  for (Stepper& s : steppers_) {
    s.parameters.clear();
    each_parameter(*s.optimizer, [&](const nn::Parameter& p) { s.parameters[group_of(p)].push_back(p); });
  }
  return !steppers_.empty();
}

void EarlySteps::step(const ParameterGroup& group) {
  struct Stepping {
    bool& on;
    explicit Stepping(bool& b) : on(b) { on = true; }
    ~Stepping() { on = false; }
  } scope(stepping_);
  for (Stepper& s : steppers_)
    if (const auto found = s.parameters.find(&group); found != s.parameters.end())
      s.optimizer->step(found->second);
}

bool EarlySteps::claims(const nn::Parameter& parameter) const {
  return !stepping_ &&
         std::ranges::any_of(steppers_, [&](const Stepper& s) { return s.ids.contains(parameter.id()); });
}

}  // namespace sherd::shard
