// The error function.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Erf : Functor<"erf", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};

  constexpr auto operator()(auto x) const {
    using math::erf;
    return erf(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::exp;
    return gy * T(1.1283791670955126) * exp(-x * x);  // 2 / sqrt(pi)
  }
};

}  // namespace sherd::ops
