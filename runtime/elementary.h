// Elementary functions beyond those of runtime/math.h, in the same manner: in float they go through double
// and are within 1 ulp, in double within 2, unless it is said otherwise.
#pragma once

#include "runtime/math.h"
#include "runtime/wrapping.h"

namespace sherd::math {
namespace detail {

/// The angle of (x, y), within 2^-40.
template <DoubleNumber D>
constexpr D near_angle_of(D y, D x) {
  const D a = fabs(y), b = fabs(x);
  const auto steep = a > b;
  const D low = where(steep, b, a), high = where(steep, a, b);
  const D slope = where(low == high, where(high == D(0), D(0), D(1)), low / high);  // of infinities too
  // A minimax fit of (atan(t)/t - 1) / t^2 in z = t^2.
  const D z = slope * slope;
  const D tail =
      horner(z, -0.33333333333306644, 0.19999999987965298, -0.14285713377825143, 0.11111083846317627,
             -0.090904761556012617, 0.0768811975092941, -0.066398356758084448, 0.057621529218562243,
             -0.048720704150868146, 0.038105734002133648, -0.02572504806647273, 0.013843810222315903,
             -0.0054082201638422202, 0.0013383275247894561, -0.00015571561601700983);
  const D flat = fma(slope * z, tail, slope);
  const D right = where(steep, D(1.5707963267948966) - flat, flat);
  return copysign(where(copysign(D(1), x) < D(0), D(3.141592653589793) - right, right), y);
}

/// log(x) `scale`; exact where that is a double.
template <DoubleNumber D>
constexpr D log_to_base(D x, double scale, double scale_low) {
  const D infinity(std::numeric_limits<double>::infinity());
  const D y = rounded(product(log_of(x), Twofold<D>{D(scale), D(scale_low)}));
  const D with_top = where(x < infinity, y, x), with_zero = where(x == D(0), -infinity, with_top);
  return where(x < D(0), D(std::numeric_limits<double>::quiet_NaN()), with_zero);
}

}  // namespace detail

/// e^x - 1, in double too a polynomial; within 2 ulp, in double 3.
template <class T>
constexpr T expm1(T x) {
  using F = detail::Format<T>;
  const T low = where(x < T(-60), T(-60), x), z = where(low > T(60), T(60), low);
  const T shifted = fma(z, T(1.4426950408889634), T(F::round));
  const T n = shifted - T(F::round);
  const T r = fma(n, T(-F::ln2_lo), fma(n, T(-F::ln2_hi), z));
  const T rest = fma(r * r, detail::exp_tail(r), r);
  const T scale = detail::pow2<T>(detail::low_bits(shifted));
  const T y = where(x > T(40), exp(x) - T(1), fma(scale, rest, scale - T(1)));
  return copysign(y, x);  // of -0 too
}

template <SingleNumber T>
constexpr T exp2(T x) {
  using D = as_many_t<T, double>;
  return to_single(exp(to_double(x) * D(0.6931471805599453)));
}
template <DoubleNumber T>
constexpr T exp2(T x) {
  using F = detail::Format<T>;
  const T low = where(x < T(-1080), T(-1080), x), z = where(low > T(1025), T(1025), low);
  const T shifted = z + T(F::round), rest = z - (shifted - T(F::round));
  const detail::Twofold<T> r = detail::product(rest, T(F::ln2_hi));
  return detail::scaled_exp(detail::Twofold<T>{r.high, fma(rest, T(F::ln2_lo), r.low)},
                            detail::low_bits(shifted));
}
template <SingleNumber T>
constexpr T log2(T x) {
  using D = as_many_t<T, double>;
  return to_single(log(to_double(x)) * D(1.4426950408889634));
}
template <DoubleNumber T>
constexpr T log2(T x) {
  return detail::log_to_base(x, 0x1.71547652b82fep+0, 0x1.777d0ffda0d24p-56);
}
template <SingleNumber T>
constexpr T log10(T x) {
  using D = as_many_t<T, double>;
  return to_single(log(to_double(x)) * D(0.4342944819032518));
}
template <DoubleNumber T>
constexpr T log10(T x) {
  return detail::log_to_base(x, 0x1.bcb7b1526e50ep-2, 0x1.95355baaafad3p-57);
}

/// Radians, of any size; in double within 3 ulp.
template <SingleNumber T>
constexpr T tan(T x) {
  using D = as_many_t<T, double>;
  using Int = typename detail::Format<D>::Int;
  const detail::Angle<D> rest = detail::angle(to_double(fabs(x)));
  const auto odd = (rest.quarters & Int(1)) != Int(0);
  const D y = where(odd, -rest.cosine, rest.sine) / where(odd, rest.sine, rest.cosine);
  return detail::signed_as(to_single(y), x);
}
template <DoubleNumber T>
constexpr T tan(T x) {
  using Int = typename detail::Format<T>::Int;
  const detail::Quarters<T> angle = detail::remainder_of(fabs(x));
  const detail::SineAndCosine<T> of = detail::sine_and_cosine(angle.rest);
  const auto odd = (angle.count & Int(1)) != Int(0);
  const T y = where(odd, -of.cosine, of.sine) / where(odd, of.sine, of.cosine);
  return detail::signed_as(y, x);
}
/// The angle of (x, y), from -pi to pi.
template <SingleNumber T>
constexpr T atan2(T y, T x) {
  return to_single(detail::near_angle_of(to_double(y), to_double(x)));
}
template <DoubleNumber T>
constexpr T atan2(T y, T x) {
  return detail::angle_of(y, x);
}
template <class T>
constexpr T atan(T x) {
  return atan2(x, T(1));
}
namespace detail {

/// sqrt(1 - x^2).
template <DoubleNumber D>
constexpr D other_side(D x) {
  const Twofold<D> square = product(x, x), rest = ordered_sum(D(1), -square.high);
  return sqrt(rest.high + (rest.low - square.low));
}
/// Of a float.
template <DoubleNumber D>
constexpr D near_other_side(D x) {
  return sqrt((D(1) - x) * (D(1) + x));
}

}  // namespace detail

/// NaN outside [-1, 1].
template <SingleNumber T>
constexpr T asin(T x) {
  const auto v = to_double(x);
  return to_single(detail::near_angle_of(v, detail::near_other_side(v)));
}
template <DoubleNumber T>
constexpr T asin(T x) {
  return detail::angle_of(x, detail::other_side(x));
}
template <SingleNumber T>
constexpr T acos(T x) {
  const auto v = to_double(x);
  return to_single(detail::near_angle_of(detail::near_other_side(v), v));
}
template <DoubleNumber T>
constexpr T acos(T x) {
  return detail::angle_of(detail::other_side(x), x);
}

template <SingleNumber T>
constexpr T sinh(T x) {
  using D = as_many_t<T, double>;
  const D v = to_double(x), a = fabs(v), e = expm1(where(a > D(200), D(200), a));
  return to_single(copysign(D(0.5) * (e + e / (e + D(1))), v));
}
template <DoubleNumber T>
constexpr T sinh(T x) {
  const T a = fabs(x), z = x * x;
  const T small = fma(a * z,
                      detail::horner(z, 0.16666666666666666, 0.008333333333333333, 1.984126984126984e-04,
                                     2.7557319223985893e-06, 2.505210838544172e-08, 1.6059043836821613e-10,
                                     7.647163731819816e-13, 2.8114572543455206e-15, 8.22063524662433e-18),
                      a);
  // Half of e^a, which is finite where the result is.
  const T half = detail::exp_of(detail::Twofold<T>{a, T(0)}, -1);
  return copysign(where(a < T(1), small, half - T(0.25) / half), x);
}
template <SingleNumber T>
constexpr T cosh(T x) {
  using D = as_many_t<T, double>;
  const D e = exp(to_double(x));
  return to_single(D(0.5) * (e + D(1) / e));
}
template <DoubleNumber T>
constexpr T cosh(T x) {
  const T half = detail::exp_of(detail::Twofold<T>{fabs(x), T(0)}, -1);
  return half + T(0.25) / half;
}
template <SingleNumber T>
constexpr T asinh(T x) {
  using D = as_many_t<T, double>;
  const D v = to_double(x), a = fabs(v), root = sqrt(a * a + D(1));
  return to_single(copysign(where(a < D(1), log1p(a + a * a / (D(1) + root)), log(a + root)), v));
}
/// In double within 4 ulp, as are the two that follow.
template <DoubleNumber T>
constexpr T asinh(T x) {
  const T a = fabs(x), near = where(a > T(0x1p28), T(0), a), square = near * near;
  const T y = log1p(near + square / (T(1) + sqrt(square + T(1))));
  return copysign(where(a > T(0x1p28), log(a) + T(0.6931471805599453), y), x);
}
/// NaN below 1.
template <SingleNumber T>
constexpr T acosh(T x) {
  using D = as_many_t<T, double>;
  const D v = to_double(x), y = log(v + sqrt(v * v - D(1)));
  return to_single(where(v < D(1), D(std::numeric_limits<double>::quiet_NaN()), y));
}
template <DoubleNumber T>
constexpr T acosh(T x) {
  const T above = where(x > T(0x1p28), T(1), x - T(1));
  const T y = log1p(above + sqrt(above * (above + T(2))));
  return where(x > T(0x1p28), log(x) + T(0.6931471805599453),
               where(x < T(1), T(std::numeric_limits<double>::quiet_NaN()), y));
}
/// NaN outside [-1, 1].
template <DoubleNumber T>
constexpr T atanh(T x) {
  const T a = fabs(x);
  return copysign(T(0.5) * log1p(T(2) * a / (T(1) - a)), x);
}
template <SingleNumber T>
constexpr T atanh(T x) {
  return to_single(atanh(to_double(x)));
}

namespace detail {

template <DoubleNumber T>
constexpr T rest_of(T a, T b) {
  return fmod(a, b);
}
/// In double, where each step takes 2^51 off a quotient, which is below 2^277: what is left of a float by a
/// float is exact, since quotients have fewer bits than a double.
template <SingleNumber T>
constexpr T rest_of(T a, T b) {
  using D = as_many_t<T, double>;
  const D infinity(std::numeric_limits<double>::infinity());
  const D x = fabs(to_double(a)), size = fabs(to_double(b)), y = where(size == infinity, D(1), size);
  const D inverse = D(1) / y;
  const auto step = [&](D rest) { return fma(-trunc(rest * inverse), y, rest); };
  D rest = step(step(step(step(step(step(x))))));
  rest = rest + where(rest < D(0), y, D(0));  // the last quotient may be one off
  rest = rest - where(rest >= y, y, D(0));
  return to_single(copysign(where(size == infinity, where(x < infinity, x, x - x), rest), to_double(a)));
}

}  // namespace detail

/// The nearest integer, of two the even one.
template <class T>
constexpr T round(T x) {
  if constexpr (std::is_integral_v<T>)
    return x;
  else
    return rint(x);
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
    const T quotient = (a - rest) / b - where((rest != T(0)) & ((rest < T(0)) != (b < T(0))), T(1), T(0));
    const T whole = floor(quotient);
    const T nearest = where(quotient - whole > T(0.5), whole + T(1), whole);
    return where(b == T(0), a / b, where(quotient == T(0), copysign(T(0), a / b), nearest));
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
    return where((rest != T(0)) & ((rest < T(0)) != (b < T(0))), rest + b, rest);
  }
}

}  // namespace sherd::math
