// 1 above 0, -1 below, else 0, of NaN too; the gradient is 0.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Sign {
  static constexpr std::string_view name = "sign";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = number_dtypes;
  static constexpr Reads reads_a{};

  template <class T>
  constexpr T operator()(T x) const {
    using math::where;
    return where(x > T(0), T(1), where(x < T(0), static_cast<T>(-1), T(0)));
  }
  template <class T>
  constexpr T grad_a(T, T, T) const {
    return T(0);
  }
  bool operator==(const Sign&) const = default;
};

}  // namespace sherd::ops
