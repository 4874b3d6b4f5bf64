// (a - b)^2.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct SquaredError : Functor<"squared_error", 2, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b11};

  template <class T>
  constexpr T operator()(T a, T b) const {
    const T d = a - b;
    return d * d;
  }
  template <class T>
  constexpr T grad_a(T gy, T a, T b, T) const {
    return gy * (T(2) * (a - b));
  }
  constexpr auto grad_b(auto gy, auto a, auto b, auto y) const { return -grad_a(gy, a, b, y); }
};

}  // namespace sherd::ops
