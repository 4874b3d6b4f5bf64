#include "shard/optimizer_state.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/build.h"
#include "shard/fully_shard.h"
#include "shard/state_source.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

using Entries = std::unordered_map<std::string, Tensor>;

std::string entry(const std::string& key, std::string_view name) {
  return fmt::format("state.{}.{}", key, name);
}

std::string group_entry(std::size_t group, std::string_view option) {
  return fmt::format("group.{}.{}", group, option);
}

}  // namespace

std::vector<nn::Parameter> all_parameters(const nn::Optimizer& optimizer) {
  std::vector<nn::Parameter> all;
  for (std::size_t g = 0; g < optimizer.group_count(); ++g)
    all.insert(all.end(), optimizer.parameters(g).begin(), optimizer.parameters(g).end());
  return all;
}

std::string state_entry(std::size_t place, std::string_view what) {
  return entry(std::to_string(place), what);
}

Tensor no_state(const nn::Optimizer& optimizer, const nn::Parameter& p, std::string_view name) {
  const nn::StateForm form = optimizer.state_form(name, p);
  return zeros(form.shape, {form.dtype, p.local().device()});
}

namespace {

/// From a run of elements to that of the numbers of `per` of them each whose first elements it has.
std::int64_t ceil_of(std::int64_t elements, std::int64_t per) { return (elements + per - 1) / per; }

}  // namespace

Run kept_of(const Run& elements, std::int64_t per) {
  Run run = elements;
  run.begin = elements.begin / per;
  run.numel = elements.numel == 0 ? 0 : ceil_of(elements.begin + elements.numel, per) - run.begin;
  return run;
}

Run saved_of(const Run& elements, std::int64_t per) {
  Run run = elements;
  run.begin = ceil_of(elements.begin, per);
  run.numel = ceil_of(elements.begin + elements.numel, per) - run.begin;
  return run;
}

std::vector<std::string> state_names_with(const nn::Optimizer& optimizer, const nn::StateDict& state) {
  return optimizer.state_names_with([&](const std::string& name) -> std::optional<double> {
    const auto found = std::ranges::find(state, name, &nn::StateDict::value_type::first);
    if (found == state.end() || found->second.numel() != 1) return std::nullopt;
    return to(found->second, DType::f64).item();
  });
}

void check_optimizer(const nn::Optimizer& optimizer) { write_back("optimizer", all_parameters(optimizer)); }

namespace {

/// Steps that each parameter has taken on any rank, -1 for one without state. A rank that owns nothing of a
/// parameter has no gradient of it either, and so no state; one that went back to a checkpoint without state
/// has zeros where it had some.
std::vector<double> steps_taken(const std::vector<nn::Parameter>& params, const Entries& own,
                                std::string_view first_name) {
  std::vector<double> steps;
  std::vector<std::vector<Group>> ranks;
  std::vector<std::pair<Group, nn::Parameter>> groups;  // with the first parameter of each
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto step = own.find(state_entry(i, "step"));
    const bool here = own.contains(state_entry(i, first_name));
    steps.push_back(!here ? -1 : step == own.end() ? 0 : step->second.item());
    ranks.push_back(params[i].owner() != nullptr ? params[i].owner()->ranks(params[i])
                                                 : std::vector<Group>());
    for (const Group& group : ranks[i])
      if (std::ranges::none_of(groups, [&](const auto& other) { return other.first == group; }))
        groups.emplace_back(group, params[i]);
  }
  for (const auto& [group, first] : groups) {
    const Tensor most = Tensor::from(steps, {std::ssize(steps)}, Device::cpu());
    group.all_reduce(most, ReduceOp::max(), {.label = called_of(first, "optimizer state")});
    const std::vector<double> of_all = most.to_vector<double>();
    for (std::size_t i = 0; i < params.size(); ++i)
      if (std::ranges::find(ranks[i], group) != ranks[i].end()) steps[i] = of_all[i];
  }
  return steps;
}

/// A parameter as the unsharded optimizer lists it: one of this optimizer's, or one within a flat one of its.
struct Listed {
  nn::Parameter parameter;
  std::size_t index = 0;          ///< in the list of this optimizer's parameters
  const Members* flat = nullptr;  ///< the group of the flat one
  std::size_t member = 0;         ///< the place there
  MemberOrder order{};            ///< the outermost module's number by its first appearance in the list
  std::size_t clone = 0;          ///< how many with this order are before it in the list: clones share it
};

