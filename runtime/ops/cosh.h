// Hyperbolic cosine.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Cosh {
  static constexpr std::string_view name = "cosh";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::cosh;
    return cosh(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::sinh;
    return gy * sinh(x);
  }
  bool operator==(const Cosh&) const = default;
};

}  // namespace sherd::ops
