// silu(a) b: a gate and what it lets through (Shazeer, 2020).
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Swiglu : Functor<"swiglu", 2, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b1};

  constexpr auto operator()(auto a, auto b) const {
    using math::sigmoid;
    return a * sigmoid(a) * b;
  }
  template <class T>
  constexpr T grad_a(T gy, T a, T b, T) const {
    using math::sigmoid;
    const T s = sigmoid(a);
    return gy * b * s * (T(1) + a * (T(1) - s));
  }
  constexpr auto grad_b(auto gy, auto a, auto, auto) const {
    using math::sigmoid;
    return gy * (a * sigmoid(a));
  }
};

}  // namespace sherd::ops
