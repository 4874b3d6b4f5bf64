// Functions of an angle in radians, and their inverses.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

/// Sine; radians.
struct Sin : Functor<"sin", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};

  constexpr auto operator()(auto x) const {
    using math::sin;
    return sin(x);
  }
  constexpr auto grad_a(auto gy, auto x, auto) const {
    using math::cos;
    return gy * cos(x);
  }
};

/// Cosine; radians.
struct Cos : Functor<"cos", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};

  constexpr auto operator()(auto x) const {
    using math::cos;
    return cos(x);
  }
  constexpr auto grad_a(auto gy, auto x, auto) const {
    using math::sin;
    return -gy * sin(x);
  }
};

/// Tangent; radians.
struct Tan : Functor<"tan", 1, floating_dtypes> {
  static constexpr Reads reads_a{.outputs = 1};
  static constexpr double low = -1, high = 1;  // where it is tested

  constexpr auto operator()(auto x) const {
    using math::tan;
    return tan(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * (T(1) + y * y);
  }
};

/// The angle of a sine; NaN outside [-1, 1].
struct Asin : Functor<"asin", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = -0.8, high = 0.8;  // where it is tested

  constexpr auto operator()(auto x) const {
    using math::asin;
    return asin(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::rsqrt;
    return gy * rsqrt(T(1) - x * x);
  }
};

/// The angle of a cosine; NaN outside [-1, 1].
struct Acos : Functor<"acos", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};
  static constexpr double low = -0.8, high = 0.8;  // where it is tested

  constexpr auto operator()(auto x) const {
    using math::acos;
    return acos(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::rsqrt;
    return -gy * rsqrt(T(1) - x * x);
  }
};

/// The angle of a tangent, between -pi/2 and pi/2.
struct Atan : Functor<"atan", 1, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 1};

  constexpr auto operator()(auto x) const {
    using math::atan;
    return atan(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy / (T(1) + x * x);
  }
};

}  // namespace sherd::ops
