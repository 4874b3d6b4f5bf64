// The inverse of the hyperbolic sine.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Asinh {
  static constexpr std::string_view name = "asinh";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::asinh;
    return asinh(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::rsqrt;
    return gy * rsqrt(x * x + T(1));
  }
  bool operator==(const Asinh&) const = default;
};

}  // namespace sherd::ops
