// x squared.
#pragma once

#include "runtime/functor.h"
#include "runtime/wrapping.h"

namespace sherd::ops {

struct Square {
  static constexpr std::string_view name = "square";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = number_dtypes;
  static constexpr bool light = true;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    return math::wrapping(std::multiplies<>{}, x, x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy * (T(2) * x);
  }
  bool operator==(const Square&) const = default;
};

}  // namespace sherd::ops
