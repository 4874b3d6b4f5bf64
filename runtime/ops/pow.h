// Powers.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

/// x to the power `halves` / 2, with the edges of `pow`, by multiplications, a root and a division. In float
/// within 1 ulp, through double: as `pow`, but for one in millions that differs in the last place. In double
/// within 2.
template <int halves>
struct PowerOfHalves {
  static constexpr int arity = 1;
  static constexpr bool light = true;
  static constexpr Reads reads_a{.inputs = 1};

  template <class T>
  constexpr T operator()(T x) const {
    if constexpr (halves == 1)
      return base(x);  // a root is rounded once, in float too
    else if constexpr (halves == 6 && math::SingleNumber<T>)
      return cube(x);
    else if constexpr (math::SingleNumber<T>)
      return through_double(x);
    else
      return product_of(halves < 0 ? T(1) / base(x) : base(x));
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy * (T(halves / 2.0) * PowerOfHalves<halves - 2>{}(x));
  }
  bool operator==(const PowerOfHalves&) const = default;

 private:
  static constexpr bool of_root = halves % 2 != 0;
  static constexpr int factors = (halves < 0 ? -halves : halves) / (of_root ? 1 : 2);

  /// x or its root, which is 0 at -0 and inf at -inf.
  template <class T>
  static constexpr T base(T x) {
    using math::sqrt;
    using math::where;
    const T infinity = std::numeric_limits<T>::infinity();
    if constexpr (of_root)
      return where(x == -infinity, infinity, sqrt(x) + T(0));
    else
      return x;
  }
  template <class T>
  constexpr T through_double(T x) const {
    using math::to_double;
    using math::to_single;
    return to_single((*this)(to_double(x)));
  }
  /// With what rounding took from the square, as near as through double.
  template <class T>
  static constexpr T cube(T x) {
    using math::fabs;
    using math::fma;
    using math::where;
    const T square = x * x, lost = fma(x, x, -square), plain = square * x;
    const auto finite = fabs(plain) < T(std::numeric_limits<T>::infinity());
    return where(finite, fma(square, x, lost * x), plain);
  }
  template <class T>
  static constexpr T product_of(T factor) {
    T product(1);
    for (int i = 0; i < factors; ++i) product = product * factor;
    return product;
  }
};

/// a to the power b; 0 to the power 0 is 1.
struct Pow : Functor<"pow", 2, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b11, .outputs = 1};
  static constexpr double low = 0.3, high = 2;  // where it is tested

  template <class T>
  constexpr T operator()(T a, T b) const {
    using math::pow;
    return pow(a, b);
  }
  template <class T>
  constexpr T grad_a(T gy, T a, T b, T) const {
    using math::only_if;
    using math::pow;
    return only_if(b != T(0), gy * (b * pow(a, b - T(1))));
  }
  template <class T>
  constexpr T grad_b(T gy, T a, T b, T y) const {
    using math::log;
    using math::where;
    // One factor of gy, so that the derivative by it is of no power's logarithm of 0 either.
    const T infinity = std::numeric_limits<T>::infinity();
    const T at_zero = where(b >= T(0), T(0), where(y > T(0), -infinity, where(y < T(0), infinity, b)));
    return gy * where(a == T(0), at_zero, y * log(where(a == T(0), T(1), a)));
  }
  /// Calls `body` with a functor of x that does the same as x to this power in fewer instructions, if there
  /// is one; says whether.
  template <class Body>
  static bool for_number(Number power, const Body& body) {
    const auto try_halves = [&]<int... halves>(std::integer_sequence<int, halves...>) {
      return ((power.as<double>() * 2 == halves && (body(PowerOfHalves<halves>{}), true)) || ...);
    };
    return try_halves(std::integer_sequence<int, 6, 1, -1, -2, -4>{});
  }
};

}  // namespace sherd::ops
