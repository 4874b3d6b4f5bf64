#include "nn/optimizer.h"

#include <fmt/ranges.h>

#include <cmath>

#include "autograd/capture/capture.h"
#include "autograd/capture/effects.h"
#include "autograd/node.h"
#include "nn/on_meta.h"
#include "nn/shared_gradients.h"
#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/log.h"
#include "runtime/ops.h"
#include "runtime/ops/copy.h"
#include "runtime/ops/order_free_norm.h"
#include "runtime/reach.h"
#include "runtime/timeline.h"

namespace sherd::nn {
namespace {

/// ValueError for a value that an option does not take.
void check_option(const Option& rule, double value, std::string_view what) {
  switch (rule.range) {
    case OptionRange::at_least_0:
      return check<ValueError>(value >= 0 && std::isfinite(value),
                               "optimizer: {} {} must be at least 0 and finite", what, value);
    case OptionRange::below_1:
      return check<ValueError>(value >= 0 && value < 1, "optimizer: {} {} must be at least 0 and below 1",
                               what, value);
    case OptionRange::yes_or_no:
      return check<ValueError>(value == 0 || value == 1, "optimizer: {} {} must be 0 or 1", what, value);
    case OptionRange::at_most_0:
      return check<ValueError>(value <= 0 && std::isfinite(value),
                               "optimizer: {} {} must be at most 0 and finite", what, value);
  }
}

std::string entry_of(std::size_t group, std::string_view option) {
  return fmt::format("group.{}.{}", group, option);
}

void check_steps(const Tensor& p, const Tensor& gradient) {
  check<ShapeError>(gradient.shape() == p.shape(),
                    "optimizer: a parameter of shape {} has a gradient of shape {}; clear or replace it",
                    p.shape(), gradient.shape());
  check<DeviceError>(
      on_meta(gradient) == on_meta(p),
      "optimizer: a parameter of shape {} is on {} and its gradient on {}; on meta there are no "
      "values",
      p.shape(), p.device(), gradient.device());
  check<StateError>(!shows_twice(p.layout()),
                    "optimizer: elements of a parameter of shape {} and strides {} share memory; make it of "
                    "a clone",
                    p.shape(), p.strides());
}

/// The tensors of a state by name; ValueError for a name that comes twice.
std::unordered_map<std::string, Tensor> by_name(StateDict state) {
  std::unordered_map<std::string, Tensor> found;
  for (auto& [name, tensor] : state)
    check<ValueError>(found.emplace(name, std::move(tensor)).second, "optimizer: the state has '{}' twice",
                      name);
  return found;
}

/// Whether `given`, of which nobody else sees the memory, can stand in the place of `wanted`.
bool can_replace(const Tensor& given, const Tensor& wanted) {
  return given.spec() == wanted.spec() && given.is_contiguous() && given.impl()->use_count() == 1 &&
         given.storage().use_count() == 1 && !given.storage().owned() && !given.storage().borrowed() &&
         !given.requires_grad();
}

/// A step counts for each parameter that it was to step: what ranks that share one compare after a fault.
struct Counted {
  std::vector<Parameter> all{}, written{};
  bool has_state;  ///< the optimizer keeps some

