// max(x, 0), NaN kept; the gradient at 0 is 0.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Relu : Functor<"relu", 1, number_dtypes> {
  static constexpr bool light = true;
  static constexpr Reads reads_a{.outputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::where;
    return where(x <= T(0), T(0), x);  // -0 gives 0; NaN stays
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    using math::where;
    return where(y <= T(0), T(0), gy);
  }
};

}  // namespace sherd::ops
