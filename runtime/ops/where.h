// `a` where the condition holds, `b` elsewhere.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Where : Functor<"where", 3, any_dtype> {
  static constexpr bool light = true;
  static constexpr bool first_is_condition = true;
  static constexpr Reads reads{.inputs = 0b001};

  template <class T>
  constexpr T operator()(bool condition, T a, T b) const {
    return condition ? a : b;
  }
  template <class U>
  constexpr U on_bits(bool condition, U a, U b) const {
    return condition ? a : b;
  }
  // Written in ops: the condition has a dtype of its own.
  SHERD_API Tensors grad(const GradArgs& args) const;
};

}  // namespace sherd::ops
