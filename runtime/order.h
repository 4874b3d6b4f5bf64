// Values by their order: what is there once, how often, where it would stand, and what stands in the middle.
// All of it is made of other ops; what has a size that depends on values is read on the host.
#pragma once

#include <optional>
#include <span>

#include "runtime/ops.h"

namespace sherd {

/// Values that are there once each, ascending: 1-D. `inverse`, of x's shape, says which of them each element
/// of x is, `counts` how many elements each stands for; i64.
struct Unique {
  Tensor values, inverse, counts;
};
/// Of all elements; each NaN counts as another value. No gradient. Reads on the host.
SHERD_API Unique unique(const Tensor& x);
/// The same, but only neighbours in row-major order are taken together, and stay where they are.
SHERD_API Unique unique_consecutive(const Tensor& x);

/// How often each number from 0 on is in `x` (1-D, integers from 0): up to the largest, at least `minimum`
/// of them. i64; with `weights`, which are added up, their dtype. Reads on the host. ValueError for a
/// negative number.
SHERD_API Tensor bincount(const Tensor& x, const Tensor& weights = {}, std::int64_t minimum = 0);

/// Of equal elements whether the place is before the first or behind the last.
enum class SearchSide { left, right };
/// Where values (..., m) would stand in `sorted` (..., n), ascending along the last axis; or values of any
/// shape in a 1-D `sorted`. i64 from 0 to n; NaN counts as the largest. Both have one dtype.
SHERD_API Tensor searchsorted(const Tensor& sorted, const Tensor& values, SearchSide side = SearchSide::left);
/// The same with the arguments in the other order, for bins by their `boundaries`.
inline Tensor bucketize(const Tensor& values, const Tensor& boundaries, SearchSide side = SearchSide::left) {
  return searchsorted(boundaries, values, side);
}

/// The middle one of the sorted values along `axis`, of an even number the lower one, and where it was; the
/// first NaN where there is one. The gradient goes to that element.
SHERD_API Picked median(const Tensor& x, std::int64_t axis, Keep keep = Keep::drop);
/// Of all elements: 0-d.
SHERD_API Tensor median(const Tensor& x);

/// What is taken where a quantile lies between two elements.
enum class QuantileInterpolation { linear, lower, higher, midpoint, nearest };
/// Element q (n - 1) of the n sorted values along `axis`, or of all elements, in x's dtype (floating); NaN
/// where one of them is. ValueError for a q outside [0, 1].
SHERD_API Tensor quantile(const Tensor& x, double q, std::optional<std::int64_t> axis = {},
                          Keep keep = Keep::drop,
                          QuantileInterpolation interpolation = QuantileInterpolation::linear);
/// Several, in front of the other axes.
SHERD_API Tensor quantile(const Tensor& x, std::span<const double> q, std::optional<std::int64_t> axis = {},
                          Keep keep = Keep::drop,
                          QuantileInterpolation interpolation = QuantileInterpolation::linear);

}  // namespace sherd
