// Square root.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Sqrt {
  static constexpr std::string_view name = "sqrt";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr bool light = true;
  static constexpr Reads reads_a{.outputs = 1};
  static constexpr double low = 0.1, high = 3;  // where it is tested

  template <class T>
  constexpr T operator()(T x) const {
    using math::sqrt;
    return sqrt(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy / (T(2) * y);
  }
  bool operator==(const Sqrt&) const = default;
};

}  // namespace sherd::ops
