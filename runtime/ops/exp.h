// e^x.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Exp {
  static constexpr std::string_view name = "exp";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.outputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::exp;
    return exp(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * y;
  }
  bool operator==(const Exp&) const = default;
};

}  // namespace sherd::ops
