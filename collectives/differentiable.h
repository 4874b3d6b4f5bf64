// Calls among ranks that gradients pass. The same movement has different gradients, depending on how its
// result is used on the ranks; so the names say the placement:
//
//   shard     every rank holds its slice, along dimension 0
//   replica   every rank holds the same values
//   partial   every rank holds a summand
//
// Gradients are calls of the same kind. So every rank's loss must depend on the result wherever one does;
// and the total that is differentiated is the sum of all ranks' losses where data differ from rank to rank,
// and the one loss that all compute alike where they do not.
#pragma once

#include "collectives/group.h"

namespace sherd {

/// Shard to replica, each rank using it on data of its own (a sharded weight). Gradient: `scatter_sums`.
SHERD_API Tensor gather_params(const Group& group, const Tensor& shard, CallOptions options = {});

/// Shard to replica, all ranks using it alike (an activation). Gradient: `take_slice`.
SHERD_API Tensor gather_values(const Group& group, const Tensor& shard, CallOptions options = {});

/// Partial to replica: the sum (after a product whose inner dimension is sharded). Gradient:
/// `enter_parallel`.
SHERD_API Tensor sum_partials(const Group& group, const Tensor& partial, CallOptions options = {});

/// Replica to replica that the ranks use on different shards (before a product whose outputs are sharded):
/// the same tensor, a view. Gradient: `sum_partials`.
SHERD_API Tensor enter_parallel(const Group& group, const Tensor& replica, CallOptions options = {});

/// Partial to shard: this rank's slice of the sum. Gradient: `gather_params`.
SHERD_API Tensor scatter_sums(const Group& group, const Tensor& partial, CallOptions options = {});

/// Replica to shard: a copy of this rank's slice. Gradient: `gather_values`.
SHERD_API Tensor take_slice(const Group& group, const Tensor& replica, CallOptions options = {});

}  // namespace sherd
