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
    using math::erf;
    return T(0.5) * x * (T(1) + erf(x * T(0.7071067811865476)));
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::erf;
    using math::exp;
    const T cdf = T(0.5) * (T(1) + erf(x * T(0.7071067811865476)));
    const T pdf = T(0.3989422804014327) * exp(T(-0.5) * x * x);
    return gy * (cdf + x * pdf);
  }
  bool operator==(const Gelu&) const = default;
};

}  // namespace sherd::ops
