// 1 / sqrt(x).
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Rsqrt {
  static constexpr std::string_view name = "rsqrt";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr bool light = true;
  static constexpr Reads reads_a{.outputs = 1};
  static constexpr double low = 0.1, high = 3;  // where it is tested

  template <class T>
  constexpr T operator()(T x) const {
    using math::rsqrt;
    return rsqrt(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * T(-0.5) * y * y * y;
  }
  bool operator==(const Rsqrt&) const = default;
};

}  // namespace sherd::ops
