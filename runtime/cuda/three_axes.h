// A tensor whose reduced axes lie side by side.
#pragma once

#include <optional>

#include "runtime/forward.h"
#include "runtime/tensor.h"

namespace sherd::cuda {

/// `x` as (outer, reduce, inner).
struct ThreeAxes {
  Tensor x;
  std::int64_t outer = 1, reduce = 1, inner = 1;
  std::int64_t pitch = 0;  ///< elements from one row of `inner` to the next where there are gaps, else 0
};
/// Dense: copies where the reduced `axes` (bits) are apart or memory has holes.
ThreeAxes as_three_axes(const Tensor& x, Mask axes);
/// As it lies where the reduced `axes` are the first ones and x is rows with gaps, as a part of a matrix's
/// columns; else none.
std::optional<ThreeAxes> as_rows_with_gaps(const Tensor& x, Mask axes);

}  // namespace sherd::cuda
