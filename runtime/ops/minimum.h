// The smaller of both, NaN if either is; equal values share the gradient by halves.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Minimum : Functor<"minimum", 2, number_dtypes> {
  static constexpr bool light = true;
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b11};

  constexpr auto operator()(auto a, auto b) const {
    using math::where;
    return where(a != a, a, where(b != b, b, where(a < b, a, b)));
  }
  template <class T>
  constexpr T grad_a(T gy, T a, T b, T) const {
    using math::where;
    return where(a == b, T(gy / T(2)), where(a > b, T(0), gy));
  }
  template <class T>
  constexpr T grad_b(T gy, T a, T b, T) const {
    using math::where;
    return where(a == b, T(gy / T(2)), where(b > a, T(0), gy));
  }
};

}  // namespace sherd::ops
