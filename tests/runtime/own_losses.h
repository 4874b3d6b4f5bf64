// Losses as an application has them, for each of the things that such a functor may say. Safe to include in
// device code.
#pragma once

#include "runtime/functor.h"

namespace sherd::test {

/// delta^2 (sqrt(1 + (d / delta)^2) - 1) of the difference d, with a field.
struct Rooted {
  static constexpr std::string_view name = "rooted";
  static constexpr int arity = 2;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b11};
  double delta = 1;

  template <class T>
  constexpr T operator()(T x, T t) const {
    using math::sqrt;
    const T d = (x - t) / T(delta);
    return T(delta * delta) * (sqrt(T(1) + d * d) - T(1));
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T t, T) const {
    using math::sqrt;
    const T d = (x - t) / T(delta);
    return gy * (T(delta) * d / sqrt(T(1) + d * d));
  }
  constexpr auto grad_b(auto gy, auto x, auto t, auto y) const { return -grad_a(gy, x, t, y); }
  void fields(auto&& on) const { on("delta", delta); }
  bool operator==(const Rooted&) const = default;
};

/// exp(x t), whose gradients read the loss itself and one input each.
struct Grown : Functor<"grown", 2, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 0b10, .outputs = 1};
  static constexpr Reads reads_b{.inputs = 0b01, .outputs = 1};
  template <class T>
  constexpr T operator()(T x, T t) const {
    using math::exp;
    return exp(x * t);
  }
  constexpr auto grad_a(auto gy, auto, auto t, auto y) const { return gy * (t * y); }
  constexpr auto grad_b(auto gy, auto x, auto, auto y) const { return gy * (x * y); }
};

/// x - 3 t: the gradient of the input is the upstream one, that of the target reads nothing.
struct Tilted : Functor<"tilted", 2, floating_dtypes> {
  static constexpr Mask identity_grads = 0b01;
  static constexpr Reads reads_b{};
  template <class T>
  constexpr T operator()(T x, T t) const {
    return x - T(3) * t;
  }
  template <class T>
  constexpr T grad_b(T gy, T, T, T) const {
    return T(-3) * gy;
  }
};

}  // namespace sherd::test
