// Elementary functions beyond those of runtime/math.h, in the same manner: in float they go through double
// and are within 1 ulp, in double within 2, unless it is said otherwise.
#pragma once

#include "runtime/math.h"
#include "runtime/wrapping.h"

namespace sherd::math {
namespace detail {

/// The angle of (x, y), within 2^-40.
constexpr double atan2(double y, double x) {
  const double a = std::fabs(y), b = std::fabs(x);
  const bool steep = a > b;
  const double low = where(steep, b, a), high = where(steep, a, b);
  const double slope = where(low == high, where(high == 0, 0.0, 1.0), low / high);  // of infinities too
  // A minimax fit of (atan(t)/t - 1) / t^2 in z = t^2.
  const double z = slope * slope;
  const double tail =
      horner(z, -0.33333333333306644, 0.19999999987965298, -0.14285713377825143, 0.11111083846317627,
             -0.090904761556012617, 0.0768811975092941, -0.066398356758084448, 0.057621529218562243,
             -0.048720704150868146, 0.038105734002133648, -0.02572504806647273, 0.013843810222315903,
             -0.0054082201638422202, 0.0013383275247894561, -0.00015571561601700983);
  const double flat = std::fma(slope * z, tail, slope);
  const double right = where(steep, 1.5707963267948966 - flat, flat);
  // Not `signbit`, of which the compiler makes no vectors.
  return std::copysign(where(std::copysign(1.0, x) < 0, 3.141592653589793 - right, right), y);
}

/// log(x) `scale`; exact where that is a double.
constexpr double log_to_base(double x, Twofold scale) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const double y = rounded(product(log_of(x), scale));
  const double with_top = where(x < infinity, y, x), with_zero = where(x == 0, -infinity, with_top);
  return where(x < 0, std::numeric_limits<double>::quiet_NaN(), with_zero);
}

}  // namespace detail

/// e^x - 1, in double too a polynomial; within 2 ulp, in double 3.
template <class T>
constexpr T expm1(T x) {
  using F = detail::Format<T>;
  const T low = where(x < T(-60), T(-60), x), z = where(low > T(60), T(60), low);
  const T shifted = std::fma(z, T(1.4426950408889634), F::round);
  const T n = shifted - F::round;
  const T r = std::fma(n, -F::ln2_lo, std::fma(n, -F::ln2_hi, z));
  const T rest = std::fma(r * r, detail::exp_tail(r), r);
  const T scale =
      detail::pow2<T>(std::bit_cast<typename F::Int>(shifted) - std::bit_cast<typename F::Int>(F::round));
  const T y = where(x > T(40), exp(x) - T(1), std::fma(scale, rest, scale - T(1)));
  return std::copysign(y, x);  // of -0 too
}

constexpr float exp2(float x) { return static_cast<float>(exp(x * 0.6931471805599453)); }
constexpr double exp2(double x) {
  using F = detail::Format<double>;
  const double low = where(x < -1080.0, -1080.0, x), z = where(low > 1025.0, 1025.0, low);
  const double shifted = z + F::round, rest = z - (shifted - F::round);
  const detail::Twofold r = detail::product(rest, F::ln2_hi);
  return detail::scaled_exp({r.high, std::fma(rest, F::ln2_lo, r.low)},
                            std::bit_cast<std::int64_t>(shifted) - std::bit_cast<std::int64_t>(F::round));
}
constexpr float log2(float x) { return static_cast<float>(log(double{x}) * 1.4426950408889634); }
constexpr double log2(double x) {
  return detail::log_to_base(x, {0x1.71547652b82fep+0, 0x1.777d0ffda0d24p-56});
}
constexpr float log10(float x) { return static_cast<float>(log(double{x}) * 0.4342944819032518); }
constexpr double log10(double x) {
  return detail::log_to_base(x, {0x1.bcb7b1526e50ep-2, 0x1.95355baaafad3p-57});
}

/// Radians, of any size; in double within 3 ulp.
constexpr float tan(float x) {
  const detail::Angle rest = detail::angle(std::fabs(x));
  const bool odd = (rest.quarters & 1) != 0;
  const double y = where(odd, -rest.cosine, rest.sine) / where(odd, rest.sine, rest.cosine);
  return static_cast<float>(where(std::signbit(x), -y, y));
}
constexpr double tan(double x) {
  const detail::Quarters angle = detail::remainder_of(std::fabs(x));
  const detail::SineAndCosine of = detail::sine_and_cosine(angle.rest);
  const bool odd = (angle.count & 1) != 0;
  const double y = where(odd, -of.cosine, of.sine) / where(odd, of.sine, of.cosine);
  return where(std::signbit(x), -y, y);
}
/// The angle of (x, y), from -pi to pi.
constexpr float atan2(float y, float x) { return static_cast<float>(detail::atan2(y, x)); }
constexpr double atan2(double y, double x) { return detail::angle_of(y, x); }
constexpr float atan(float x) { return static_cast<float>(detail::atan2(x, 1)); }
constexpr double atan(double x) { return detail::angle_of(x, 1.0); }
namespace detail {

/// sqrt(1 - x^2).
constexpr double other_side(double x) {
  const Twofold square = product(x, x), rest = ordered_sum(1.0, -square.high);
  return std::sqrt(rest.high + (rest.low - square.low));
}

}  // namespace detail

/// NaN outside [-1, 1].
constexpr float asin(float x) {
  const double v = x;
  return static_cast<float>(detail::atan2(v, std::sqrt((1 - v) * (1 + v))));
}
constexpr double asin(double x) { return detail::angle_of(x, detail::other_side(x)); }
constexpr float acos(float x) {
  const double v = x;
  return static_cast<float>(detail::atan2(std::sqrt((1 - v) * (1 + v)), v));
}
constexpr double acos(double x) { return detail::angle_of(detail::other_side(x), x); }

