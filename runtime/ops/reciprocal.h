// 1 / x.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Reciprocal {
  static constexpr std::string_view name = "reciprocal";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr bool light = true;
  static constexpr Reads reads_a{.outputs = 1};
  static constexpr double low = 0.3, high = 3;  // where it is tested

  template <class T>
  constexpr T operator()(T x) const {
    return T(1) / x;
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return -gy * y * y;
  }
  bool operator==(const Reciprocal&) const = default;
};

}  // namespace sherd::ops
