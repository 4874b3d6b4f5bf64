// log(1 + x), exact to rounding for small x too.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Log1p {
  static constexpr std::string_view name = "log1p";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = -0.8, high = 3;  // where it is tested

  template <class T>
  constexpr T operator()(T x) const {
    return math::log1p(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy / (x + T(1));
  }
  bool operator==(const Log1p&) const = default;
};

}  // namespace sherd::ops
