// Hyperbolic functions and their inverses.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

/// Hyperbolic sine.
struct Sinh : Functor<"sinh", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};

  constexpr auto operator()(auto x) const {
    using math::sinh;
    return sinh(x);
  }
  constexpr auto grad_a(auto gy, auto x, auto) const {
    using math::cosh;
    return gy * cosh(x);
  }
};

/// Hyperbolic cosine.
struct Cosh : Functor<"cosh", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};

  constexpr auto operator()(auto x) const {
    using math::cosh;
    return cosh(x);
  }
  constexpr auto grad_a(auto gy, auto x, auto) const {
    using math::sinh;
    return gy * sinh(x);
  }
};

/// Hyperbolic tangent.
struct Tanh : Functor<"tanh", 1, floating_dtypes> {
  static constexpr Reads reads_a{.outputs = 1};

  constexpr auto operator()(auto x) const {
    using math::tanh;
    return tanh(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * (T(1) - y * y);
  }
};

/// The inverse of the hyperbolic sine.
struct Asinh : Functor<"asinh", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};

  constexpr auto operator()(auto x) const {
    using math::asinh;
    return asinh(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::rsqrt;
    return gy * rsqrt(x * x + T(1));
  }
};

/// The inverse of the hyperbolic cosine; NaN below 1.
struct Acosh : Functor<"acosh", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = 1.3, high = 4;  // where it is tested

  constexpr auto operator()(auto x) const {
    using math::acosh;
    return acosh(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::rsqrt;
    return gy * rsqrt(x * x - T(1));
  }
};

/// The inverse of the hyperbolic tangent; NaN outside [-1, 1].
struct Atanh : Functor<"atanh", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = -0.8, high = 0.8;  // where it is tested

  constexpr auto operator()(auto x) const {
    using math::atanh;
    return atanh(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy / (T(1) - x * x);
  }
};

}  // namespace sherd::ops
