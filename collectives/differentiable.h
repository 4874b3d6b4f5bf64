// Calls among ranks that have gradients. What the gradient of a movement is depends on how the ranks use the
// result; so the functions are named by the placement of what they take and give:
//
//   shard     every rank holds its slice, along dimension 0
//   replica   every rank holds the same values
//   partial   every rank holds a summand
//
// The gradient is itself a call among the ranks (but for gather_values and sum_partials, whose gradients move
// nothing). So where the loss of one rank depends on a result, the loss of every rank must: a rank that skips
// the call in its backward is named in a CollectiveError. Differentiated is the sum of all ranks' losses
// where their data differ, and the one loss that all compute alike where they do not.
//
// Errors, beside those of the calls: StateError for an undefined group, ValueError for an empty handle,
// ShapeError for a 0-d tensor, and for a dimension 0 that does not divide into equal slices.
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
/// a view of it, no call. Gradient: `sum_partials`.
SHERD_API Tensor enter_parallel(const Group& group, const Tensor& replica, CallOptions options = {});

/// Partial to shard: this rank's slice of the sum. Gradient: `gather_params`.
SHERD_API Tensor scatter_sums(const Group& group, const Tensor& partial, CallOptions options = {});

/// Replica to shard: a copy of this rank's slice, no call. Gradient: `gather_values`.
SHERD_API Tensor take_slice(const Group& group, const Tensor& replica, CallOptions options = {});

/// Shard to shard: slice r of this rank's goes to rank r, and slice p of the result is rank p's for this
/// rank. Gradient: the same call. Of unlike numbers of rows: `exchange_rows` (collectives/rows.h).
SHERD_API Tensor all_to_all(const Group& group, const Tensor& slices, CallOptions options = {});

}  // namespace sherd
