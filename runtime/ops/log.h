// Natural logarithm; log(0) is -inf and a negative gives NaN.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Log {
  static constexpr std::string_view name = "log";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = 0.1, high = 3;  // where it is tested

  template <class T>
  constexpr T operator()(T x) const {
    using math::log;
    return log(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy / x;
  }
  bool operator==(const Log&) const = default;
};

}  // namespace sherd::ops
