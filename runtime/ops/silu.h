// x sigmoid(x), also called swish.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Silu {
  static constexpr std::string_view name = "silu";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::sigmoid;
    return x * sigmoid(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::sigmoid;
    const T s = sigmoid(x);
    return gy * s * (T(1) + x * (T(1) - s));
  }
  bool operator==(const Silu&) const = default;
};

}  // namespace sherd::ops
