#include "shard/step_in_backward.h"

#include <algorithm>
#include <utility>

#include "shard/early_steps.h"
#include "shard/unit.h"

namespace sherd::shard {

namespace {

/// Whether both are one optimizer's, also when it is gone.
bool same_lifetime(const std::weak_ptr<const void>& a, const std::weak_ptr<const void>& b) {
  return !a.owner_before(b) && !b.owner_before(a);
}

}  // namespace

StepInBackward::StepInBackward(nn::Optimizer& optimizer) : optimizer_(optimizer.lifetime()) {
  EarlySteps::current().add(optimizer);
}
StepInBackward::~StepInBackward() { EarlySteps::current().remove(optimizer_); }

EarlySteps& EarlySteps::current() { return Engine::current().early_steps(); }

void EarlySteps::add(nn::Optimizer& optimizer) {
  check<StateError>(!engine_.in_backward(),
                    "StepInBackward: a scope begins within a backward, of which it would step a part; begin "
                    "it before");
  const auto same = [&](const Stepper& s) { return same_lifetime(s.alive, optimizer.lifetime()); };
  check<StateError>(std::ranges::none_of(steppers_, same),
                    "StepInBackward: this optimizer steps within backwards already; one scope is enough");
  Stepper stepper{.optimizer = &optimizer, .alive = optimizer.lifetime()};
  check_new_groups(stepper);
  steppers_.push_back(std::move(stepper));
}

void EarlySteps::check_new_groups(Stepper& stepper) {
  for (; stepper.groups_checked < stepper.optimizer->group_count(); ++stepper.groups_checked)
    for (const nn::Parameter& p : stepper.optimizer->parameters(stepper.groups_checked)) {
      const Unit* unit = unit_of(p);
      check<ValueError>(unit != nullptr,
                        "StepInBackward: a parameter of shape {} is not sharded, and no average of it comes "
                        "in a backward; give it an optimizer of its own",
                        p.shape());
      check<ValueError>(!unit->hides(p),
                        "StepInBackward: a parameter of shape {} is part of a flat parameter, which is "
                        "stepped in its place; make the optimizer after FullyShardedDataParallel",
                        p.shape());
    }
}

const std::unordered_set<const void*>& EarlySteps::ids(Stepper& stepper) {
  for (; stepper.groups_known < stepper.optimizer->group_count(); ++stepper.groups_known)
    for (const nn::Parameter& p : stepper.optimizer->parameters(stepper.groups_known))
      stepper.ids.insert(p.id());
  return stepper.ids;
}

void EarlySteps::remove(const std::weak_ptr<const void>& optimizer) noexcept {
  ended_within_ = ended_within_ || engine_.in_backward();
  std::erase_if(steppers_, [&](const Stepper& s) { return same_lifetime(s.alive, optimizer); });
}

void EarlySteps::begin() {
  ended_within_ = false;
  stepped_.clear();
  for (Stepper& s : steppers_) {
    check<StateError>(
        !s.alive.expired(),
        "StepInBackward: its optimizer is gone, which would step in this backward; end the scope "
        "before the optimizer");
    check_new_groups(s);
    s.known = false;
  }
}

void EarlySteps::check_whole() const {
  check<StateError>(!ended_within_,
                    "StepInBackward: a scope ended within a backward, which has stepped some groups and not "
                    "others; end it between backwards");
}

const std::vector<nn::Parameter>& EarlySteps::parameters(Stepper& stepper,
                                                         const ParameterGroup& group) const {
  static const std::vector<nn::Parameter> none;
  if (!std::exchange(stepper.known, true)) {
    stepper.parameters.clear();
    for (std::size_t g = 0; g < stepper.optimizer->group_count(); ++g)
      for (const nn::Parameter& p : stepper.optimizer->parameters(g))
        stepper.parameters[group_of(p)].push_back(p);
  }
  const auto found = stepper.parameters.find(&group);
  return found != stepper.parameters.end() ? found->second : none;
}

bool EarlySteps::steps(const ParameterGroup& group) {
  return std::ranges::any_of(steppers_, [&](Stepper& s) { return !parameters(s, group).empty(); });
}

void EarlySteps::step(ParameterGroup& group, When when) {
  struct Stepping {
    ParameterGroup*& group;
    ~Stepping() { group = nullptr; }
  } scope{stepping_};
  stepping_ = &group;
  when_ = when;
  for (Stepper& s : steppers_)
    if (const auto& own = parameters(s, group); !own.empty()) {
      stepped_.insert(stepped_.end(), own.begin(), own.end());
      s.optimizer->step(own);
    }
}

void EarlySteps::broke_off() noexcept {
  for (const nn::Parameter& p : stepped_) p.step_count().broken_off = true;
  stepped_.clear();
}

void EarlySteps::written(const ParameterGroup& group) {
  for (Stepper& s : steppers_)
    for (const nn::Parameter& p : parameters(s, group)) p.owner()->before_write();
}

bool EarlySteps::claims(const nn::Parameter& parameter) {
  return !stepping() && std::ranges::any_of(steppers_, [&](Stepper& s) {
    return !s.alive.expired() && ids(s).contains(parameter.id());
  });
}

}  // namespace sherd::shard
