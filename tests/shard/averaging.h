// What several backwards of a step come to, by hand: shards, replicas, divide factors, and backwards that do
// not average.
#pragma once

#include "tests/shard/whole.h"

namespace sherd::test {

/// What the backwards of a step but for the last one leave.
enum class Unaveraged {
  own,          ///< each rank's gradients, as under `no_sync`
  over_shards,  ///< sums over the shards, as without `set_requires_all_reduce`
};

/// Adds to `total` what the groups of `sharded` make of `brought`: by backward and rank, the gradients of all
/// parameters.
Gradients with_averages(Gradients total, const std::vector<std::vector<Gradients>>& brought, Unaveraged how,
                        nn::Module& sharded);

}  // namespace sherd::test
