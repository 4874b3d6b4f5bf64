// x Phi(x) with the exact normal distribution function (Hendrycks and Gimpel, 2016).
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Gelu : Functor<"gelu", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};

  constexpr auto operator()(auto x) const {
    using math::normal;
    return x * normal(x).cdf;
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::normal;
    const math::Normal<T> at = normal(x);
    return gy * (at.cdf + x * T(0.3989422804014327) * at.bell);
  }
};

}  // namespace sherd::ops
