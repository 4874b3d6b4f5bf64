// The nearest integer, of two the even one; the gradient is 0.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Round {
  static constexpr std::string_view name = "round";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{};

  template <class T>
  constexpr T operator()(T x) const {
    return math::round(x);
  }
  template <class T>
  constexpr T grad_a(T, T, T) const {
    return T(0);
  }
  bool operator==(const Round&) const = default;
};

}  // namespace sherd::ops
