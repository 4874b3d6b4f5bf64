// a - b.
#pragma once

#include "runtime/functor.h"
#include "runtime/wrapping.h"

namespace sherd::ops {

struct Sub {
  static constexpr std::string_view name = "sub";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = number_dtypes;
  static constexpr bool light = true;
  static constexpr Mask identity_grads = 0b01;
  static constexpr Reads reads_b{};

  template <class T>
  constexpr T operator()(T a, T b) const {
    return math::wrapping(std::minus<>{}, a, b);
  }
  template <class T>
  constexpr T grad_b(T gy, T, T, T) const {
    return -gy;
  }
  bool operator==(const Sub&) const = default;
};

}  // namespace sherd::ops
