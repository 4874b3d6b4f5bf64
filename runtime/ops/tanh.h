// Hyperbolic tangent.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Tanh {
  static constexpr std::string_view name = "tanh";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.outputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::tanh;
    return tanh(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * (T(1) - y * y);
  }
  bool operator==(const Tanh&) const = default;
};

}  // namespace sherd::ops
