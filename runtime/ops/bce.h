// -t log p - (1 - t) log(1 - p) of probabilities p and targets t, logarithms not below -100.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

struct Bce : Functor<"bce", 2, floating_dtypes> {
  static constexpr Reads reads_a{.inputs = 0b11};
  static constexpr Reads reads_b{.inputs = 0b01};
  static constexpr double low = 0.1, high = 0.9;  // where it is tested

  template <class T>
  constexpr T operator()(T p, T t) const {
    return (t - T(1)) * bounded(math::log1p(-p)) - t * bounded(math::log(p));
  }
  /// Finite also where p is 0 or 1.
  template <class T>
  constexpr T grad_a(T gy, T p, T t, T) const {
    using math::where;
    const T spread = p * (T(1) - p);
    return gy * ((p - t) / where(spread < T(1e-12), T(1e-12), spread));
  }
  template <class T>
  constexpr T grad_b(T gy, T p, T, T) const {
    return gy * (bounded_log(T(1) - p) - bounded_log(p));
  }

 private:
  template <class T>
  static constexpr T bounded(T logarithm) {
    using math::where;
    return where(logarithm < T(-100), T(-100), logarithm);
  }
  /// With a derivative of 0, and not of 0 / 0, where it is bounded.
  template <class T>
  static constexpr T bounded_log(T x) {
    using math::log;
    using math::where;
    const T whole = log(x);
    if constexpr (math::SingleNumber<T> || math::DoubleNumber<T>) return bounded(whole);
    return where(whole < T(-100), T(-100), log(where(whole < T(-100), T(1), x)));
  }
};

}  // namespace sherd::ops
