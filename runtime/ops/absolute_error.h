// |a - b|; the gradient where they are equal is 0.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct AbsoluteError : Functor<"absolute_error", 2, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b11};

  template <class T>
  constexpr T operator()(T a, T b) const {
    using math::where;
    const T d = a - b;
    return where(d < T(0), -d, d + T(0));  // -0 + 0 is +0
  }
  template <class T>
  constexpr T grad_a(T gy, T a, T b, T) const {
    using math::where;
    const T d = a - b;
    return where(d > T(0), gy, where(d < T(0), -gy, T(0)));
  }
  constexpr auto grad_b(auto gy, auto a, auto b, auto y) const { return -grad_a(gy, a, b, y); }
};

}  // namespace sherd::ops