  void begin() const {
    for (const Parameter& p : written) p.step_count().broken_off = true;
  }
  void end() const {
    for (const Parameter& p : all) ++p.step_count().steps;
    for (const Parameter& p : written) {
      StepCount& count = p.step_count();
      ++count.written;
      if (has_state) ++count.state;
      count.broken_off = false;
    }
  }
};

}  // namespace

Optimizer::Optimizer(std::vector<ParamGroup> groups, std::vector<Option> options)
    : options_(std::move(options)) {
  for (const Option& option : options_) check_option(option, option.value, option.name);
  for (ParamGroup& group : groups) Optimizer::add_param_group(std::move(group));
}

Optimizer::~Optimizer() = default;

void Optimizer::add_param_group(ParamGroup given) {
  const MemoryScope held(MemoryUse::optimizer);
  if (given.lr) given.options["lr"] = *given.lr;
  if (given.weight_decay) given.options["weight_decay"] = *given.weight_decay;
  for (const auto& [name, value] : given.options) check_option(rule(name), value, name);
  std::unordered_map<const void*, std::size_t> added;
  for (const Parameter& p : given.params) {
    check<ValueError>(p.defined(), "optimizer: group {} holds an empty parameter", groups_.size());
    const auto before = group_of_.find(p.id());
    check<ValueError>(before == group_of_.end() && added.emplace(p.id(), groups_.size()).second,
                      "optimizer: a parameter of shape {} is in group {} and again in {}; list it once",
                      p.shape(), before == group_of_.end() ? groups_.size() : before->second, groups_.size());
  }
  Group group{std::move(given.params), {}, {}};
  for (const Option& option : options_) {
    const auto own = given.options.find(option.name);
    const double value = own == given.options.end() ? option.value : own->second;
    group.options.emplace_back(option.name, Tensor::scalar(value, {DType::f64, Device::cpu()}));
  }
  group.lr = group.options.at("lr");
  const auto add = [&] {
    for (const Parameter& p : group.params) p.step_count().state = 0;
    groups_.push_back(std::move(group));
    group_of_.merge(added);
  };
  if (state_.empty())  // in the constructor too, where the names of state are not to be asked for
    add();
  else
    change_options(add);
}

StateForm Optimizer::state_form(std::string_view name, const Parameter& p) const {
  if (name == "step") return {{}, DType::f64, 0};
  const Tensor& local = p.local();
  return {local.shape(), state_dtype(local.dtype())};
}

/// A step writes one tensor after another, so what does not fit is refused before the first.
void Optimizer::check_fits(const Parameter& p, const Slots& state, std::span<const std::string> names) const {
  const Tensor local = p.local();
  for (std::size_t k = 0; k < names.size(); ++k) {
    const StateForm form = state_form(names[k], p);
    check<StateError>(
        state[k].shape() == form.shape,
        "optimizer: a parameter has shape {} now, its '{}' shape {}; make a new optimizer after "
        "a parameter was replaced by one of another shape",
        local.shape(), names[k], state[k].shape());
    check<StateError>(
        state[k].dtype() == form.dtype && state[k].device() == local.device(),
        "optimizer: a parameter of shape {} is {} on {}, its '{}' is {} on {}; make the optimizer "
        "after the model was moved or cast, or load a state into a new one",
        local.shape(), name_of(local.dtype()), local.device(), names[k], name_of(state[k].dtype()),
        state[k].device());
  }
}

void Optimizer::step_unless(const Tensor& skip) {
  check<ShapeError>(skip.numel() == 1, "step_unless: takes one element, got shape {}", skip.shape());
  if (!skips_on_device()) {
    if (skip.item() == 0) return step();
    for (const Group& group : groups_)
      for (const Parameter& p : group.params) ++p.step_count().steps;
    return;
  }
  const NoGrad guard;
  step_with(skip_, to(not_equal(reshape(skip.detach(), {}), 0), DType::f32));
}

void Optimizer::step_clipped(const Tensor& norm, double max_norm) {
  check<ShapeError>(norm.numel() == 1, "step_clipped: takes the norm in one element, got shape {}",
                    norm.shape());
  check<ValueError>(max_norm >= 0, "step_clipped: limit {} must be at least 0", max_norm);
  const NoGrad guard;
  const Tensor one = reshape(to(norm.detach(), DType::f64), {});
  if (clips_on_device()) {
    step_with(factor_, ops::clip_factor(one, max_norm));
    return;
  }
  std::vector<Parameter> params;
  for (const Group& group : groups_) params.insert(params.end(), group.params.begin(), group.params.end());
  clip_grads_with_norm_(params, max_norm, one);
  step_all();
}

void Optimizer::step_with(Tensor& input, Tensor value) {
  input = std::move(value);
  try {
    step_all();
  } catch (...) {
    input = {};
    throw;
  }
  input = {};
}

void Optimizer::step() { step_all(); }

void Optimizer::step(std::span<const Parameter> params) {
  std::vector<std::vector<Parameter>> of_groups(groups_.size());
  for (const Parameter& p : params) {
    const auto group = group_of_.find(p.id());
    check<ValueError>(group != group_of_.end(),
                      "optimizer: step of a parameter of shape {} that is not among its own; pass those",
                      p.defined() ? p.shape() : Shape{});
    of_groups[group->second].push_back(p);
  }
  step_those(of_groups);
}

void Optimizer::step_all() {
  std::vector<std::vector<Parameter>> of_groups;
  for (const Group& group : groups_) of_groups.push_back(group.params);
  step_those(of_groups);
}

/// Once, for a dtype of 16 bits that is stepped as it is.
void Optimizer::tell_of_lost_steps(DType dtype) {
  if (told_ || size_of(dtype) != 2 || size_of(state_dtype(dtype)) != 2) return;
  told_ = true;
  write_log(
      LogLevel::warning,
      "optimizer: parameters in {} are stepped without f32 masters, and a step below 1/{} of a value is "
      "lost; use AdamW with .masters = nn::Masters::in_f32, or keep the parameters in f32 "
      "(docs/mixed_precision.md)",
      dtype, dtype == DType::bf16 ? 512 : 4096);
}

void Optimizer::step_those(std::span<const std::vector<Parameter>> of_groups) {
  const NoGrad guard;
  const MemoryScope held(MemoryUse::optimizer);
  const TimelineSlice slice("optimizer", "step");
  const std::vector<std::string> names = state_names();
  struct Part {
    std::vector<Parameter> params;
    std::vector<Slots*> slots;
  };
  std::vector<Part> parts(groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g)
    for (const Parameter& p : of_groups[g]) {
      if (p.owner() != nullptr) p.owner()->check_steppable(p);
      const Tensor gradient = p.grad();
      if (!gradient.defined()) continue;
      check_steps(p.local(), gradient);
      const auto state = state_.find(p.id());
      if (state != state_.end()) check_fits(p, state->second, names);
      parts[g].params.push_back(p);
      parts[g].slots.push_back(state == state_.end() ? nullptr : &state->second);
    }
  for (const Part& part : parts)
    for (const Parameter& p : part.params) tell_of_lost_steps(p.local().dtype());
  for (const std::vector<Parameter>& params : of_groups)
    for (const Parameter& p : params)
      if (p.owner() != nullptr) p.owner()->before_write();
  for (auto& [params, slots] : parts)
    for (std::size_t i = 0; i < params.size(); ++i)
      if (slots[i] == nullptr)
        slots[i] = &state_.emplace(params[i].id(), first_state(params[i])).first->second;
  Counted counted{.has_state = !names.empty()};
  for (const std::vector<Parameter>& params : of_groups)
    counted.all.insert(counted.all.end(), params.begin(), params.end());
  for (const Part& part : parts)
    counted.written.insert(counted.written.end(), part.params.begin(), part.params.end());
  if (capturing()) repeat_in_replays([counted] { counted.begin(); });
  counted.begin();
  for (std::size_t g = 0; g < groups_.size(); ++g)
    if (!parts[g].params.empty()) step_group(groups_[g], parts[g].params, parts[g].slots);
  if (capturing()) repeat_in_replays([counted] { counted.end(); });
  counted.end();
}

/// What `fresh` of an application's own optimizer gives is held against its names.
Optimizer::Slots Optimizer::first_state(const Parameter& p) const {
  const std::vector<std::string> names = state_names();
  const Tensor local = p.local();
  std::vector<StateForm> forms;
  for (const std::string& name : names) forms.push_back(state_form(name, p));
  Slots slots = fresh(local);
  if (slots.empty())
    for (const StateForm& form : forms) slots.push_back(zeros(form.shape, {form.dtype, local.device()}));
  check<StateError>(slots.size() == names.size(), "optimizer: fresh gives {} tensors for the {} names ({})",
                    slots.size(), names.size(), fmt::join(names, ", "));
  for (std::size_t k = 0; k < names.size(); ++k)
    check<StateError>(
        slots[k].defined() && slots[k].device() == local.device() && slots[k].dtype() == forms[k].dtype,
        "optimizer: fresh gives {} as '{}' of a parameter that is {} on {}; state has its dtype, or what "
        "state_dtype says (only 'step' is f64), and its device",
        slots[k].defined() ? fmt::format("{} on {}", name_of(slots[k].dtype()), slots[k].device())
                           : "an empty handle",
        names[k], name_of(local.dtype()), local.device());
  for (std::size_t k = 0; k < names.size(); ++k)
    check<StateError>(slots[k].shape() == forms[k].shape,
                      "optimizer: fresh gives '{}' of shape {} for a parameter of shape {}; state has the "
                      "parameter's shape, or what state_form says (only 'step' has its own)",
                      names[k], slots[k].shape(), local.shape());
  return slots;
}

void Optimizer::zero_grad(ZeroGrad mode) {
  const NoGrad guard;
  for (Group& group : groups_)
    for (Parameter& p : group.params) {
      if (p.owner() != nullptr) p.owner()->zeroed(p);
      if (mode == ZeroGrad::to_none) {
        p.set_grad({});
      } else if (p.grad().defined()) {
        zero_(p.grad());
        if (auto* shared = dynamic_cast<SharedGradients*>(sink_of(p.local()))) shared->zeroed(p.local());
      }
    }
}

void Optimizer::set_lr(double lr) { set_option("lr", lr); }
void Optimizer::set_lr(std::size_t group, double lr) { set_option(group, "lr", lr); }
double Optimizer::lr(std::size_t group) const { return group_at(group).lr.item(); }

const Option& Optimizer::rule(std::string_view name) const {
  const auto found = std::ranges::find(options_, name, &Option::name);
  check<ValueError>(found != options_.end(), "optimizer: groups have no option '{}'; they have {}", name,
                    fmt::join(option_names(), ", "));
  return *found;
}

std::vector<std::string> Optimizer::option_names() const {
  std::vector<std::string> names;
  for (const Option& option : options_) names.push_back(option.name);
  return names;
}

bool Optimizer::any(std::string_view option) const {
  return std::ranges::any_of(groups_, [&](const Group& group) { return group.option(option) != 0; });
}

double Optimizer::option(std::string_view name, std::size_t group) const {
  rule(name);
  return group_at(group).option(name);
}

double Optimizer::Group::option(std::string_view name) const {
  const Tensor& value = options.at(name);
  return name == "lr" ? value.item() : *reinterpret_cast<const double*>(value.raw());
}

Optimizer::States Optimizer::arranged(std::span<const std::string> from,
                                      std::span<const std::string> to) const {
  States states;
  for (const Group& group : groups_)
    for (const Parameter& p : group.params) {
      const auto found = state_.find(p.id());
      if (found == state_.end()) continue;
      Slots slots = first_state(p);
      for (std::size_t k = 0; k < to.size(); ++k)
        if (const auto old = std::ranges::find(from, to[k]); old != from.end())
          slots[k] = found->second[static_cast<std::size_t>(old - from.begin())];
      states.emplace(p.id(), std::move(slots));
    }
  return states;
}

/// Runs `change`, which may change what is kept for parameters.
template <class Change>
void Optimizer::change_options(const Change& change) {
  const MemoryScope held(MemoryUse::optimizer);
  const NoGrad guard;
  const std::vector<std::string> before = state_names();
  change();
  if (const std::vector<std::string> now = state_names(); now != before) state_ = arranged(before, now);
}

namespace {

void write_number(Tensor to, double value) { *to.mutable_data<double>() = value; }

}  // namespace

void Optimizer::set_option(std::string_view name, double value) {
  check_option(rule(name), value, name);
  change_options([&] {
    for (const Group& group : groups_) write_number(group.options.at(name), value);
  });
}
void Optimizer::set_option(std::size_t group, std::string_view name, double value) {
  check_option(rule(name), value, name);
  const Tensor& option = group_at(group).options.at(name);
  change_options([&] { write_number(option, value); });
}

std::vector<std::string> Optimizer::state_names_with(
    const std::function<std::optional<double>(const std::string&)>& number) const {
  std::vector<std::pair<Tensor, double>> before;
  for (std::size_t g = 0; g < groups_.size(); ++g)
    for (const auto& [name, value] : groups_[g].options)
      if (const auto other = number(entry_of(g, name))) {
        before.emplace_back(value, value.item());
        write_number(value, *other);
      }
  std::vector<std::string> names = state_names();
  for (const auto& [tensor, value] : before) write_number(tensor, value);
  return names;
}

const Optimizer::Group& Optimizer::group_at(std::size_t group) const {
  check<ValueError>(group < groups_.size(), "optimizer: there is no group {}; it has {}", group,
                    groups_.size());
  return groups_[group];
}

StateDict Optimizer::state_dict() const {
  StateDict dict;
  const std::vector<std::string> names = state_names();
  std::size_t index = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (const auto& [name, value] : groups_[g].options) dict.emplace_back(entry_of(g, name), value);
    for (const Parameter& p : groups_[g].params) {
      if (const auto found = state_.find(p.id()); found != state_.end())
        for (std::size_t k = 0; k < names.size(); ++k)
          dict.emplace_back(fmt::format("state.{}.{}", index, names[k]), found->second[k]);
      ++index;
    }
  }
  return dict;
}

