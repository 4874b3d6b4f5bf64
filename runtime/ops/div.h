// a / b; integers are refused, since a quotient of integers is rarely meant.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Div {
  static constexpr std::string_view name = "div";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr bool light = true;
  static constexpr Reads reads_a{.inputs = 0b10};
  static constexpr Reads reads_b{.inputs = 0b11};
  static constexpr double low = 0.3, high = 3;  // where it is tested

  template <class T>
  constexpr T operator()(T a, T b) const {
    return a / b;
  }
  template <class T>
  constexpr T grad_a(T gy, T, T b, T) const {
    return gy / b;
  }
  template <class T>
  constexpr T grad_b(T gy, T a, T b, T) const {
    return -gy * (a / b) / b;
  }
  bool operator==(const Div&) const = default;
};

}  // namespace sherd::ops
