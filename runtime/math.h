// Elementary functions without branches, of one number or of lanes (runtime/cpu/lanes.h): a CPU's loops call
// them with lanes, nvcc compiles them for the device, and a number's result is the same in each of them and
// on every processor, whatever its C library.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "runtime/math_steps.h"
#include "runtime/twofold.h"

namespace sherd::math {

/// A row whose variance is below this part of its squared mean varies by little more than the mean's own
/// rounding: its mean is found again from the deviations, so that equal numbers deviate by nothing.
inline constexpr double nearly_constant = 0x1p-20;

/// A number as an integer: towards zero, the nearest bound where the type ends, and 0 for NaN. The same on
/// every device and in every lane, where the language promises nothing.
template <class To, class From>
constexpr To to_integer(From x) {
  using Limits = std::numeric_limits<To>;
  // The upper bound as a float is itself, or the power of two above it.
  constexpr From least = static_cast<From>(Limits::min()), most = static_cast<From>(Limits::max());
  const bool inside = x > least && x < most;
  const To bound = where(x >= most, Limits::max(), where(x <= least, Limits::min(), To(0)));
  return where(inside, static_cast<To>(where(inside, x, From(0))), bound);
}

namespace detail {

// The polynomials are weighted minimax fits. Float and double differ in degree only.

// (tanh(x)/x - 1) / x^2 in z = x^2, for |x| <= 0.6.
template <SingleNumber T>
constexpr T tanh_tail(T z) {
  return horner(z, -0.333333f, 0.13331965f, -0.053787272f, 0.020807495f, -0.005908412f);
}
template <DoubleNumber T>
constexpr T tanh_tail(T z) {
  return horner(z, -0.3333333333333313, 0.13333333333300945, -0.05396825394989765, 0.021869488016483783,
                -0.00886322696222505, 0.0035920388957708374, -0.0014552233189757617, 0.0005872151406726201,
                -0.0002304524884694338, 7.937938888567587e-05, -1.7211905303759843e-05);
}
// erf(x)/x - 1 in z = x^2, for |x| <= 1.
template <SingleNumber T>
constexpr T erf_small(T z) {
  return horner(z, 0.12837917f, -0.37612626f, 0.112835996f, -0.02685443f, 0.005189506f, -0.0008020592f,
                7.888319e-05f);
}
template <DoubleNumber T>
constexpr T erf_small(T z) {
  return horner(z, 0.1283791670955126, -0.37612638903183754, 0.1128379167095512, -0.026866170645129864,
                0.0052239776254235865, -0.0008548327021954468, 0.0001205533290374633, -1.4925647592604304e-05,
                1.64620459434695e-06, -1.636464905211261e-07, 1.479246510046623e-08, -1.2164941914801635e-09,
                8.71037387213268e-11, -4.232990811614943e-12);
}
// e^(t^2/2) (1 - Phi(t)) for t up to 6, Phi the normal distribution function; the error is weighed by
// max(e^(-t^2/2), 0.001).
template <SingleNumber T>
constexpr T upper_tail(T t) {
  return horner(where(t > T(6), T(6), t) - T(3), 0.121514047f, -0.0343983043f, 0.00916030835f,
                -0.00231242629f, 0.000548896465f, -0.000129979176f, 3.22496514e-5f, -4.56595963e-6f,
                5.06720249e-7f, -6.81743881e-7f, 1.11748863e-7f, 3.9545113e-8f, 1.01184084e-9f,
                -2.50700902e-9f);
}
// log(erfc(t)) from 1 to where erf(t) rounds to 1.
template <SingleNumber T>
constexpr T log_erfc(T t) {
  const T u = where(t > T(4), T(4), t) - T(2.5);
  return horner(u, -7.806815f, -5.3526807f, -0.94389236f, -0.010854257f, 0.0021671331f, -0.00042809252f,
                6.488516e-05f, -2.0232887e-05f, 2.6082884e-07f);
}
template <DoubleNumber T>
constexpr T log_erfc(T t) {
  const T u = where(t > T(6), T(6), t) - T(3.5);
  return horner(u, -14.112437402148188, -7.266099588365197, -0.9667530547410722, -0.005225658216323239,
                0.0008736873280732498, -0.0001472978044401, 2.4386287088194546e-05, -3.88962513376157e-06,
                5.856991786256135e-07, -8.046287853741879e-08, 9.712002674344957e-09, -7.904908810210275e-10,
                -1.68646073390271e-10, -8.854098814357193e-11, -4.395219117403774e-11, 1.5646667468485912e-11,
                1.7368345030716097e-11, 8.3439916600109e-12, 2.174729774245186e-12, 3.285541759124533e-13,
                2.2472406687685354e-14);
}

}  // namespace detail

// All functions take float or double unless they say otherwise; infinities, NaN and subnormals give what IEEE
// 754 says.

/// e^x, within 1 ulp.
template <class T>
constexpr T exp(T x) {
  using F = detail::Format<T>;
  // What underflows to 0 is not computed, which would take Intel's processors a hundred cycles.
  const auto none = x < T(F::exp_min);
  const T low = where(none, T(0), x);
  const T z = where(low > T(F::exp_max), T(F::exp_max), low);
  const T shifted = fma(z, T(1.4426950408889634), T(F::round));
  const T n = shifted - T(F::round);
  const T r = fma(n, T(-F::ln2_lo), fma(n, T(-F::ln2_hi), z));
  const T y = fma(r * r, detail::exp_tail(r), r) + T(1);
  // Two factors, because 2^n alone leaves the range of normal numbers at both ends.
  const auto k = detail::low_bits(shifted);
  return where(none, T(0), y * detail::pow2<T>(k >> 1) * detail::pow2<T>(k - (k >> 1)));
}

/// Natural logarithm, within 1 ulp; -inf at 0, NaN below.
template <DoubleNumber T>
constexpr T log(T x) {
  using F = detail::Format<T>;
  const detail::Split<T> of = detail::split(x);
  const T f = of.beyond_one, s = f / (T(2) + f), z = s * s;
  const T log1p = fma(-s, f - z * detail::log_tail(z), f);
  const T y = fma(of.exponent, T(F::ln2_hi), fma(of.exponent, T(F::ln2_lo), log1p));
  return detail::with_edges_of_log(y, x);
}
template <SingleNumber T>
constexpr T log(T x) {
  const detail::Split<T> of = detail::split(x);
  return detail::with_edges_of_log(detail::log_of_split(of, T(0)), x);
}

/// log(1 + x), within 1 ulp; in double 2.5, where what rounding took from 1 + x stands in a quotient (Kahan).
template <DoubleNumber T>
constexpr T log1p(T x) {
  const T u = T(1) + x, moved = u - T(1), logarithm = log(u);
  const T y = where(moved == x, logarithm, logarithm * (x / where(moved == T(0), T(1), moved)));
  return where(moved == T(0), x, y);
}
template <SingleNumber T>
constexpr T log1p(T x) {
  const detail::Twofold<T> u = detail::sum(x, T(1));
  const detail::Split<T> of = detail::split_normal(u.high);
  const T y = detail::log_of_split(of, detail::beside_mantissa(u.low, of.shift));
  return where(u.high == T(1), x, detail::with_edges_of_log(y, u.high));
}
/// log(1 + e^-x) of x >= 0, or NaN.
template <DoubleNumber T>
constexpr T log1p_exp_below(T x) {
  return log1p(exp(-x));
}
template <SingleNumber T>
constexpr T log1p_exp_below(T x) {
  const T power = exp(-x);
  const detail::Twofold<T> u = detail::ordered_sum(T(1), power);
  const detail::Split<T> of = detail::split_normal(u.high);
  const T y = detail::log_of_split(of, detail::beside_mantissa(u.low, of.shift));
  return where(power == power, y, power);
}

/// 1 / (1 + e^-x).
template <class T>
constexpr T sigmoid(T x) {
  return T(1) / (T(1) + exp(-x));
}

/// Hyperbolic tangent, within 2 ulp.
template <class T>
constexpr T tanh(T x) {
  using F = detail::Format<T>;
  const T a = fabs(x), square = x * x;
  const T small = fma(a * square, detail::tanh_tail(square), a);
  // Of e = e^(2a) - 1 it is e / (e + 2), which rounds to 1 long before the bound.
  const T z = where(a > T(30), T(60), a + a);
  const T shifted = fma(z, T(1.4426950408889634), T(F::round)), n = shifted - T(F::round);
  const T r = fma(n, T(-F::ln2_lo), fma(n, T(-F::ln2_hi), z));
  const T rest = fma(r * r, detail::exp_tail(r), r), scale = detail::pow2<T>(detail::low_bits(shifted));
  const T e = fma(scale, rest, scale - T(1));
  return copysign(where(a < T(0.6), small, e / (e + T(2))), x);  // of -0 too
}

/// Error function, within 2 ulp in float and 4 in double.
template <class T>
constexpr T erf(T x) {
  const T a = fabs(x);
  const T small = fma(x, detail::erf_small(x * x), x);
  const T large = copysign(T(1) - exp(detail::log_erfc(a)), x);
  return where(a < T(1), small, large);
}

/// The normal distribution at x.
template <class T>
struct Normal {
  T bell;  ///< e^(-x^2/2)
  T cdf;   ///< Phi(x)
};

/// Both within 1.3e-7 in float, Phi within 0.02 % of itself down to -6; within 4 ulp of 1 in double.
template <DoubleNumber T>
constexpr Normal<T> normal(T x) {
  return {exp(T(-0.5) * x * x), T(0.5) * (T(1) + erf(x * T(0.7071067811865476)))};
}
template <SingleNumber T>
constexpr Normal<T> normal(T x) {
  using F = detail::Format<T>;
  const T power = T(-0.5) * x * x;
  // e^power, which is between 0 and 1, in fewer steps than `exp` takes for any number.
  const T least(-87);
  const T z = where(power < least, least, power);
  const T shifted = fma(z, T(1.442695041f), T(F::round));
  const T r = fma(shifted - T(F::round), T(-0.69314718f), z);
  const T y = fma(r * r, detail::exp_tail(r), r) + T(1);
  const T bell = where(power < least, T(0), y * detail::pow2<T>(detail::low_bits(shifted)));
  const T tail = bell * detail::upper_tail(fabs(x));
  return {bell, where(x > T(0), T(1) - tail, tail)};
}

/// 1 / sqrt(x).
template <class T>
constexpr T rsqrt(T x) {
  return T(1) / sqrt(x);
}

/// Sine and cosine, within 1 ulp; radians, of any size.
template <class T>
constexpr T sin(T x) {
  return detail::signed_as(detail::sine_of(detail::remainder_of(fabs(x)), 0), x);
}
template <class T>
constexpr T cos(T x) {
  return detail::sine_of(detail::remainder_of(fabs(x)), 1);
}

/// `x` where the condition holds, else 0.
template <class T>
constexpr T only_if(bool condition, T x) {
  using Bits = typename detail::Format<T>::Unsigned;
  return std::bit_cast<T>(std::bit_cast<Bits>(x) & (condition ? ~Bits{0} : Bits{0}));
}

namespace detail {

/// Whether x is an integer, as all numbers are that have no bit left for a part of one.
template <class T>
constexpr auto is_whole(T x) {
  const T whole = pow2<T>(typename Format<T>::Int(Format<T>::mantissa)), size = fabs(x);
  return (size >= whole) | ((size + whole) - whole == size);
}

/// The binary logarithm of what is positive and finite, within 2^-42 of itself or of 1.
template <SingleNumber T>
constexpr auto near_log2(T x) {
  using D = as_many_t<T, double>;
  const Split<T> of = split(x);
  const D f = to_double(of.beyond_one), under = D(2) + f;
  // A quotient of doubles takes longer than one of floats and a step of Newton's.
  const D rough = to_double(T(1) / (T(2) + of.beyond_one));
  const D s = f * fma(rough, fma(-under, rough, D(1)), rough), z = s * s;
  const D log = fma(-s, f - z * log_tail(z), f);
  return fma(log, D(1.4426950408889634), to_double(of.exponent));
}
/// 2^x within 2^-38 of itself, for a float.
template <DoubleNumber D>
constexpr D near_exp2(D x) {
  const D low = where(x < D(-200), D(-200), x), z = where(low > D(200), D(200), low);
  const D shifted = z + D(Format<D>::round), rest = z - (shifted - D(Format<D>::round));
  const D y =
      horner(rest, 1.0, 0.6931471805412246, 0.24022650694741518, 0.05550410959272468, 0.009618129559664797,
             0.0013333434111089534, 0.00015403097369892868, 1.5314221432713755e-05, 1.334442412555039e-06);
  return y * pow2<D>(low_bits(shifted));
}
/// size to the power y for a size that is not negative.
template <DoubleNumber T>
constexpr T power_of_size(T size, T y) {
  return exp_of(product_of_log(y, log_of(size))).high;
}
/// Through double, which rounds as the exact power nearly always: so do powers that are multiplied out
/// (`ops::PowerOfHalves`).
template <SingleNumber T>
constexpr T power_of_size(T size, T y) {
  const T infinity(std::numeric_limits<float>::infinity());
  const auto inside = (size > T(0)) & (size < infinity);
  const auto rises = y > T(0);
  const T near = to_single(near_exp2(to_double(y) * near_log2(where(inside, size, T(1)))));
  const T at_zero = where(rises, T(0), infinity), at_infinity = where(rises, infinity, T(0));
  const T outside = where(size == T(0), at_zero, where(size == infinity, at_infinity, size));
  return where(inside, near, where(y == y, outside, y));
}

}  // namespace detail

/// x to the power y, with IEEE 754's values at the edges; within 1 ulp.
template <class T>
constexpr T pow(T x, T y) {
  const T infinity(std::numeric_limits<element_t<T>>::infinity());
  const auto integer = detail::is_whole(y);
  const auto odd = integer & !detail::is_whole(T(0.5) * y);
  // Of a power of 0 the base counts as 1.
  const T size = where(y != T(0), fabs(x), T(1));
  const T general = detail::power_of_size(size, y);
  const T value = where(y == T(2), size * size, general);  // `square`, to the bit
  const T at_one = where(size == T(1), T(1), value);       // of an infinite power too
  const T with_sign = where(odd, copysign(at_one, x), at_one);
  const auto none = x + (x - x) < where(integer, -infinity, T(0));  // not of -inf, where the sum is NaN
  const T defined = where(none, T(std::numeric_limits<element_t<T>>::quiet_NaN()), with_sign);
  return where(x == T(1), T(1), defined);
}

struct SinCos {
  float sin, cos;
};
/// Sine and cosine of `turns` full turns, 0 <= turns < 1, within 2 ulp of 1.
template <class T = float>
constexpr SinCos sincos_turns(T turns) {
  using F = detail::Format<float>;
  const float shifted = fma(turns, 4.f, F::round);
  const std::int32_t quadrant = std::bit_cast<std::int32_t>(shifted);
  const float t = fma(shifted - F::round, -0.25f, turns);
  const float z = t * t;
  const float s = t * detail::horner(z, 6.2831855f, -41.341663f, 81.59255f, -75.40204f);
  const float c = fma(z, detail::horner(z, -19.739208f, 64.93932f, -85.44378f, 59.247383f), 1.f);
  const bool odd = (quadrant & 1) != 0;
  const float sine = where(odd, c, s), cosine = where(odd, s, c);
  return {where((quadrant & 2) != 0, -sine, sine), where(((quadrant + 1) & 2) != 0, -cosine, cosine)};
}

}  // namespace sherd::math
