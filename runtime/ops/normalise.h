// What a norm of channels does to each element.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

/// (x - mean) factor + shift, the last two steps rounded once.
struct Normalise : Functor<"normalise", 4, floating_dtypes> {
  static constexpr bool light = true;
  static constexpr bool differentiable = false;

  template <class T>
  constexpr T operator()(T x, T mean, T factor, T shift) const {
    using math::fma;
    return fma(x - mean, factor, shift);
  }
};

}  // namespace sherd::ops