/// All parameters of an optimizer, by groups. A flat parameter lists its unit's own before those of units
/// within, so a group that has one is put into the order of the outermost module's members, in which an
/// optimizer over the unsharded module has them.
std::vector<std::vector<Listed>> listed(const nn::Optimizer& optimizer) {
  std::vector<std::vector<Listed>> groups;
  std::size_t index = 0;
  for (std::size_t g = 0; g < optimizer.group_count(); ++g) {
    std::vector<Listed>& list = groups.emplace_back();
    std::vector<std::uint64_t> roots;
    bool any_flat = false;
    for (const nn::Parameter& p : optimizer.parameters(g)) {
      const Unit* unit = unit_of(p);
      const Members* flat = unit != nullptr ? unit->flattened(p) : nullptr;
      if (flat != nullptr) {
        any_flat = true;
        for (std::size_t i = 0; i < flat->parameters.size(); ++i)
          list.push_back({flat->parameters[i], index, flat, i, flat->order[i]});
      } else {
        const auto place = unit != nullptr ? unit->place(p) : Unit::Place{};
        list.push_back(
            {p, index, nullptr, 0, unit != nullptr ? place.members->order[place.index] : MemberOrder{}});
      }
      ++index;
    }
    if (!any_flat) continue;
    std::map<std::pair<std::uint64_t, std::size_t>, std::size_t> clones;
    for (Listed& l : list) {
      l.clone = clones[{l.order.root, l.order.index}]++;
      auto root = std::ranges::find(roots, l.order.root);
      if (root == roots.end()) root = roots.insert(root, l.order.root);
      l.order.root = static_cast<std::uint64_t>(root - roots.begin());
    }
    std::ranges::stable_sort(
        list, {}, [](const Listed& l) { return std::tuple(l.order.root, l.clone, l.order.index); });
  }
  return groups;
}

/// What names parameters in a state, in its order: the name that `model` has for one, or else its number.
std::vector<std::string> keys_of(std::span<const nn::Parameter> parameters, nn::Module* model) {
  std::unordered_map<const void*, std::string> names;
  if (model != nullptr) {
    for (const nn::NamedParameter& p : model->named_parameters()) names.emplace(p.parameter.id(), p.name);
    for (const FoundParameter& p : find_members(*model).parameters)  // those in flat ones too
      names.emplace(p.member->object().id(), p.name);
  }
  std::vector<std::string> keys;
  for (const nn::Parameter& p : parameters) {
    const auto found = names.find(p.id());
    keys.push_back(found != names.end() ? found->second : std::to_string(keys.size()));
  }
  return keys;
}

std::vector<std::string> keys_of(std::span<const std::vector<Listed>> groups, nn::Module* model) {
  std::vector<nn::Parameter> all;
  for (const std::vector<Listed>& list : groups)
    for (const Listed& l : list) all.push_back(l.parameter);
  return keys_of(all, model);
}

/// Whether `has` an entry under one of the keys. A state that has none is by numbers, or empty.
template <class F>
bool any_under(std::span<const std::string> keys, std::span<const std::string> names, F&& has) {
  return std::ranges::any_of(keys, [&](const std::string& key) {
    return std::ranges::any_of(names, [&](const std::string& name) { return has(entry(key, name)); });
  });
}

/// This rank's part of one state tensor; a rank without state has zeros, where others have some.
Tensor part_of_entry(const nn::Optimizer& optimizer, const std::vector<nn::Parameter>& params,
                     const Listed& listed, const Entries& own, std::string_view name) {
  const auto found = own.find(state_entry(listed.index, name));
  const Tensor part = found != own.end() ? found->second : no_state(optimizer, params[listed.index], name);
  return listed.flat != nullptr ? listed.flat->group->part_in(part, listed.member) : part;
}

/// The whole of what lies as `form` says for `p`.
Shape whole_shape(const nn::StateForm& form, const nn::Parameter& p) {
  if (form.per == 0) return form.shape;
  return form.per == 1 ? p.shape() : Shape{ceil_of(p.numel(), form.per)};
}

