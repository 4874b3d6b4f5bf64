// 2 to the power x.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Exp2 {
  static constexpr std::string_view name = "exp2";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.outputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::exp2;
    return exp2(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * (y * T(0.6931471805599453));
  }
  bool operator==(const Exp2&) const = default;
};

}  // namespace sherd::ops
