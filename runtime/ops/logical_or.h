// True where either is nonzero.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct LogicalOr {
  static constexpr std::string_view name = "logical_or";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = any_dtype;
  static constexpr bool gives_bool = true;
  static constexpr bool differentiable = false;

  template <class T>
  constexpr bool operator()(T a, T b) const {
    return (a != T(0)) || (b != T(0));
  }
  bool operator==(const LogicalOr&) const = default;
};

}  // namespace sherd::ops
