// Of a difference d: d^2 / 2 within `bound`, bound (|d| - bound / 2) outside, over `divisor`; neither has a
// jump in the gradient.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Huber {
  static constexpr std::string_view name = "huber";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b11};
  double bound = 1, divisor = 1;

  template <class T>
  constexpr T operator()(T a, T b) const {
    const T d = a - b, near = limited(d);
    return near / T(divisor) * (d - near * T(0.5));
  }
  template <class T>
  constexpr T grad_a(T gy, T a, T b, T) const {
    return gy * (limited(a - b) / T(divisor));
  }
  template <class T>
  constexpr T grad_b(T gy, T a, T b, T y) const {
    return -grad_a(gy, a, b, y);
  }
  void fields(auto&& on) const {
    on("bound", bound);
    on("divisor", divisor);
  }
  bool operator==(const Huber&) const = default;

 private:
  template <class T>
  constexpr T limited(T d) const {
    using math::where;
    return where(d <= T(-bound), T(-bound), where(d >= T(bound), T(bound), d));
  }
};

}  // namespace sherd::ops
