// What the elementary functions of runtime/math.h are made of. They are written once for numbers of any kind:
// a float or a double, or lanes of them (runtime/cpu/lanes.h), which bring functions of these names.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace sherd::math {

/// What a number is one or several of, and the kind of number that has as many of another type.
template <class T>
struct NumberKind {
  using Element = T;
  template <class U>
  using Of = U;
};
template <class T>
using element_t = typename NumberKind<T>::Element;
/// As many of `U` as `T` has.
template <class T, class U>
using as_many_t = typename NumberKind<T>::template Of<U>;

/// A float, or lanes of floats.
template <class T>
concept SingleNumber = std::is_same_v<element_t<T>, float>;
/// A double, or lanes of doubles.
template <class T>
concept DoubleNumber = std::is_same_v<element_t<T>, double>;

/// One float or double.
template <class T>
concept OneNumber = std::is_floating_point_v<T>;

/// `c ? a : b`, both sides evaluated.
template <class T>
constexpr T where(bool c, T a, T b) {
  return c ? a : b;
}
/// Whether a condition holds for any of its numbers.
constexpr bool any(bool condition) { return condition; }

/// a b + c, rounded once.
template <OneNumber T>
constexpr T fma(T a, T b, T c) {
  return std::fma(a, b, c);
}
template <OneNumber T>
constexpr T sqrt(T x) {
  return std::sqrt(x);
}
template <OneNumber T>
constexpr T fabs(T x) {
  return std::fabs(x);
}
/// The size of `x` with the sign of `y`.
template <OneNumber T>
constexpr T copysign(T x, T y) {
  return std::copysign(x, y);
}
/// The nearest integer, of two the even one.
template <OneNumber T>
constexpr T rint(T x) {
  return std::rint(x);
}
template <OneNumber T>
constexpr T floor(T x) {
  return std::floor(x);
}
template <OneNumber T>
constexpr T ceil(T x) {
  return std::ceil(x);
}
template <OneNumber T>
constexpr T trunc(T x) {
  return std::trunc(x);
}
/// What whole multiples of b leave of a.
template <OneNumber T>
constexpr T fmod(T a, T b) {
  return std::fmod(a, b);
}

/// A number as double, and rounded to float.
constexpr double to_double(float x) { return x; }
constexpr float to_single(double x) { return static_cast<float>(x); }

namespace detail {

template <class T>
struct FormatOf;
template <>
struct FormatOf<float> {
  using Int = std::int32_t;
  using Unsigned = std::uint32_t;
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float round = 0x1.8p23f;  // adding it rounds to an integer and leaves that in the low bits
  static constexpr float ln2_hi = 0x1.62e43p-1f, ln2_lo = -0x1.05c61p-29f;
  static constexpr float exp_min = -104.f, exp_max = 89.f, half_exp_max = 90.f;
  static constexpr Int sqrt_half = 0x3f3504f3;
  // Numbers of which a few whole multiples are exact, and what is left of the constants.
  static constexpr float short_ln2 = 0x1.62e4p-1f, ln2_rest = 0x1.7f7d1cp-20f;
  static constexpr float short_log10_2 = 0x1.344p-2f, log10_2_rest = 0x1.3509f8p-18f;
  static constexpr float short_eighth = 0x1.921fbp-1f, eighth_rest = 0x1.5110b4p-23f;  // of a turn
  static constexpr float quarter[] = {0x1.921fb6p+0f, -0x1.777a5cp-25f, -0x1.ee59dap-50f};
  // An angle from which on three parts of a quarter are too few.
  static constexpr float most_quarters = 0x1p17f;
  static constexpr float huge = 0x1p120f;  // the sum of two such is finite
  static constexpr float steep = 0x1p13f;  // where asinh is log(2x)
};
template <>
struct FormatOf<double> {
  using Int = std::int64_t;
  using Unsigned = std::uint64_t;
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double round = 0x1.8p52;
  static constexpr double ln2_hi = 0x1.62e42fefa39efp-1, ln2_lo = 0x1.abc9e3b39803fp-56;
  static constexpr double exp_min = -746., exp_max = 710., half_exp_max = 711.;
  static constexpr Int sqrt_half = 0x3fe6a09e667f3bcd;
  static constexpr double short_ln2 = 0x1.62e42fefa3800p-1, ln2_rest = 0x1.ef35793c76730p-45;
  static constexpr double short_log10_2 = 0x1.34413509f7000p-2, log10_2_rest = 0x1.3fde623e2566bp-43;
  static constexpr double short_eighth = 0x1.921fb54442d18p-1, eighth_rest = 0x1.1a62633145c07p-55;
  static constexpr double quarter[] = {0x1.921fb54442d18p+0, 0x1.1a62633145c07p-54, 0x1.f1976b7ed8fbcp-110};
  static constexpr double most_quarters = 0x1p29;
  static constexpr double huge = 0x1p1000;
  static constexpr double steep = 0x1p28;
};
/// The constants of a number's elements; integers are as many as it has.
template <class T>
struct Format : FormatOf<element_t<T>> {
  using Int = as_many_t<T, typename FormatOf<element_t<T>>::Int>;
  using Unsigned = as_many_t<T, typename FormatOf<element_t<T>>::Unsigned>;
  static constexpr auto sign = typename FormatOf<element_t<T>>::Unsigned{1} << (8 * sizeof(element_t<T>) - 1);
};

/// Coefficients of powers of x, the lowest first.
template <class T, class C>
constexpr T horner(T, C c) {
  return T(c);
}
template <class T, class C, class... Higher>
constexpr T horner(T x, C c, Higher... higher) {
  return fma(x, horner(x, higher...), T(c));
}

template <class T>
constexpr T pow2(typename Format<T>::Int k) {
  return std::bit_cast<T>((k + Format<T>::bias) << Format<T>::mantissa);
}

/// A small integer as a number. AVX2 has no conversion of 64 bits.
template <class T>
constexpr T from_integer(typename Format<T>::Int k) {
  using F = Format<T>;
  return std::bit_cast<T>(std::bit_cast<typename F::Int>(T(F::round)) + k) - T(F::round);
}

/// What `shifted` has in its low bits: a number that `Format::round` was added to.
template <class T>
constexpr typename Format<T>::Int low_bits(T shifted) {
  using F = Format<T>;
  return std::bit_cast<typename F::Int>(shifted) - std::bit_cast<typename F::Int>(T(F::round));
}

/// `x`, or -x where `y` has a sign.
template <class T>
constexpr T signed_as(T x, T y) {
  using Bits = typename Format<T>::Unsigned;
  return std::bit_cast<T>(std::bit_cast<Bits>(x) ^ (std::bit_cast<Bits>(y) & Bits(Format<T>::sign)));
}

}  // namespace detail
}  // namespace sherd::math
