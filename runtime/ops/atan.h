// The angle of a tangent, between -pi/2 and pi/2.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Atan {
  static constexpr std::string_view name = "atan";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::atan;
    return atan(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy / (T(1) + x * x);
  }
  bool operator==(const Atan&) const = default;
};

}  // namespace sherd::ops
