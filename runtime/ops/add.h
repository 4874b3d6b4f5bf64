// a + b.
#pragma once

#include "runtime/functor.h"
#include "runtime/wrapping.h"

namespace sherd::ops {

struct Add {
  static constexpr std::string_view name = "add";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = number_dtypes;
  static constexpr bool light = true;
  static constexpr Mask identity_grads = 0b11;

  template <class T>
  constexpr T operator()(T a, T b) const {
    return math::wrapping(std::plus<>{}, a, b);
  }
  bool operator==(const Add&) const = default;
};

}  // namespace sherd::ops
