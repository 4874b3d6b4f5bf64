// True where a differs from b; NaN differs from everything.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct NotEqual {
  static constexpr std::string_view name = "not_equal";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = any_dtype;
  static constexpr bool light = true;
  static constexpr bool gives_bool = true;
  static constexpr bool differentiable = false;

  template <class T>
  constexpr bool operator()(T a, T b) const {
    return a != b;
  }
  bool operator==(const NotEqual&) const = default;
};

}  // namespace sherd::ops
