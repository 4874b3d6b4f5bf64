// The angle of (b, a), from -pi to pi; the gradients at the origin are 0.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

struct Atan2 : Functor<"atan2", 2, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b11};
  static constexpr double low = 0.3, high = 2;  // where it is tested

  constexpr auto operator()(auto a, auto b) const {
    using math::atan2;
    return atan2(a, b);
  }
  constexpr auto grad_a(auto gy, auto a, auto b, auto) const { return gy * over_square(b, a, b); }
  constexpr auto grad_b(auto gy, auto a, auto b, auto) const { return gy * over_square(-a, a, b); }

 private:
  /// x over the square of the distance from the origin, where it is 0; by the larger coordinate, so that no
  /// square is too large or small.
  template <class T>
  static constexpr T over_square(T x, T a, T b) {
    using math::where;
    const T p = where(a < T(0), -a, a), q = where(b < T(0), -b, b), larger = where(p > q, p, q);
    const T by =
        where(larger == T(0), T(1), where(larger - larger == T(0), larger, T(1)));  // infinities stay
    const T u = a / by, v = b / by, sum = u * u + v * v;
    return x / by / by / where(sum == T(0), T(1), sum);
  }
};

}  // namespace sherd::ops