constexpr float sinh(float x) {
  const double a = std::fabs(x), e = expm1(where(a > 200, 200.0, a));
  return static_cast<float>(std::copysign(0.5 * (e + e / (e + 1)), double{x}));
}
constexpr double sinh(double x) {
  const double a = std::fabs(x), z = x * x;
  const double small =
      std::fma(a * z,
               detail::horner(z, 0.16666666666666666, 0.008333333333333333, 1.984126984126984e-04,
                              2.7557319223985893e-06, 2.505210838544172e-08, 1.6059043836821613e-10,
                              7.647163731819816e-13, 2.8114572543455206e-15, 8.22063524662433e-18),
               a);
  const double half = detail::exp_of({a, 0}, -1);  // half of e^a, which is finite where the result is
  return std::copysign(where(a < 1, small, half - 0.25 / half), x);
}
constexpr float cosh(float x) {
  const double e = exp(double{x});
  return static_cast<float>(0.5 * (e + 1 / e));
}
constexpr double cosh(double x) {
  const double half = detail::exp_of({std::fabs(x), 0}, -1);
  return half + 0.25 / half;
}
constexpr float asinh(float x) {
  const double a = std::fabs(x), root = std::sqrt(a * a + 1);
  const double y = where(a < 1, log1p(a + a * a / (1 + root)), log(a + root));
  return static_cast<float>(std::copysign(y, double{x}));
}
/// In double within 4 ulp, as are the two that follow.
constexpr double asinh(double x) {
  const double a = std::fabs(x), near = where(a > 0x1p28, 0.0, a), square = near * near;
  const double y = log1p(near + square / (1 + std::sqrt(square + 1)));
  return std::copysign(where(a > 0x1p28, log(a) + 0.6931471805599453, y), x);
}
/// NaN below 1.
constexpr float acosh(float x) {
  const double v = x, y = log(v + std::sqrt(v * v - 1));
  return static_cast<float>(where(v < 1, std::numeric_limits<double>::quiet_NaN(), y));
}
constexpr double acosh(double x) {
  const double above = where(x > 0x1p28, 1.0, x - 1);
  const double y = log1p(above + std::sqrt(above * (above + 2)));
  return where(x > 0x1p28, log(x) + 0.6931471805599453,
               where(x < 1, std::numeric_limits<double>::quiet_NaN(), y));
}
/// NaN outside [-1, 1].
constexpr float atanh(float x) {
  const double a = std::fabs(x);
  return static_cast<float>(std::copysign(0.5 * log1p(2 * a / (1 - a)), double{x}));
}
constexpr double atanh(double x) {
  const double a = std::fabs(x);
  return std::copysign(0.5 * log1p(2 * a / (1 - a)), x);
}

namespace detail {

/// std::fmod(a, b).
constexpr double rest_of(double a, double b) { return std::fmod(a, b); }
/// In double, where each step takes 2^51 off a quotient, which is below 2^277: what is left of a float by a
/// float is exact, since quotients have fewer bits than a double. Without a branch, so that loops are
/// vectors.
constexpr float rest_of(float a, float b) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const double x = std::fabs(double{a}), size = std::fabs(double{b}), y = where(size == infinity, 1.0, size);
  const double inverse = 1 / y;
  const auto step = [&](double rest) { return std::fma(-std::trunc(rest * inverse), y, rest); };
  double rest = step(step(step(step(step(step(x))))));
  rest += where(rest < 0, y, 0.0);  // the last quotient may be one off
  rest -= where(rest >= y, y, 0.0);
  return std::copysign(static_cast<float>(where(size == infinity, where(x < infinity, x, x - x), rest)), a);
}

}  // namespace detail

/// The nearest integer, of two the even one.
template <class T>
constexpr T round(T x) {
  if constexpr (std::is_integral_v<T>)
    return x;
  else
    return std::rint(x);
}
/// The integer at or below a / b: so many b and the remainder are a. Of integers by 0: 0, and the least
/// number by -1: itself.
template <class T>
constexpr T floor_divide(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    const bool turned = std::is_signed_v<T> && b == static_cast<T>(-1);
    const T by = where(b == T(0) || turned, T(1), b), quotient = static_cast<T>(a / by);
    const bool below = a % by != T(0) && (a < T(0)) != (b < T(0));
    return where(b == T(0), T(0), where(turned, negated(a), static_cast<T>(quotient - T(below))));
  } else {
    // The quotient without the rest is whole but for its rounding, as in CPython.
    const T rest = detail::rest_of(a, b);
    const T quotient = (a - rest) / b - where(rest != T(0) && (rest < T(0)) != (b < T(0)), T(1), T(0));
    const T whole = std::floor(quotient);
    const T nearest = where(quotient - whole > T(0.5), whole + T(1), whole);
    return where(b == T(0), a / b, where(quotient == T(0), std::copysign(T(0), a / b), nearest));
  }
}
/// What dividing by b leaves, of the sign of b and less than it, or by rounding b itself; of an infinite b
/// and the other sign, b. Of integers and b = 0: 0.
template <class T>
constexpr T remainder(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    // The language knows no remainder of 0, nor the least number's of -1.
    const bool none = b == T(0) || (std::is_signed_v<T> && b == static_cast<T>(-1));
    const T rest = static_cast<T>(a % where(none, T(1), b));
    return static_cast<T>(rest + where(rest != T(0) && (rest < T(0)) != (b < T(0)), b, T(0)));
  } else {
    const T rest = detail::rest_of(a, b);
    return where(rest != T(0) && (rest < T(0)) != (b < T(0)), rest + b, rest);
  }
}

}  // namespace sherd::math
