// x limited to [min, max], NaN kept, and NaN where a limit is; the gradient passes strictly inside.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Clamp {
  static constexpr std::string_view name = "clamp";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = number_dtypes;
  static constexpr bool light = true;
  static constexpr Reads reads_a{.inputs = 1};
  Number min = 0, max = 1;

  template <class T>
  constexpr T operator()(T x) const {
    using math::where;
    const T low = min.as<T>(), high = max.as<T>();
    const T above = where(x < low, low, x), inside = where(above > high, high, above);
    return where(low == low, where(high == high, inside, high), low);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::where;
    return where(x > min.as<T>(), where(x < max.as<T>(), gy, T(0)), T(0));
  }
  void fields(auto&& on) const {
    on("min", min);
    on("max", max);
  }
  bool operator==(const Clamp&) const = default;
};

}  // namespace sherd::ops
