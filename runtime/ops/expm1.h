// e^x - 1, exact to rounding for small x too.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Expm1 {
  static constexpr std::string_view name = "expm1";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.outputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::expm1;
    return expm1(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * (y + T(1));
  }
  bool operator==(const Expm1&) const = default;
};

}  // namespace sherd::ops
