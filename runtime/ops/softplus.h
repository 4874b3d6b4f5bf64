// log(1 + e^x), without overflow.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Softplus : Functor<"softplus", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::fabs;
    using math::where;
    return where(x > T(0), x, where(x == x, T(0), x)) + math::log1p_exp_below(fabs(x));
  }
  constexpr auto grad_a(auto gy, auto x, auto) const {
    using math::sigmoid;
    return gy * sigmoid(x);
  }
};

}  // namespace sherd::ops
