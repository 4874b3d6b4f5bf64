#include "tests/shard/whole.h"

#include "shard/unit.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

namespace sherd::test {
namespace {

std::vector<float> floats(const Tensor& t) {
  return t.defined() ? to(t, DType::f32).to_vector<float>() : std::vector<float>{};
}

std::vector<float> whole_of(const Tensor& part, std::int64_t numel, const Group& group) {
  const std::int64_t mine = part.defined() ? part.numel() : 0;
  const Tensor counts = empty({group.size()}, {DType::i64});
  group.all_gather(counts, Tensor::from<std::int64_t>({mine}, {1}));
  const Tensor padded = zeros({numel}), all = empty({group.size() * numel});
  if (mine > 0) copy_(narrow(padded, 0, 0, mine), reshape(part, {mine}));
  group.all_gather(all, padded);

  const std::vector<std::int64_t> numels = counts.to_vector<std::int64_t>();
  if (std::ranges::count(numels, numel) == std::ssize(numels)) return floats(part);
  std::vector<float> whole;
  const std::vector<float> slots = all.to_vector<float>();
  for (std::size_t rank = 0; rank < numels.size(); ++rank) {
    const auto slot = slots.begin() + static_cast<std::ptrdiff_t>(rank) * numel;
    whole.insert(whole.end(), slot, slot + numels[rank]);
  }
  return whole;
}

}  // namespace

Gradients gradients(const nn::Module& module) {
  Gradients all;
  for (const nn::Parameter& p : module.parameters()) all.push_back(floats(p.grad()));
  return all;
}

Gradients whole_gradients(const nn::Module& module, const Group& group) {
  const NoGrad guard;
  Gradients all;
  for (const nn::Parameter& p : module.parameters()) {
    const Group* const shards = shard::unit_of(p) != nullptr ? shard::shard_group_of(p) : &group;
    all.push_back(shards != nullptr ? whole_of(p.grad(), p.numel(), *shards) : floats(p.grad()));
  }
  return all;
}

Gradients average_by_hand(nn::Module& module, int ranks, const std::function<void(int)>& backward) {
  std::vector<Gradients> of_ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    module.zero_grad();
    backward(rank);
    of_ranks.push_back(gradients(module));
  }
  module.zero_grad();
  return average(of_ranks);
}

Gradients average(const std::vector<Gradients>& of_ranks) {
  Gradients result(of_ranks[0].size());
  for (std::size_t p = 0; p < result.size(); ++p) {
    std::size_t numel = 0;
    for (const Gradients& g : of_ranks) numel = std::max(numel, g[p].size());
    for (std::size_t i = 0; i < numel; ++i) {
      const auto of = [&](const Gradients& g) { return g[p].empty() ? 0.f : g[p][i]; };
      const float sum = std::accumulate(of_ranks.begin() + 1, of_ranks.end(), of(of_ranks[0]),
                                        [&](float s, const Gradients& g) { return s + of(g); });
      result[p].push_back(sum / static_cast<float>(of_ranks.size()));
    }
  }
  return result;
}

Gradients as_sharded(Gradients averages, nn::Module& sharded) {
  std::unordered_map<const void*, std::size_t> place;
  for (const nn::Parameter& p : sharded.parameters()) place.emplace(p.id(), place.size());
  for (const shard::NamedUnit& u : shard::units_of(sharded))
    for (const shard::Members& m : u.unit->members()) {
      if (m.group->spec().unused == shard::Unused::none || m.flat.defined()) continue;
      const auto of = [&](const nn::Parameter& p) -> std::vector<float>& {
        return averages[place.at(p.id())];
      };
      const auto listed = [&](const nn::Parameter& p) { return place.contains(p.id()); };
      if (std::ranges::none_of(m.parameters, [&](const auto& p) { return listed(p) && !of(p).empty(); }))
        continue;
      for (const nn::Parameter& p : m.parameters)
        if (listed(p) && of(p).empty() && p.requires_grad())
          of(p).resize(static_cast<std::size_t>(p.numel()));
    }
  return averages;
}

Gradients plus(const Gradients& a, const Gradients& b) {
  Gradients sum = a;
  for (std::size_t p = 0; p < sum.size(); ++p) {
    if (sum[p].empty()) sum[p].resize(b[p].size());
    for (std::size_t i = 0; i < b[p].size(); ++i) sum[p][i] += b[p][i];
  }
  return sum;
}

std::string difference(const Gradients& a, const Gradients& b) {
  if (a.size() != b.size()) return fmt::format("{} against {} gradients", a.size(), b.size());
  for (std::size_t p = 0; p < a.size(); ++p) {
    if (a[p].size() != b[p].size())
      return fmt::format("gradient {} has {} against {} elements", p, a[p].size(), b[p].size());
    for (std::size_t i = 0; i < a[p].size(); ++i)
      if (a[p][i] != b[p][i])
        return fmt::format("gradient {}, element {}: {} against {}", p, i, a[p][i], b[p][i]);
  }
  return {};
}

void set_gradients(const nn::Module& module, const Gradients& gradients) {
  std::vector<nn::Parameter> parameters = module.parameters();
  for (std::size_t p = 0; p < parameters.size(); ++p)
    parameters[p].set_grad(gradients[p].empty() ? Tensor{}
                                                : Tensor::from(gradients[p], parameters[p].shape()));
}

}  // namespace sherd::test
