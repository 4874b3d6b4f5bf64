// x Phi(x) with the exact normal distribution function (Hendrycks and Gimpel, 2016).
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Gelu {
  static constexpr std::string_view name = "gelu";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::normal;
    return x * normal(x).cdf;
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::normal;
    const math::Normal<T> at = normal(x);
    return gy * (at.cdf + x * T(0.3989422804014327) * at.bell);
  }
  bool operator==(const Gelu&) const = default;
};

}  // namespace sherd::ops