namespace {

/// The way out where a state does not fit the groups.
constexpr std::string_view other_groups =
    "; it is of another optimizer or of other groups: make this one of the same class with as many groups of "
    "as many parameters, or save and load by name with shard::full_optimizer_state(model, optimizer)";

}  // namespace

std::function<void()> Optimizer::stage_state_dict(StateDict given) {
  const NoGrad guard;
  const MemoryScope held(MemoryUse::optimizer);
  std::unordered_map<std::string, Tensor> from = by_name(std::move(given));
  std::unordered_map<const void*, Slots> state;
  std::vector<Parameter> anew;  // whose state may begin with what they are by then
  std::size_t index = 0, used = 0;
  const auto take = [&](const std::string& name, Tensor& into, const Parameter* p = nullptr) {
    const auto found = from.find(name);
    check<ValueError>(found != from.end(), "optimizer: the state lacks '{}'{}", name, other_groups);
    const bool owned = p != nullptr && p->owner() != nullptr;
    check<ShapeError>(found->second.shape() == into.shape(),
                      "optimizer: '{}' has shape {}, the parameter needs {}{}", name, found->second.shape(),
                      into.shape(), owned ? "; " + p->owner()->explain(*p, WholeOf::optimizer_state) : "");
    check<DeviceError>(on_meta(found->second) == on_meta(into),
                       "optimizer: '{}' is on {} in the state and on {} here; on meta there are no values",
                       name, found->second.device(), into.device());
    if (can_replace(found->second, into)) {
      into = std::move(found->second);
      into.storage().set_use(MemoryUse::optimizer);
    } else {
      copy_(into, found->second);
    }
    ++used;
  };
  const auto check_count = [](const std::string& name, const Tensor& count) {
    if (on_meta(count)) return;
    const double steps = to(count, DType::f64).item();
    check<ValueError>(steps >= 0 && steps == std::floor(steps) && std::isfinite(steps),
                      "optimizer: '{}' is {}; a count of steps is a whole number from 0 on", name, steps);
  };
  std::vector<std::pair<Tensor, double>> numbers;  // the options and what they become
  std::unordered_map<std::string, double> by_entry;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    check<ValueError>(from.contains(entry_of(g, "lr")),
                      "optimizer: the state has no rate for group {} of {}{}", g, groups_.size(),
                      other_groups);
    for (const auto& [option, tensor] : groups_[g].options) {
      const std::string name = entry_of(g, option);
      if (!from.contains(name)) continue;
      Tensor value = zeros({}, {DType::f64, Device::cpu()});
      take(name, value);
      check_option(rule(option), value.item(), name);
      numbers.emplace_back(tensor, value.item());
      by_entry[name] = value.item();
    }
  }
  const std::vector<std::string> before = state_names(), names = state_names_with([&](const auto& name) {
                                                           const auto found = by_entry.find(name);
                                                           return found == by_entry.end()
                                                                      ? std::nullopt
                                                                      : std::optional(found->second);
                                                         });
  // What is kept depends on the options: they are the new ones until it is known whether all fits.
  const auto swap_numbers = [&numbers] {
    for (auto& [tensor, value] : numbers) {
      const double other = tensor.item();
      write_number(tensor, value);
      value = other;
    }
  };
  swap_numbers();
  try {
    for (const Group& group : groups_)
      for (const Parameter& p : group.params) {
        if (!names.empty() && from.contains(fmt::format("state.{}.{}", index, names[0]))) {
          Slots slots = first_state(p);
          for (std::size_t k = 0; k < names.size(); ++k) {
            const std::string name = fmt::format("state.{}.{}", index, names[k]);
            take(name, slots[k], &p);
            if (names[k] == "step") check_count(name, slots[k]);
          }
          state.emplace(p.id(), std::move(slots));
        } else if (state_.contains(p.id()))
          anew.push_back(p);
        ++index;
      }
    check<ValueError>(used == from.size(),
                      "optimizer: {} of the state's {} entries belong to no parameter here{}",
                      from.size() - used, from.size(), other_groups);
  } catch (...) {
    swap_numbers();
    throw;
  }
  swap_numbers();
  return [this, numbers = std::move(numbers), before, names, state = std::move(state),
          anew = std::move(anew)]() mutable {
    const NoGrad guard;
    const MemoryScope held(MemoryUse::optimizer);
    for (const auto& [tensor, value] : numbers) write_number(tensor, value);
    if (names != before) state_ = arranged(before, names);
    for (const Parameter& p : anew) state.emplace(p.id(), first_state(p));
    for (const Group& group : groups_)
      for (const Parameter& p : group.params) p.step_count().state = 0;
    // Into the memory that is there, which captured steps know.
    for (auto& [id, slots] : state) {
      const auto found = state_.find(id);
      if (found == state_.end()) continue;
      for (std::size_t k = 0; k < slots.size(); ++k)
        if (found->second[k].spec() == slots[k].spec()) slots[k] = copy_(found->second[k], slots[k]);
    }
    state_ = std::move(state);
  };
}

}  // namespace sherd::nn
