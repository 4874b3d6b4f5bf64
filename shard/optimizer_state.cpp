#include "shard/optimizer_state.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "shard/group.h"

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

Tensor whole_entry(const nn::Parameter& p, const Entries& own, const std::string& name) {
  const auto part = own.find(name);
  const Tensor& local = p.local();
  return gather_whole(
      p, part != own.end() ? part->second : zeros(local.shape(), {local.dtype(), local.device()}));
}

}  // namespace

nn::StateDict full_optimizer_state(const nn::Optimizer& optimizer) {
  const NoGrad guard;
  const nn::StateDict state = optimizer.state_dict();
  const Entries own(state.begin(), state.end());
  const std::vector<nn::Parameter> params = all_parameters(optimizer);
  const std::vector<std::string> names = optimizer.state_names();
  const std::vector<double> steps = steps_taken(params, own, names.empty() ? "" : names[0]);
  nn::StateDict full;
  std::size_t index = 0;
  for (std::size_t g = 0; g < optimizer.group_count(); ++g) {
    const std::string rate = fmt::format("group.{}.lr", g);
    full.emplace_back(rate, clone(own.at(rate)));
    for (std::size_t end = index + optimizer.parameters(g).size(); index < end; ++index) {
      if (steps[index] < 0) continue;
      for (const std::string& name : names) {
        const std::string key = entry(index, name);
        full.emplace_back(key, counts_steps(name) ? Tensor::scalar(steps[index], {DType::f64})
                                                  : whole_entry(params[index], own, key));
      }
    }
  }
  return full;
}

void load_full_optimizer_state(nn::Optimizer& optimizer, const nn::StateDict& state) {
  const NoGrad guard;
  const std::vector<nn::Parameter> params = all_parameters(optimizer);
  std::unordered_map<std::string, nn::Parameter> sharded;  // by the names of entries that are cut
  for (std::size_t i = 0; i < params.size(); ++i)
    for (const std::string& name : optimizer.state_names())
      if (!counts_steps(name)) sharded.emplace(entry(i, name), params[i]);
  nn::StateDict parts;
  for (const auto& [name, tensor] : state) {
    const auto of = sharded.find(name);
    if (of != sharded.end())
      check<ShapeError>(tensor.shape() == of->second.shape(),
                        "optimizer: '{}' has shape {}, the parameter needs {}", name, tensor.shape(),
                        of->second.shape());
    parts.emplace_back(name, of != sharded.end() ? part_of(of->second, tensor) : tensor);
  }
  optimizer.load_state_dict(parts);
}

}  // namespace sherd::shard
