// An elementwise op of an application's own, in a header whose text kernels of fused regions are made of.
#pragma once

#include "runtime/functor.h"

namespace sherd::test {

/// x^2 below a bound, and a line above: a functor with a field, and a gradient that reads the input.
struct Bent {
  static constexpr std::string_view name = "bent";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 0b1};
  float bound = 1;

  template <class T>
  constexpr T operator()(T x) const {
    using math::where;
    return where(x > T(bound), T(2) * T(bound) * x - T(bound) * T(bound), x * x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    using math::where;
    return gy * T(2) * where(x > T(bound), T(bound), x);
  }
  void fields(auto&& on) const { on("bound", bound); }
  bool operator==(const Bent&) const = default;
};

/// Of two, light.
struct Blend : Functor<"blend", 2, floating_dtypes> {
  static constexpr bool light = true;
  static constexpr Reads reads_a{}, reads_b{};
  template <class T>
  constexpr T operator()(T a, T b) const {
    return a * T(0.25) + b * T(0.75);
  }
  constexpr auto grad_a(auto gy, auto a, auto, auto) const { return gy * decltype(a)(0.25); }
  constexpr auto grad_b(auto gy, auto a, auto, auto) const { return gy * decltype(a)(0.75); }
};

/// Adds their kernels for a GPU.
void add_own_ops_on_gpu();

}  // namespace sherd::test
