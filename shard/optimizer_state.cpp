#include "shard/optimizer_state.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

using Entries = std::unordered_map<std::string, Tensor>;

/// One number a parameter, not one an element.
bool counts_steps(std::string_view name) { return name == "step"; }

std::string entry(std::size_t index, std::string_view name) {
  return fmt::format("state.{}.{}", index, name);
}

std::vector<nn::Parameter> all_parameters(const nn::Optimizer& optimizer) {
  std::vector<nn::Parameter> all;
  for (std::size_t g = 0; g < optimizer.group_count(); ++g)
    all.insert(all.end(), optimizer.parameters(g).begin(), optimizer.parameters(g).end());
  return all;
}

/// Steps that each parameter has taken on any rank, -1 for one without state. A rank that owns nothing of a
/// parameter has no gradient of it either, and so no state.
std::vector<double> steps_taken(const std::vector<nn::Parameter>& params, const Entries& own,
                                std::string_view first_name) {
  std::vector<double> steps;
  std::vector<Group> groups;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto step = own.find(entry(i, "step"));
    const bool here = own.contains(entry(i, first_name));
    steps.push_back(!here ? -1 : step == own.end() ? 0 : step->second.item());
    const Group* group = shard_group_of(params[i]);
    if (group != nullptr && std::ranges::find(groups, *group) == groups.end()) groups.push_back(*group);
  }
  for (const Group& group : groups) {
    const Tensor most = Tensor::from(steps, {static_cast<std::int64_t>(steps.size())});
    group.all_reduce(most, ReduceOp::max(), {.label = "optimizer state"});
    const std::vector<double> of_all = most.to_vector<double>();
    for (std::size_t i = 0; i < params.size(); ++i)
      if (const Group* its = shard_group_of(params[i]); its != nullptr && *its == group) steps[i] = of_all[i];
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
    for (Listed& l : list) {
      auto root = std::ranges::find(roots, l.order.root);
      if (root == roots.end()) root = roots.insert(root, l.order.root);
      l.order.root = static_cast<std::uint64_t>(root - roots.begin());
    }
    std::ranges::stable_sort(list, {},
                             [](const Listed& l) { return std::pair(l.order.root, l.order.index); });
  }
  return groups;
}

/// The whole of one state tensor; a rank without state has zeros, where others have some.
Tensor whole_entry(const std::vector<nn::Parameter>& params, const Listed& listed, const Entries& own,
                   std::string_view name) {
  const auto found = own.find(entry(listed.index, name));
  const Tensor& local = params[listed.index].local();
  const Tensor part =
      found != own.end() ? found->second : zeros(local.shape(), {local.dtype(), local.device()});
  return gather_whole(listed.parameter,
                      listed.flat != nullptr ? listed.flat->group->part_in(part, listed.member) : part);
}

}  // namespace

nn::StateDict full_optimizer_state(const nn::Optimizer& optimizer) {
  const NoGrad guard;
  const nn::StateDict state = optimizer.state_dict();
  const Entries own(state.begin(), state.end());
  const std::vector<nn::Parameter> params = all_parameters(optimizer);
  const std::vector<std::string> names = optimizer.state_names();
  const std::vector<double> steps = steps_taken(params, own, names.empty() ? "" : names[0]);
  const auto groups = listed(optimizer);
  nn::StateDict full;
  std::size_t index = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::string rate = fmt::format("group.{}.lr", g);
    full.emplace_back(rate, clone(own.at(rate)));
    for (const Listed& l : groups[g]) {
      if (steps[l.index] >= 0)
        for (const std::string& name : names)
          full.emplace_back(entry(index, name), counts_steps(name)
                                                    ? Tensor::scalar(steps[l.index], {DType::f64})
                                                    : whole_entry(params, l, own, name));
      ++index;
    }
  }
  return full;
}

namespace {

/// Takes whole state apart, entry by entry.
class StateCutter {
 public:
  StateCutter(const nn::Optimizer& optimizer, const nn::StateDict& state)
      : names_(optimizer.state_names()),
        params_(all_parameters(optimizer)),
        from_(state.begin(), state.end()) {
    check<ValueError>(from_.size() == state.size(), "optimizer: the state has {} entries of {} names",
                      state.size(), from_.size());
  }

  void take(const Listed& l, std::size_t index) {
    if (names_.empty() || !from_.contains(entry(index, names_[0]))) return;
    for (std::size_t k = 0; k < names_.size(); ++k) {
      const std::string name = entry(index, names_[k]);
      const auto found = from_.find(name);
      check<ValueError>(found != from_.end(), "optimizer: the state lacks '{}'", name);
      const Tensor whole = found->second;
      from_.erase(found);
      if (counts_steps(names_[k])) {
        take_steps(l, k, whole);
        continue;
      }
      check<ShapeError>(whole.shape() == l.parameter.shape(),
                        "optimizer: '{}' has shape {}, the parameter needs {}", name, whole.shape(),
                        l.parameter.shape());
      const Tensor part = part_of(l.parameter, whole);
      if (l.flat == nullptr)
        parts_.emplace_back(entry(l.index, names_[k]), part);
      else
        copy_(l.flat->group->part_in(flat(l).slots[k], l.member), part);
    }
  }

  /// The optimizer's own state, and last what belongs to none of its parameters.
  nn::StateDict parts() {
    for (const auto& [index, state] : flats_)
      for (std::size_t k = 0; k < names_.size(); ++k)
        parts_.emplace_back(entry(index, names_[k]), state.slots[k]);
    parts_.insert(parts_.end(), from_.begin(), from_.end());
    return parts_;
  }

 private:
  struct FlatState {
    std::vector<Tensor> slots;  ///< by `names_`
    double steps = -1;
  };
  FlatState& flat(const Listed& l) {
    FlatState& state = flats_[l.index];
    const Tensor& local = params_[l.index].local();
    for (std::size_t k = state.slots.size(); k < names_.size(); ++k)
      state.slots.push_back(counts_steps(names_[k]) ? zeros({}, {DType::f64})
                                                    : zeros(local.shape(), {local.dtype(), local.device()}));
    return state;
  }
  /// All parameters in a flat one step together.
  void take_steps(const Listed& l, std::size_t k, const Tensor& steps) {
    if (l.flat == nullptr) return parts_.emplace_back(entry(l.index, names_[k]), steps), void();
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

  std::vector<std::string> names_;
  std::vector<nn::Parameter> params_;
  Entries from_;
  nn::StateDict parts_;
  std::map<std::size_t, FlatState> flats_;
};

}  // namespace

void load_full_optimizer_state(nn::Optimizer& optimizer, const nn::StateDict& state) {
  const NoGrad guard;
  StateCutter cutter(optimizer, state);
  std::size_t index = 0;
  for (const std::vector<Listed>& group : listed(optimizer))
    for (const Listed& l : group) cutter.take(l, index++);
  optimizer.load_state_dict(cutter.parts());
}

}  // namespace sherd::shard
