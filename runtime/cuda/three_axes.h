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

}  // namespace sherd::cuda
