// a b.
#pragma once

#include "runtime/functor.h"
#include "runtime/wrapping.h"

namespace sherd::ops {

struct Mul {
  static constexpr std::string_view name = "mul";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = number_dtypes;
  static constexpr bool light = true;
  static constexpr Reads reads_a{.inputs = 0b10};
  static constexpr Reads reads_b{.inputs = 0b01};

  template <class T>
  constexpr T operator()(T a, T b) const {
    return math::wrapping(std::multiplies<>{}, a, b);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T b, T) const {
    return gy * b;
  }
  template <class T>
  constexpr T grad_b(T gy, T a, T, T) const {
    return gy * a;
  }
  bool operator==(const Mul&) const = default;
};

}  // namespace sherd::ops
