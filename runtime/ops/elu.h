// scale x where positive, scale alpha (e^x - 1) elsewhere.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Elu {
  static constexpr std::string_view name = "elu";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};
  double alpha = 1, scale = 1;

  template <class T>
  constexpr T operator()(T x) const {
    using math::where;
    return T(scale) * where(x > T(0), x, T(alpha) * math::expm1(x));
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::exp;
    using math::where;
    // The exponential of what is not above 0 alone: an infinity, times 0, would be NaN in a second
    // derivative.
    const T below = exp(where(x <= T(0), x, T(0)));
    return gy * (T(scale) * where(x <= T(0), T(alpha) * below, T(1)));
  }
  void fields(auto&& on) const {
    on("alpha", alpha);
    on("scale", scale);
  }
  bool operator==(const Elu&) const = default;
};

}  // namespace sherd::ops
