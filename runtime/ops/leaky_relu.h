// x where positive, slope times x elsewhere.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct LeakyRelu {
  static constexpr std::string_view name = "leaky_relu";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr bool light = true;
  static constexpr Reads reads_a{.inputs = 1};
  double slope = 0.01;

  template <class T>
  constexpr T operator()(T x) const {
    using math::where;
    return where(x > T(0), x, T(slope) * x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::where;
    return where(x > T(0), gy, T(slope) * gy);
  }
  void fields(auto&& on) const { on("slope", slope); }
  bool operator==(const LeakyRelu&) const = default;
};

}  // namespace sherd::ops
