// The integer at or below a / b; steps have no slope.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct FloorDivide : Functor<"floor_divide", 2, number_dtypes> {
  static constexpr Reads reads_a{};
  static constexpr Reads reads_b{};
  static constexpr double low = 0.3, high = 2;  // where it is tested

  constexpr auto operator()(auto a, auto b) const { return math::floor_divide(a, b); }
  template <class T>
  constexpr T grad_a(T, T, T, T) const {
    return T(0);
  }
  template <class T>
  constexpr T grad_b(T, T, T, T) const {
    return T(0);
  }
};

}  // namespace sherd::ops
