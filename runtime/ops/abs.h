// Absolute value; the gradient at 0 is 0.
#pragma once

#include "runtime/functor.h"
#include "runtime/wrapping.h"

namespace sherd::ops {

struct Abs : Functor<"abs", 1, number_dtypes> {
  static constexpr bool light = true;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::where;
    return where(x < T(0), math::negated(x), T(x + T(0)));  // -0 + 0 is +0
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::where;
    return where(x > T(0), gy, where(x < T(0), T(-gy), T(0)));
  }
  template <class U>
  constexpr U on_bits(U x) const {
    return static_cast<U>(x & 0x7fff);
  }
};

}  // namespace sherd::ops
