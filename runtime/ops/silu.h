// x sigmoid(x), also called swish.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Silu : Functor<"silu", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};

  constexpr auto operator()(auto x) const {
    using math::sigmoid;
    return x * sigmoid(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::sigmoid;
    const T s = sigmoid(x);
    return gy * s * (T(1) + x * (T(1) - s));
  }
};

}  // namespace sherd::ops
