// Infinite, of either sign.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct IsInf {
  static constexpr std::string_view name = "isinf";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr bool gives_bool = true;
  static constexpr bool differentiable = false;

  template <class T>
  constexpr bool operator()(T x) const {
    return x == x && x - x != T(0);
  }
  bool operator==(const IsInf&) const = default;
};

}  // namespace sherd::ops
