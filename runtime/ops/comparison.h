// What gives true or false. Comparisons with NaN are false.
#pragma once

#include "runtime/functor.h"

namespace sherd::ops {

template <detail::FixedName name, int arity, DTypeSet dtypes = any_dtype>
struct Predicate : Functor<name, arity, dtypes> {
  static constexpr bool gives_bool = true;
  static constexpr bool differentiable = false;
};

/// True where a = b; comparisons with NaN are false.
struct Equal : Predicate<"equal", 2> {
  static constexpr bool light = true;
  constexpr bool operator()(auto a, auto b) const { return a == b; }
};

/// True where a differs from b; NaN differs from everything.
struct NotEqual : Predicate<"not_equal", 2> {
  static constexpr bool light = true;
  constexpr bool operator()(auto a, auto b) const { return a != b; }
};

/// True where a < b; comparisons with NaN are false.
struct Less : Predicate<"less", 2> {
  static constexpr bool light = true;
  constexpr bool operator()(auto a, auto b) const { return a < b; }
};

/// True where a <= b; comparisons with NaN are false.
struct LessEqual : Predicate<"less_equal", 2> {
  static constexpr bool light = true;
  constexpr bool operator()(auto a, auto b) const { return a <= b; }
};

/// True where a > b; comparisons with NaN are false.
struct Greater : Predicate<"greater", 2> {
  static constexpr bool light = true;
  constexpr bool operator()(auto a, auto b) const { return a > b; }
};

/// True where a >= b; comparisons with NaN are false.
struct GreaterEqual : Predicate<"greater_equal", 2> {
  static constexpr bool light = true;
  constexpr bool operator()(auto a, auto b) const { return a >= b; }
};

/// True where both are nonzero.
struct LogicalAnd : Predicate<"logical_and", 2> {
  template <class T>
  constexpr bool operator()(T a, T b) const {
    return (a != T(0)) && (b != T(0));
  }
};

/// True where either is nonzero.
struct LogicalOr : Predicate<"logical_or", 2> {
  template <class T>
  constexpr bool operator()(T a, T b) const {
    return (a != T(0)) || (b != T(0));
  }
};

/// True where zero.
struct LogicalNot : Predicate<"logical_not", 1> {
  template <class T>
  constexpr bool operator()(T x) const {
    return !(x != T(0));
  }
};

/// Neither infinite nor NaN.
struct IsFinite : Predicate<"isfinite", 1, floating_dtypes> {
  template <class T>
  constexpr bool operator()(T x) const {
    return x - x == T(0);
  }
};

/// Infinite, of either sign.
struct IsInf : Predicate<"isinf", 1, floating_dtypes> {
  template <class T>
  constexpr bool operator()(T x) const {
    return x == x && x - x != T(0);
  }
};

/// Not a number.
struct IsNan : Predicate<"isnan", 1, floating_dtypes> {
  constexpr bool operator()(auto x) const { return x != x; }
};

}  // namespace sherd::ops
