// The error function.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Erf {
  static constexpr std::string_view name = "erf";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::erf;
    return erf(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::exp;
    return gy * T(1.1283791670955126) * exp(-x * x);  // 2 / sqrt(pi)
  }
  bool operator==(const Erf&) const = default;
};

}  // namespace sherd::ops
