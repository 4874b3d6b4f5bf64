// True where a <= b; comparisons with NaN are false.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct LessEqual {
  static constexpr std::string_view name = "less_equal";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = any_dtype;
  static constexpr bool light = true;
  static constexpr bool gives_bool = true;
  static constexpr bool differentiable = false;

  template <class T>
  constexpr bool operator()(T a, T b) const {
    return a <= b;
  }
  bool operator==(const LessEqual&) const = default;
};

}  // namespace sherd::ops
