// log(1 + e^x), without overflow.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Softplus {
  static constexpr std::string_view name = "softplus";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::where;
    return where(x > T(0), x, where(x == x, T(0), x)) + math::log1p(math::exp(-std::fabs(x)));
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::sigmoid;
    return gy * sigmoid(x);
  }
  bool operator==(const Softplus&) const = default;
};

}  // namespace sherd::ops
