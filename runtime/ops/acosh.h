// The inverse of the hyperbolic cosine; NaN below 1.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Acosh {
  static constexpr std::string_view name = "acosh";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = 1.3, high = 4;  // where it is tested

  template <class T>
  constexpr T operator()(T x) const {
    using math::acosh;
    return acosh(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::rsqrt;
    return gy * rsqrt(x * x - T(1));
  }
  bool operator==(const Acosh&) const = default;
};

}  // namespace sherd::ops
