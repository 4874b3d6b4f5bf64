// The angle of a cosine; NaN outside [-1, 1].
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Acos {
  static constexpr std::string_view name = "acos";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = -0.8, high = 0.8;  // where it is tested

  template <class T>
  constexpr T operator()(T x) const {
    using math::acos;
    return acos(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::rsqrt;
    return -gy * rsqrt(T(1) - x * x);
  }
  bool operator==(const Acos&) const = default;
};

}  // namespace sherd::ops
