// 1 / (1 + e^-x).
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Sigmoid : Functor<"sigmoid", 1, floating_dtypes> {
  static constexpr Reads reads_a{.outputs = 1};

  constexpr auto operator()(auto x) const {
    using math::sigmoid;
    return sigmoid(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * y * (T(1) - y);
  }
};

}  // namespace sherd::ops
