// The inverse of the hyperbolic tangent; NaN outside [-1, 1].
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Atanh {
  static constexpr std::string_view name = "atanh";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = -0.8, high = 0.8;  // where it is tested

  template <class T>
  constexpr T operator()(T x) const {
    using math::atanh;
    return atanh(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy / (T(1) - x * x);
  }
  bool operator==(const Atanh&) const = default;
};

}  // namespace sherd::ops
