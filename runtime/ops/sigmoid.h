// 1 / (1 + e^-x).
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Sigmoid {
  static constexpr std::string_view name = "sigmoid";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.outputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::sigmoid;
    return sigmoid(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * y * (T(1) - y);
  }
  bool operator==(const Sigmoid&) const = default;
};

}  // namespace sherd::ops
