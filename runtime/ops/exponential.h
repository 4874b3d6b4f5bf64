// Exponentials and logarithms. A logarithm of 0 is -inf, of a negative NaN.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

/// e^x.
struct Exp : Functor<"exp", 1, floating_dtypes> {
  static constexpr Reads reads_a{.outputs = 1};

  constexpr auto operator()(auto x) const {
    using math::exp;
    return exp(x);
  }
  constexpr auto grad_a(auto gy, auto, auto y) const { return gy * y; }
};

/// 2 to the power x.
struct Exp2 : Functor<"exp2", 1, floating_dtypes> {
  static constexpr Reads reads_a{.outputs = 1};

  constexpr auto operator()(auto x) const {
    using math::exp2;
    return exp2(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * (y * T(0.6931471805599453));
  }
};

/// e^x - 1, exact to rounding for small x too.
struct Expm1 : Functor<"expm1", 1, floating_dtypes> {
  static constexpr Reads reads_a{.outputs = 1};

  constexpr auto operator()(auto x) const {
    using math::expm1;
    return expm1(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * (y + T(1));
  }
};

/// Natural logarithm; log(0) is -inf and a negative gives NaN.
struct Log : Functor<"log", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = 0.1, high = 3;  // where it is tested

  constexpr auto operator()(auto x) const {
    using math::log;
    return log(x);
  }
  constexpr auto grad_a(auto gy, auto x, auto) const { return gy / x; }
};

/// Logarithm to the base 2.
struct Log2 : Functor<"log2", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = 0.3, high = 3;  // where it is tested

  constexpr auto operator()(auto x) const {
    using math::log2;
    return log2(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy / (x * T(0.6931471805599453));
  }
};

/// Logarithm to the base 10.
struct Log10 : Functor<"log10", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = 0.3, high = 3;  // where it is tested

  constexpr auto operator()(auto x) const {
    using math::log10;
    return log10(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy / (x * T(2.302585092994046));
  }
};

/// log(1 + x), exact to rounding for small x too.
struct Log1p : Functor<"log1p", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = -0.8, high = 3;  // where it is tested

  constexpr auto operator()(auto x) const { return math::log1p(x); }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy / (x + T(1));
  }
};

}  // namespace sherd::ops
