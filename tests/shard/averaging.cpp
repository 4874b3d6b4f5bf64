#include "tests/shard/averaging.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <unordered_map>

#include "shard/unit.h"

namespace sherd::test {
namespace {

using Values = std::vector<float>;  // empty: none

/// How the gradients of a parameter become one. Of those that are not sharded nothing comes.
struct Averaging {
  std::size_t shards = 1, replicas = 1;
  float divide_by = 1;
};

std::vector<Averaging> averagings_of(nn::Module& sharded) {
  std::unordered_map<const void*, Averaging> of;
  for (const shard::NamedUnit& u : shard::units_of(sharded))
    for (const shard::Members& m : u.unit->members()) {
      const shard::Ranks& ranks = m.group->spec().ranks;
      const int shards = shard::RankOfGroup(ranks.shard).ranks;
      const int replicas = shard::RankOfGroup(ranks.replicas).ranks;
      const double by = m.group->switches.divide_by.value_or(shards * replicas);
      for (const nn::Parameter& p : m.parameters)
        of[p.id()] = {static_cast<std::size_t>(shards), static_cast<std::size_t>(replicas),
                      static_cast<float>(by)};
    }
  std::vector<Averaging> all;
  for (const nn::Parameter& p : sharded.parameters()) all.push_back(of[p.id()]);
  return all;
}

/// In order, in f32; none counts as zeros.
Values sum_of(std::span<const Values> list) {
  Values sum(std::ranges::max(list, {}, &Values::size).size());
  for (std::size_t i = 0; i < sum.size(); ++i) {
    const auto of = [&](const Values& v) { return v.empty() ? 0.f : v[i]; };
    sum[i] = std::accumulate(list.begin() + 1, list.end(), of(list[0]),
                             [&](float s, const Values& v) { return s + of(v); });
  }
  return sum;
}

std::vector<Values> by_replica(const std::vector<Values>& of_ranks, const Averaging& how) {
  std::vector<Values> sums;
  for (std::size_t r = 0; r < how.replicas; ++r)
    sums.push_back(sum_of(std::span(of_ranks).subspan(r * how.shards, how.shards)));
  return sums;
}

}  // namespace

Gradients with_averages(Gradients total, const std::vector<std::vector<Gradients>>& brought, Unaveraged how,
                        nn::Module& sharded) {
  const std::vector<Averaging> averagings = averagings_of(sharded);
  std::vector<Gradients> averages(brought.size(), Gradients(averagings.size()));
  for (std::size_t p = 0; p < averagings.size(); ++p) {
    const Averaging& averaging = averagings[p];
    const bool over_shards = how == Unaveraged::over_shards && averaging.shards > 1;
    std::vector<Values> kept;  // until the next average: by replica, or by rank
    for (std::size_t b = 0; b < brought.size(); ++b) {
      std::vector<Values> parts;
      for (const Gradients& of_rank : brought[b]) parts.push_back(of_rank[p]);
      if (over_shards) parts = by_replica(parts, averaging);
      for (std::size_t i = 0; i < kept.size(); ++i) parts[i] = sum_of(std::array{kept[i], parts[i]});
      if (b + 1 < brought.size() && !(over_shards && averaging.replicas == 1)) {
        kept = std::move(parts);
        continue;
      }
      averages[b][p] = sum_of(over_shards ? parts : by_replica(parts, averaging));
      for (float& v : averages[b][p]) v /= averaging.divide_by;
      kept.clear();
    }
  }
  for (Gradients& of_backward : averages) total = plus(total, as_sharded(std::move(of_backward), sharded));
  return total;
}

}  // namespace sherd::test
