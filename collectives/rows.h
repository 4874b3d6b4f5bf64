// Rows that ranks send each other, each as many as it has for whom: tokens to the ranks of their experts, and
// back.
//
//   const RowRoute route = route_rows(group, counts);         // counts[r] of this rank's rows go to rank r
//   const Tensor tokens = exchange_rows(route, rows);         // what all ranks have for this one
//   const Tensor back = exchange_rows(route.back(), expert(tokens));
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collectives/differentiable.h"

namespace sherd {

/// How many rows go where; all ranks of the group have theirs of one call of `route_rows`.
struct SHERD_API RowRoute {
  Group group{};
  std::vector<std::int64_t> sent{}, received{};  ///< by rank of the group: from this rank, to this rank
  std::int64_t most = 0;                         ///< that any rank sends another
  /// The same rows the other way.
  RowRoute back() const { return {group, received, sent, most}; }
  std::int64_t rows_sent() const;
  std::int64_t rows_received() const;
};

/// Tells all ranks of `group` how many rows this one has for each; collective, read on the host. ValueError
/// for a list that has not one number from 0 on for each rank.
SHERD_API RowRoute route_rows(const Group& group, std::span<const std::int64_t> sent,
                              const CallOptions& options = {});

/// The rows (dimension 0) of all ranks for this one, rank by rank, each rank's in its order: of `rows`
/// (rows_sent, ...) the first sent[0] go to rank 0, the next to rank 1. The other dimensions are alike on all
/// ranks. Gradient: the way back, also of a rank that sends none: rows require gradients on all ranks or on
/// none. One call that moves `most` rows between any two ranks, those of fewer filled up: balanced numbers
/// cost no more than they have. ShapeError for another number of rows.
SHERD_API Tensor exchange_rows(const RowRoute& route, const Tensor& rows, const CallOptions& options = {});

}  // namespace sherd
