// What dividing a by b leaves, of the sign of b; the quotient is a constant to the gradient.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Remainder : Functor<"remainder", 2, number_dtypes> {
  static constexpr Mask identity_grads = 0b01;
  static constexpr Reads reads_b{.inputs = 0b11, .outputs = 1};
  static constexpr double low = 0.3, high = 2;  // where it is tested

  constexpr auto operator()(auto a, auto b) const { return math::remainder(a, b); }
  template <class T>
  constexpr T grad_b(T gy, T a, T b, T y) const {
    using math::round;
    using math::where;
    // The quotient that the remainder belongs to: -1 where it is b itself, an infinity or by rounding.
    const T quotient = where(y == b, T(-1), round(T((a - y) / b)));
    return T(-gy * where(b == T(0), T(a / b), quotient));
  }
};

}  // namespace sherd::ops
