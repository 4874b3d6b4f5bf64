// The least integer not below x; the gradient is 0.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Ceil {
  static constexpr std::string_view name = "ceil";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{};

  template <class T>
  constexpr T operator()(T x) const {
    return std::ceil(x);
  }
  template <class T>
  constexpr T grad_a(T, T, T) const {
    return T(0);
  }
  bool operator==(const Ceil&) const = default;
};

}  // namespace sherd::ops
