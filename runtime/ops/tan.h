// Tangent; radians.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Tan {
  static constexpr std::string_view name = "tan";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.outputs = 1};
  static constexpr double low = -1, high = 1;  // where it is tested

  template <class T>
  constexpr T operator()(T x) const {
    using math::tan;
    return tan(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * (T(1) + y * y);
  }
  bool operator==(const Tan&) const = default;
};

}  // namespace sherd::ops