/// What of a state lies in parts.
struct StatePart {
  const nn::Parameter& parameter;
  std::int64_t per;    ///< as in `nn::StateForm`, from 1 on
  const Tensor& part;  ///< this rank's
  Shape whole;
  /// What this rank saves, and where that lies in the whole.
  ShardedTensor saved(const std::string& name) const {
    const Run elements = run_of(parameter), kept = kept_of(elements, per), run = saved_of(elements, per);
    const Tensor flat = reshape(part, {part.numel()});
    return {name,
            whole,
            run.begin,
            run.numel == 0 ? narrow(flat, 0, 0, 0) : narrow(flat, 0, run.begin - kept.begin, run.numel),
            run.replica,
            run.replicas};
  }
};

/// All of it on every rank.
Tensor whole_of(const StatePart& p) {
  if (p.per == 1) return gather_whole(p.parameter, p.part);
  const ShardedTensor own = p.saved({});
  const Tensor whole = zeros(p.whole, {p.part.dtype(), p.part.device()});
  copy_(narrow(whole, 0, own.begin, own.values.numel()), own.values);
  if (const Group* group = shard_group_of(p.parameter))  // sums of one number and zeros
    group->all_reduce(whole, {}, {.label = called_of(p.parameter, "optimizer state")});
  return whole;
}

/// All of an optimizer's state in the order of the unsharded optimizer's: `on_whole(name, tensor)` for what
/// every rank has, rates and counts of steps among it, `on_part(name, part)` for this rank's parts of
/// tensors.
void each_entry(nn::Module* model, const nn::Optimizer& optimizer,
                const std::function<void(const std::string&, const Tensor&)>& on_whole,
                const std::function<void(const std::string&, const StatePart&)>& on_part) {
  check_optimizer(optimizer);
  check_steps(all_parameters(optimizer));
  const nn::StateDict state = optimizer.state_dict();
  const Entries own(state.begin(), state.end());
  const std::vector<nn::Parameter> params = all_parameters(optimizer);
  const std::vector<std::string> names = optimizer.state_names();
  const std::vector<double> steps = steps_taken(params, own, names.empty() ? "" : names[0]);
  const auto groups = listed(optimizer);
  const std::vector<std::string> keys = keys_of(groups, model);
  std::size_t index = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const std::string& option : optimizer.option_names()) {
      const std::string name = group_entry(g, option);
      on_whole(name, clone(own.at(name)));
    }
    for (const Listed& l : groups[g]) {
      for (const std::string& name : names) {
        if (steps[l.index] < 0) continue;
        if (counts_steps(name)) {
          on_whole(entry(keys[index], name), Tensor::scalar(steps[l.index], {DType::f64, Device::cpu()}));
          continue;
        }
        const nn::StateForm form = optimizer.state_form(name, params[l.index]);
        const Tensor part = part_of_entry(optimizer, params, l, own, name);
        if (form.per == 0)
          on_whole(entry(keys[index], name), clone(part));
        else
          on_part(entry(keys[index], name), {l.parameter, form.per, part, whole_shape(form, l.parameter)});
      }
      ++index;
    }
  }
}

}  // namespace

namespace {

nn::StateDict full_state(nn::Module* model, const nn::Optimizer& optimizer) {
  const NoGrad guard;
  nn::StateDict full;
  each_entry(
      model, optimizer, [&](const std::string& name, const Tensor& whole) { full.emplace_back(name, whole); },
      [&](const std::string& name, const StatePart& part) { full.emplace_back(name, whole_of(part)); });
  return full;
}

ShardedStateDict sharded_state(nn::Module* model, const nn::Optimizer& optimizer) {
  const NoGrad guard;
  ShardedStateDict state;
  each_entry(
      model, optimizer,
      [&](const std::string& name, const Tensor& whole) {
        state.push_back({name, whole.shape(), 0, reshape(whole, {whole.numel()}), 0, 0});
      },
      [&](const std::string& name, const StatePart& part) { state.push_back(part.saved(name)); });
  return state;
}

}  // namespace

nn::StateDict full_optimizer_state(const nn::Optimizer& optimizer) { return full_state(nullptr, optimizer); }
nn::StateDict full_optimizer_state(nn::Module& model, const nn::Optimizer& optimizer) {
  return full_state(&model, optimizer);
}
ShardedStateDict sharded_optimizer_state(const nn::Optimizer& optimizer) {
  return sharded_state(nullptr, optimizer);
}
ShardedStateDict sharded_optimizer_state(nn::Module& model, const nn::Optimizer& optimizer) {
  return sharded_state(&model, optimizer);
}

