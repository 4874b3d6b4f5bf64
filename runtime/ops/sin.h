// Sine; radians.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Sin {
  static constexpr std::string_view name = "sin";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::sin;
    return sin(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::cos;
    return gy * cos(x);
  }
  bool operator==(const Sin&) const = default;
};

}  // namespace sherd::ops
