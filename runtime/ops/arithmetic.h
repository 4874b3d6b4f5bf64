// Sums, differences, products and quotients.
#pragma once

#include "runtime/functor.h"
#include "runtime/wrapping.h"

namespace sherd::ops {

/// a + b.
struct Add : Functor<"add", 2, number_dtypes> {
  static constexpr bool light = true;
  static constexpr Mask identity_grads = 0b11;

  constexpr auto operator()(auto a, auto b) const { return math::wrapping(std::plus<>{}, a, b); }
};

/// a - b.
struct Sub : Functor<"sub", 2, number_dtypes> {
  static constexpr bool light = true;
  static constexpr Mask identity_grads = 0b01;
  static constexpr Reads reads_b{};

  constexpr auto operator()(auto a, auto b) const { return math::wrapping(std::minus<>{}, a, b); }
  constexpr auto grad_b(auto gy, auto, auto, auto) const { return -gy; }
};

/// a b.
struct Mul : Functor<"mul", 2, number_dtypes> {
  static constexpr bool light = true;
  static constexpr Reads reads_a{.inputs = 0b10};
  static constexpr Reads reads_b{.inputs = 0b01};

  constexpr auto operator()(auto a, auto b) const { return math::wrapping(std::multiplies<>{}, a, b); }
  constexpr auto grad_a(auto gy, auto, auto b, auto) const { return gy * b; }
  constexpr auto grad_b(auto gy, auto a, auto, auto) const { return gy * a; }
};

/// a / b; integers are refused, since a quotient of integers is rarely meant.
struct Div : Functor<"div", 2, floating_dtypes> {
  static constexpr bool light = true;
  static constexpr Reads reads_a{.inputs = 0b10};
  static constexpr Reads reads_b{.inputs = 0b11};
  static constexpr double low = 0.3, high = 3;  // where it is tested

  constexpr auto operator()(auto a, auto b) const { return a / b; }
  constexpr auto grad_a(auto gy, auto, auto b, auto) const { return gy / b; }
  constexpr auto grad_b(auto gy, auto a, auto b, auto) const { return -gy * (a / b) / b; }
};

/// Negation.
struct Neg : Functor<"neg", 1, number_dtypes> {
  static constexpr bool light = true;
  static constexpr Reads reads_a{};

  constexpr auto operator()(auto x) const { return math::negated(x); }
  constexpr auto grad_a(auto gy, auto, auto) const { return -gy; }
  template <class U>
  constexpr U on_bits(U x) const {
    return static_cast<U>(x ^ 0x8000);
  }
};

}  // namespace sherd::ops