namespace {

/// Takes whole state apart, entry by entry.
class StateCutter {
 public:
  /// `keys`: what names the parameters in the state, `names`: what it has for each.
  StateCutter(const nn::Optimizer& optimizer, const StateSource& from, std::vector<std::string> keys,
              std::vector<std::string> names)
      : optimizer_(optimizer),
        names_(std::move(names)),
        params_(all_parameters(optimizer)),
        keys_(std::move(keys)),
        from_(from) {}

  /// An option of a group, unless the state has none: the optimizer knows which it needs.
  void take_option(std::size_t group, const std::string& option) {
    const std::string name = group_entry(group, option);
    if (const auto shape = from_.shape(name)) parts_.emplace_back(name, number(name, *shape));
  }

  void take(const Listed& l, std::size_t index) {
    if (names_.empty() || !from_.shape(entry(keys_[index], names_[0]))) return;
    for (std::size_t k = 0; k < names_.size(); ++k) {
      const std::string name = entry(keys_[index], names_[k]);
      const std::optional<Shape> shape = from_.shape(name);
      check<ValueError>(
          shape.has_value(),
          "optimizer: the state lacks '{}'; load it into an optimizer of the class that it was taken "
          "from, with the same groups",
          name);
      if (counts_steps(names_[k])) {
        take_steps(l, k, number(name, *shape));
        continue;
      }
      const nn::StateForm form = optimizer_.state_form(names_[k], params_[l.index]);
      const Shape whole = whole_shape(form, l.parameter);
      check<ShapeError>(*shape == whole, "optimizer: '{}' has shape {}, the parameter needs {}{}", name,
                        *shape, whole, from_.whose(name));
      const Run run = form.per == 0 ? Run{0, whole.numel()} : kept_of(run_of(l.parameter), form.per);
      const Tensor part = from_.read(name, run.begin, run.numel);
      used_.add(name);
      const Tensor& local = l.parameter.local();
      if (l.flat == nullptr)
        parts_.emplace_back(state_entry(l.index, names_[k]),
                            reshape(to(to(part, form.dtype), local.device()), form.shape));
      else
        copy_(l.flat->group->part_in(flat(l).slots[k], l.member), reshape(part, local.shape()));
    }
  }

  /// The optimizer's own state, when all was taken.
  StagedOptimizer parts() {
    for (auto& [index, state] : flats_)
      for (std::size_t k = 0; k < names_.size(); ++k)
        parts_.emplace_back(state_entry(index, names_[k]), std::move(state.slots[k]));
    return {std::move(parts_), used_.others(from_)};
  }

 private:
  struct FlatState {
    std::vector<Tensor> slots;  ///< by `names_`
    double steps = -1;
  };
  /// In the shape that it has, so that the optimizer refuses a wrong one.
  Tensor number(const std::string& name, const Shape& shape) {
    used_.add(name);
    return reshape(from_.read(name, 0, shape.numel()), shape);
  }
  FlatState& flat(const Listed& l) {
    FlatState& state = flats_[l.index];
    for (std::size_t k = state.slots.size(); k < names_.size(); ++k)
      state.slots.push_back(no_state(optimizer_, params_[l.index], names_[k]));
    return state;
  }
  /// All parameters in a flat one step together.
  void take_steps(const Listed& l, std::size_t k, const Tensor& steps) {
    if (l.flat == nullptr) return parts_.emplace_back(state_entry(l.index, names_[k]), steps), void();
    FlatState& state = flat(l);
    const double here = steps.item();
    check<ValueError>(
        state.steps < 0 || state.steps == here,
        "optimizer: parameters in one flat parameter have taken {} and {} steps; shard them with "
        "use_orig_params",
        state.steps, here);
    state.steps = here;
    copy_(state.slots[k], steps);
  }

  const nn::Optimizer& optimizer_;
  std::vector<std::string> names_;
  std::vector<nn::Parameter> params_;
  std::vector<std::string> keys_;
  const StateSource& from_;
  UsedNames used_;
  nn::StateDict parts_;
  std::map<std::size_t, FlatState> flats_;
};

}  // namespace

