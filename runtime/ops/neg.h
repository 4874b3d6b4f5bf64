// Negation.
#pragma once

#include "runtime/functor.h"
#include "runtime/wrapping.h"

namespace sherd::ops {

struct Neg {
  static constexpr std::string_view name = "neg";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = number_dtypes;
  static constexpr bool light = true;
  static constexpr Reads reads_a{};

  template <class T>
  constexpr T operator()(T x) const {
    return math::negated(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T) const {
    return -gy;
  }
  template <class U>
  constexpr U on_bits(U x) const {
    return static_cast<U>(x ^ 0x8000);
  }
  bool operator==(const Neg&) const = default;
};

}  // namespace sherd::ops
