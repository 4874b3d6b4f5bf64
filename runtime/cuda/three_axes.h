// A tensor whose reduced axes lie side by side.
#pragma once

#include "runtime/forward.h"
#include "runtime/tensor.h"

namespace sherd::cuda {

/// `x` dense and as (outer, reduce, inner).
struct ThreeAxes {
  Tensor x;
  std::int64_t outer = 1, reduce = 1, inner = 1;
};
/// Copies where the reduced `axes` (bits) are apart or memory has holes.
ThreeAxes as_three_axes(const Tensor& x, Mask axes);
/// Elements from one row of the axes that stay to the next where the reduced `axes` are the first ones and x
/// is such rows with gaps, as a part of a matrix's columns; else 0.
std::int64_t pitch_of_rows(const Tensor& x, Mask axes);

}  // namespace sherd::cuda
