// -t log p - (1 - t) log(1 - p) with p = 1 / (1 + e^-x), of logits x and targets t, without making p.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct BceWithLogits : Functor<"bce_with_logits", 2, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b01};

  template <class T>
  constexpr T operator()(T x, T t) const {
    using math::fabs;
    using math::where;
    // log(1 + e^-x), whichever sign x has.
    const T softplus = math::log1p_exp_below(fabs(x)) + where(x < T(0), -x, T(0));
    return (T(1) - t) * x + softplus;
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T t, T) const {
    using math::sigmoid;
    return gy * ((T(1) - t) * sigmoid(x) - t * sigmoid(-x));  // sigmoid(x) - t loses all digits near 1
  }
  constexpr auto grad_b(auto gy, auto x, auto, auto) const { return gy * -x; }
};

}  // namespace sherd::ops
