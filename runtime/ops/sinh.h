// Hyperbolic sine.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Sinh {
  static constexpr std::string_view name = "sinh";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::sinh;
    return sinh(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::cosh;
    return gy * cosh(x);
  }
  bool operator==(const Sinh&) const = default;
};

}  // namespace sherd::ops
