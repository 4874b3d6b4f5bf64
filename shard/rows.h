// For optimizers that step a parameter by what all of its elements come to: this rank's part as rows, and
// what the ranks that share it agree on.
#pragma once

#include <span>
#include <string_view>

#include "nn/parameter.h"
#include "runtime/reduce_op.h"

namespace sherd::shard {

/// A run of a parameter's elements as rows of `columns`, counted through the whole parameter: those that the
/// run has some of, with zeros where it has not.
struct Rows {
  Rows(std::int64_t begin, std::int64_t numel, std::int64_t columns);
  std::int64_t first, count, columns, numel;
  std::int64_t lead;  ///< elements of the first row before the run

  /// The rows (count, columns) of the run's elements, and these of the rows, in one dimension.
  Tensor of(const Tensor& elements) const;
  Tensor elements(const Tensor& rows) const;
};

/// What ranks can tell of a parameter before they step it together, alike on all of them. ValueError for a
/// flat parameter, which is many; StateError where one of them has no element of it, and so hears of no
/// gradient.
void check_all_hear(std::string_view optimizer, const nn::Parameter& p);

/// Reduces, in place, one tensor of f64 a parameter over the ranks that share that: a call for all of those
/// on one device. Whoever has parameters in common gives them in one order.
void agree(std::span<const nn::Parameter> params, std::span<const Tensor> numbers, const ReduceOp& reduction,
           std::string_view label);

}  // namespace sherd::shard
