// The angle of (b, a), from -pi to pi; the gradients at the origin are 0.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Atan2 {
  static constexpr std::string_view name = "atan2";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b11};
  static constexpr double low = 0.3, high = 2;  // where it is tested

  template <class T>
  constexpr T operator()(T a, T b) const {
    using math::atan2;
    return atan2(a, b);
  }
  template <class T>
  constexpr T grad_a(T gy, T a, T b, T) const {
    return gy * (b / square(a, b));
  }
  template <class T>
  constexpr T grad_b(T gy, T a, T b, T) const {
    return gy * (-a / square(a, b));
  }
  bool operator==(const Atan2&) const = default;

 private:
  /// Of the distance from the origin, where both gradients are 0.
  template <class T>
  static constexpr T square(T a, T b) {
    using math::where;
    const T sum = a * a + b * b;
    return where(sum == T(0), T(1), sum);
  }
};

}  // namespace sherd::ops
