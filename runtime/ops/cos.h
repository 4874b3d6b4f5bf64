// Cosine; radians.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Cos {
  static constexpr std::string_view name = "cos";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::cos;
    return cos(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::sin;
    return -gy * sin(x);
  }
  bool operator==(const Cos&) const = default;
};

}  // namespace sherd::ops
