// The integer at or below a / b.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct FloorDivide {
  static constexpr std::string_view name = "floor_divide";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = number_dtypes;
  static constexpr bool differentiable = false;

  template <class T>
  constexpr T operator()(T a, T b) const {
    return math::floor_divide(a, b);
  }
  bool operator==(const FloorDivide&) const = default;
};

}  // namespace sherd::ops
