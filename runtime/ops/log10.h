// Logarithm to the base 10.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Log10 {
  static constexpr std::string_view name = "log10";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = 0.3, high = 3;  // where it is tested

  template <class T>
  constexpr T operator()(T x) const {
    using math::log10;
    return log10(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy / (x * T(2.302585092994046));
  }
  bool operator==(const Log10&) const = default;
};

}  // namespace sherd::ops
