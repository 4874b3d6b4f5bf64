// GELU with the tanh approximation (Hendrycks and Gimpel, 2016).
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct GeluTanh : Functor<"gelu_tanh", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    using math::tanh;
    return T(0.5) * x * (T(1) + tanh(T(0.7978845608028654) * (x + T(0.044715) * x * x * x)));
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::tanh;
    const T t = tanh(T(0.7978845608028654) * (x + T(0.044715) * x * x * x));
    const T inner = T(0.7978845608028654) * (T(1) + T(0.134145) * x * x);
    return gy * (T(0.5) * (T(1) + t) + T(0.5) * x * (T(1) - t * t) * inner);
  }
};

}  // namespace sherd::ops
