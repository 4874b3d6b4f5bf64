// The largest integer not above x; the gradient is 0.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Floor {
  static constexpr std::string_view name = "floor";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{};

  template <class T>
  constexpr T operator()(T x) const {
    return std::floor(x);
  }
  template <class T>
  constexpr T grad_a(T, T, T) const {
    return T(0);
  }
  bool operator==(const Floor&) const = default;
};

}  // namespace sherd::ops