std::vector<Held> held_in_state(const nn::Optimizer& optimizer, nn::Module* model,
                                const std::set<std::string>& in_state) {
  check_optimizer(optimizer);
  if (model != nullptr) write_back(*model);
  const auto groups = listed(optimizer);
  std::vector<Held> held;
  for (nn::Module* named_by : {model, static_cast<nn::Module*>(nullptr)}) {
    std::size_t index = 0;
    const std::vector<std::string> keys = keys_of(groups, named_by);
    for (const std::vector<Listed>& list : groups)
      for (const Listed& l : list) held.emplace_back(keys[index++], sharers_of(l.parameter));
    // A number may stand for another parameter on another group.
    if (std::ranges::any_of(keys, [&](const std::string& key) { return in_state.contains(key); })) break;
  }
  return held;
}

StagedOptimizer staged_optimizer_state(const nn::Optimizer& optimizer, const StateSource& from,
                                       nn::Module* model) {
  const NoGrad guard;
  check_optimizer(optimizer);
  const auto groups = listed(optimizer);
  std::vector<std::string> keys = keys_of(groups, model);
  const auto has = [&](const std::string& name) { return from.shape(name).has_value(); };
  // What is kept for a parameter depends on the options that the state has.
  std::vector<std::string> names =
      optimizer.state_names_with([&](const std::string& name) -> std::optional<double> {
        const std::optional<Shape> shape = from.shape(name);
        if (!shape || shape->numel() != 1) return std::nullopt;
        return to(from.read(name, 0, 1), DType::f64).item();
      });
  if (!any_under(keys, names, has)) keys = keys_of(groups, nullptr);
  StateCutter cutter(optimizer, from, std::move(keys), std::move(names));
  std::size_t group = 0, index = 0;
  for (const std::vector<Listed>& list : groups) {
    for (const std::string& option : optimizer.option_names()) cutter.take_option(group, option);
    ++group;
    for (const Listed& l : list) cutter.take(l, index++);
  }
  return cutter.parts();
}

namespace {

void load_full(nn::Module* model, nn::Optimizer& optimizer, const nn::StateDict& state) {
  const NoGrad guard;
  constexpr std::string_view call = "optimizer";
  StagedOptimizer staged = staged_optimizer_state(optimizer, WholeSource(call, state), model);
  check_none_left(call, staged.unknown, StagedOptimizer::what);
  optimizer.load_state_dict(std::move(staged.part));
}

}  // namespace

void load_full_optimizer_state(nn::Optimizer& optimizer, const nn::StateDict& state) {
  load_full(nullptr, optimizer, state);
}
void load_full_optimizer_state(nn::Module& model, nn::Optimizer& optimizer, const nn::StateDict& state) {
  load_full(&model, optimizer, state);
}

namespace {

/// The entries of `state` with other names where `names` has them.
nn::StateDict renamed(nn::StateDict state, const std::unordered_map<std::string, std::string>& names) {
  for (auto& [name, tensor] : state)
    if (const auto found = names.find(name); found != names.end()) name = found->second;
  return state;
}

}  // namespace

nn::StateDict local_optimizer_state(nn::Module& model, const nn::Optimizer& optimizer) {
  check_optimizer(optimizer);
  const std::vector<std::string> keys = keys_of(all_parameters(optimizer), &model);
  std::unordered_map<std::string, std::string> names;
  for (std::size_t i = 0; i < keys.size(); ++i)
    for (const std::string& what : optimizer.state_names())
      names[state_entry(i, what)] = entry(keys[i], what);
  return renamed(optimizer.state_dict(), names);
}

void load_local_optimizer_state(nn::Module& model, nn::Optimizer& optimizer, nn::StateDict state) {
  check_optimizer(optimizer);
  const std::vector<std::string> keys = keys_of(all_parameters(optimizer), &model);
  const std::vector<std::string> kept = state_names_with(optimizer, state);
  std::unordered_map<std::string, std::string> numbers;
  for (std::size_t i = 0; i < keys.size(); ++i)
    for (const std::string& what : kept) numbers[entry(keys[i], what)] = state_entry(i, what);
  optimizer.load_state_dict(renamed(std::move(state), numbers));
}

}  // namespace sherd::shard
