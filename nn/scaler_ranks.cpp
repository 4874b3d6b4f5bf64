#include "nn/scaler_ranks.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "autograd/node.h"
#include "nn/shared_gradients.h"
#include "runtime/ops.h"

namespace sherd::nn {
namespace {

/// Groups of the same ranks serve alike: each model may have its own.
bool same_ranks(const Group& a, const Group& b) {
  return std::ranges::equal(a.world_ranks(), b.world_ranks());
}

void add_once(std::vector<Group>& groups, const Group& group) {
  if (std::ranges::none_of(groups, [&](const Group& g) { return same_ranks(g, group); }))
    groups.push_back(group);
}

}  // namespace

std::vector<Group> sharers_of(const Optimizer& optimizer) {
  std::vector<Group> groups;
  for (std::size_t g = 0; g < optimizer.group_count(); ++g)
    for (const Parameter& p : optimizer.parameters(g)) {
      if (p.owner() != nullptr)
        for (const Group& group : p.owner()->ranks(p)) add_once(groups, group);
      if (const auto* shared = dynamic_cast<const SharedGradients*>(sink_of(p.local())))
        add_once(groups, shared->ranks());
    }
  std::ranges::stable_sort(groups, {}, &Group::size);
  return groups;
}

std::vector<Group> owners_of(std::span<const Parameter> parameters) {
  std::vector<Group> groups;
  for (const Parameter& p : parameters)
    if (p.owner() != nullptr)
      for (const Group& group : p.owner()->ranks(p)) add_once(groups, group);
  std::ranges::stable_sort(groups, {}, &Group::size);
  return groups;
}

std::vector<int> ranks_in(std::span<const Group> groups) {
  std::set<int> all;
  for (std::size_t g = groups.size(); g-- > 0;) {
    const std::span<const int> more = groups[g].world_ranks();
    if (std::ranges::all_of(more, [&](int rank) { return all.contains(rank); })) continue;
    const int here = more[static_cast<std::size_t>(groups[g].rank())];
    if (all.empty()) all.insert(here);
    std::set<int> spanned;
    for (const int rank : all)
      for (const int other : more) spanned.insert(rank + other - here);
    all = std::move(spanned);
  }
  if (all.size() == 1) all.clear();
  return {all.begin(), all.end()};
}

std::string name_of(const std::vector<int>& ranks) {
  return ranks.empty() ? "this rank alone" : fmt::format("ranks {}", ranks);
}

void tell_all(const Tensor& found, std::span<const Group> groups) {
  for (const Group& group : groups) group.all_reduce(found, ReduceOp::max(), {.label = "GradScaler"});
}

ScalerStanding foremost_of(const Group& group, const ScalerStanding& mine) {
  constexpr std::int64_t words = 5;
  const Tensor all = empty({group.size() * words}, {DType::f64, Device::cpu()});
  group.all_gather(all,
                   Tensor::from<double>(
                       {mine.updates, mine.scale, mine.tracker, mine.least_updates, mine.unlike ? 1. : 0.},
                       {words}, Device::cpu()),
                   {.label = "GradScaler after renew"});
  const std::vector<double> of_all = all.to_vector<double>();
  ScalerStanding first = mine;
  for (std::size_t i = 0; i < of_all.size(); i += words) {
    const double* its = &of_all[i];
    const bool unlike = its[4] != 0 || !std::equal(its, its + 3, of_all.begin());
    first.unlike = first.unlike || unlike;
    first.least_updates = std::min(first.least_updates, its[3]);
    if (i > 0 && its[0] <= first.updates) continue;
    first.updates = its[0];
    first.scale = its[1];
    first.tracker = its[2];
  }
  return first;
}

}  // namespace sherd::nn
