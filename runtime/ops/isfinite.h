// Neither infinite nor NaN.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct IsFinite {
  static constexpr std::string_view name = "isfinite";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr bool gives_bool = true;
  static constexpr bool differentiable = false;

  template <class T>
  constexpr bool operator()(T x) const {
    return x - x == T(0);
  }
  bool operator==(const IsFinite&) const = default;
};

}  // namespace sherd::ops
