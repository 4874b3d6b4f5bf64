// Powers whose exponent is fixed.
#pragma once

#include "runtime/functor.h"
#include "runtime/ops/abs.h"
#include "runtime/wrapping.h"

namespace sherd::ops {

/// x squared.
struct Square : Functor<"square", 1, number_dtypes> {
  static constexpr bool light = true;
  static constexpr Reads reads_a{.inputs = 1};

  constexpr auto operator()(auto x) const { return math::wrapping(std::multiplies<>{}, x, x); }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy * (T(2) * x);
  }
};

/// Calls `body` with |x|^power, 1 or 2, as a functor.
template <class F>
constexpr auto with_size_to(int power, const F& body) {
  return power == 1 ? body(Abs{}) : body(Square{});
}

/// What both kinds of square root say.
template <detail::FixedName Name>
struct SquareRoot : Functor<Name, 1, floating_dtypes> {
  static constexpr bool light = true;
  static constexpr Reads reads_a{.outputs = 1};
  static constexpr double low = 0.1, high = 3;  // where it is tested

  constexpr auto operator()(auto x) const {
    using math::sqrt;
    return sqrt(x);
  }
};

/// Square root.
struct Sqrt : SquareRoot<"sqrt"> {
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy / (T(2) * y);
  }
};

/// Square root of what is at least 0, whose gradient at 0 is 0 and not infinite: of sums of squares.
struct Root : SquareRoot<"root"> {
  template <class T>
  constexpr T grad_a(T gy, T x, T y) const {
    using math::where;
    return where(y == T(0), T(0), Sqrt{}.grad_a(gy, x, where(y == T(0), T(1), y)));
  }
};

/// 1 / sqrt(x).
struct Rsqrt : Functor<"rsqrt", 1, floating_dtypes> {
  static constexpr bool light = true;
  static constexpr Reads reads_a{.outputs = 1};
  static constexpr double low = 0.1, high = 3;  // where it is tested

  constexpr auto operator()(auto x) const {
    using math::rsqrt;
    return rsqrt(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T, T y) const {
    return gy * T(-0.5) * y * y * y;
  }
};

/// 1 / x.
struct Reciprocal : Functor<"reciprocal", 1, floating_dtypes> {
  static constexpr bool light = true;
  static constexpr Reads reads_a{.outputs = 1};
  static constexpr double low = 0.3, high = 3;  // where it is tested

  template <class T>
  constexpr T operator()(T x) const {
    return T(1) / x;
  }
  constexpr auto grad_a(auto gy, auto, auto y) const { return -gy * y * y; }
};

}  // namespace sherd::ops
