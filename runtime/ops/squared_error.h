// (a - b)^2.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct SquaredError {
  static constexpr std::string_view name = "squared_error";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b11};

  template <class T>
  constexpr T operator()(T a, T b) const {
    const T d = a - b;
    return d * d;
  }
  template <class T>
  constexpr T grad_a(T gy, T a, T b, T) const {
    return gy * (T(2) * (a - b));
  }
  template <class T>
  constexpr T grad_b(T gy, T a, T b, T y) const {
    return -grad_a(gy, a, b, y);
  }
  bool operator==(const SquaredError&) const = default;
};

}  // namespace sherd::ops
