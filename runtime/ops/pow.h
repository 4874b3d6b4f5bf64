// a to the power b; 0 to the power 0 is 1.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Pow {
  static constexpr std::string_view name = "pow";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b11, .outputs = 1};
  static constexpr double low = 0.3, high = 2;  // where it is tested

  template <class T>
  constexpr T operator()(T a, T b) const {
    using math::pow;
    return pow(a, b);
  }
  template <class T>
  constexpr T grad_a(T gy, T a, T b, T) const {
    using math::only_if;
    using math::pow;
    return only_if(b != T(0), gy * (b * pow(a, b - T(1))));
  }
  template <class T>
  constexpr T grad_b(T gy, T a, T b, T y) const {
    using math::log;
    using math::where;
    return where(a == T(0), where(b >= T(0), T(0), gy * y * log(a)), gy * y * log(a));
  }
  bool operator==(const Pow&) const = default;
};

}  // namespace sherd::ops
