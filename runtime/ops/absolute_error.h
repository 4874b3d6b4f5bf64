// |a - b|; the gradient where they are equal is 0.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct AbsoluteError {
  static constexpr std::string_view name = "absolute_error";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b11};

  template <class T>
  constexpr T operator()(T a, T b) const {
    using math::where;
    const T d = a - b;
    return where(d < T(0), -d, d + T(0));  // -0 + 0 is +0
  }
  template <class T>
  constexpr T grad_a(T gy, T a, T b, T) const {
    using math::where;
    const T d = a - b;
    return where(d > T(0), gy, where(d < T(0), -gy, T(0)));
  }
  template <class T>
  constexpr T grad_b(T gy, T a, T b, T y) const {
    return -grad_a(gy, a, b, y);
  }
  bool operator==(const AbsoluteError&) const = default;
};

}  // namespace sherd::ops
