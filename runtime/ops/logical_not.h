// True where zero.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct LogicalNot {
  static constexpr std::string_view name = "logical_not";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = any_dtype;
  static constexpr bool gives_bool = true;
  static constexpr bool differentiable = false;

  template <class T>
  constexpr bool operator()(T x) const {
    return !(x != T(0));
  }
  bool operator==(const LogicalNot&) const = default;
};

}  // namespace sherd::ops
