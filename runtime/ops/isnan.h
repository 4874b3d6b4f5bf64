// Not a number.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct IsNan {
  static constexpr std::string_view name = "isnan";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr bool gives_bool = true;
  static constexpr bool differentiable = false;

  template <class T>
  constexpr bool operator()(T x) const {
    return x != x;
  }
  bool operator==(const IsNan&) const = default;
};

}  // namespace sherd::ops
