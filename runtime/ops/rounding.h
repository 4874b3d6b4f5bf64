// What gives integers; all gradients are 0.
#pragma once

#include "runtime/elementary.h"
#include "runtime/functor.h"

namespace sherd::ops {

template <detail::FixedName name, DTypeSet dtypes = floating_dtypes>
struct PiecewiseConstant : Functor<name, 1, dtypes> {
  static constexpr bool light = true;
  static constexpr Reads reads_a{};

  template <class T>
  constexpr T grad_a(T, T, T) const {
    return T(0);
  }
};

/// The largest integer not above x; the gradient is 0.
struct Floor : PiecewiseConstant<"floor"> {
  constexpr auto operator()(auto x) const {
    using math::floor;
    return floor(x);
  }
};

/// The least integer not below x; the gradient is 0.
struct Ceil : PiecewiseConstant<"ceil"> {
  constexpr auto operator()(auto x) const {
    using math::ceil;
    return ceil(x);
  }
};

/// The nearest integer, of two the even one; the gradient is 0.
struct Round : PiecewiseConstant<"round"> {
  constexpr auto operator()(auto x) const { return math::round(x); }
};

/// The integer towards 0; the gradient is 0.
struct Trunc : PiecewiseConstant<"trunc"> {
  constexpr auto operator()(auto x) const {
    using math::trunc;
    return trunc(x);
  }
};

/// 1 above 0, -1 below, else 0, of NaN too; the gradient is 0.
struct Sign : PiecewiseConstant<"sign", number_dtypes> {
  template <class T>
  constexpr T operator()(T x) const {
    using math::where;
    return where(x > T(0), T(1), where(x < T(0), static_cast<T>(-1), T(0)));
  }
};

}  // namespace sherd::ops
