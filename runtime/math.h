// Elementary functions as plain code without branches. A loop over them vectorises, nvcc compiles them for
// the device, and an element's result is the same in a vector body, in a scalar tail and on every processor
// with fused multiply-add, whatever its C library.
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

// (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2.
constexpr float exp_tail(float r) {
  return horner(r, 0.49999994f, 0.16666521f, 0.041668482f, 0.008368666f, 0.0013809038f);
}
// (log((1+s)/(1-s))/s - 2) / s^2 in z = s^2, for (1+s)/(1-s) between sqrt(1/2) and sqrt(2).
constexpr float log_tail(float z) { return horner(z, 0.66666776f, 0.39977446f, 0.29873738f); }
constexpr double log_tail(double z) {
  return horner(z, 0.6666666666666734, 0.399999999994166, 0.2857142874202555, 0.22222198605640625,
                0.18183562830803124, 0.15314085022738003, 0.1479563301717103);
}
// (tanh(x)/x - 1) / x^2 in z = x^2, for |x| <= 0.6.
constexpr float tanh_tail(float z) {
  return horner(z, -0.333333f, 0.13331965f, -0.053787272f, 0.020807495f, -0.005908412f);
}
constexpr double tanh_tail(double z) {
  return horner(z, -0.3333333333333313, 0.13333333333300945, -0.05396825394989765, 0.021869488016483783,
                -0.00886322696222505, 0.0035920388957708374, -0.0014552233189757617, 0.0005872151406726201,
                -0.0002304524884694338, 7.937938888567587e-05, -1.7211905303759843e-05);
}
// erf(x)/x - 1 in z = x^2, for |x| <= 1.
constexpr float erf_small(float z) {
  return horner(z, 0.12837917f, -0.37612626f, 0.112835996f, -0.02685443f, 0.005189506f, -0.0008020592f,
                7.888319e-05f);
}
constexpr double erf_small(double z) {
  return horner(z, 0.1283791670955126, -0.37612638903183754, 0.1128379167095512, -0.026866170645129864,
                0.0052239776254235865, -0.0008548327021954468, 0.0001205533290374633, -1.4925647592604304e-05,
                1.64620459434695e-06, -1.636464905211261e-07, 1.479246510046623e-08, -1.2164941914801635e-09,
                8.71037387213268e-11, -4.232990811614943e-12);
}
// e^(t^2/2) (1 - Phi(t)) for t up to 6, Phi the normal distribution function; the error is weighed by
// max(e^(-t^2/2), 0.001).
constexpr float upper_tail(float t) {
  return horner(where(t > 6.f, 6.f, t) - 3.f, 0.121514047f, -0.0343983043f, 0.00916030835f, -0.00231242629f,
                0.000548896465f, -0.000129979176f, 3.22496514e-5f, -4.56595963e-6f, 5.06720249e-7f,
                -6.81743881e-7f, 1.11748863e-7f, 3.9545113e-8f, 1.01184084e-9f, -2.50700902e-9f);
}
// log(erfc(t)) from 1 to where erf(t) rounds to 1.
constexpr float log_erfc(float t) {
  const float u = where(t > 4.f, 4.f, t) - 2.5f;
  return horner(u, -7.806815f, -5.3526807f, -0.94389236f, -0.010854257f, 0.0021671331f, -0.00042809252f,
                6.488516e-05f, -2.0232887e-05f, 2.6082884e-07f);
}
constexpr double log_erfc(double t) {
  const double u = where(t > 6., 6., t) - 3.5;
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
  const T low = where(x < F::exp_min, F::exp_min, x);
  const T z = where(low > F::exp_max, F::exp_max, low);
  const T shifted = std::fma(z, T(1.4426950408889634), F::round);
  const T n = shifted - F::round;
  const T r = std::fma(n, -F::ln2_lo, std::fma(n, -F::ln2_hi, z));
  const T y = std::fma(r * r, detail::exp_tail(r), r) + T(1);
  // Two factors, because 2^n alone leaves the range of normal numbers at both ends.
  const auto k = std::bit_cast<typename F::Int>(shifted) - std::bit_cast<typename F::Int>(F::round);
  return y * detail::pow2<T>(k >> 1) * detail::pow2<T>(k - (k >> 1));
}

/// Natural logarithm, within 1 ulp; -inf at 0, NaN below.
template <class T>
constexpr T log(T x) {
  using F = detail::Format<T>;
  using Limits = std::numeric_limits<T>;
  const bool subnormal = x < Limits::min();
  const auto bits = std::bit_cast<typename F::Int>(where(subnormal, x * detail::pow2<T>(F::mantissa), x));
  using Int = typename F::Int;
  using Wrapping = std::make_unsigned_t<Int>;  // the differences of negative inputs overflow and are not used
  const auto e = static_cast<Int>(Wrapping(bits) - Wrapping(F::sqrt_half)) >> F::mantissa;
  const T f = std::bit_cast<T>(Wrapping(bits) - (Wrapping(e) << F::mantissa)) - T(1);
  const T k = detail::from_integer<T>(e) - where(subnormal, T(F::mantissa), T(0));
  const T s = f / (T(2) + f);
  const T z = s * s;
  const T log1p = std::fma(-s, f - z * detail::log_tail(z), f);
  const T y = std::fma(k, F::ln2_hi, std::fma(k, F::ln2_lo, log1p));
  const T with_top = where(x < Limits::infinity(), y, x);
  const T with_zero = where(x == T(0), -Limits::infinity(), with_top);
  return where(x < T(0), Limits::quiet_NaN(), with_zero);
}

/// log(1 + x), within 2 ulp: what rounding took from 1 + x stands in the quotient too (Kahan).
template <class T>
constexpr T log1p(T x) {
  const T u = T(1) + x, moved = u - T(1);
  const T y = where(moved == x, log(u), log(u) * (x / where(moved == T(0), T(1), moved)));
  return where(moved == T(0), x, y);
}

/// 1 / (1 + e^-x).
template <class T>
constexpr T sigmoid(T x) {
  return T(1) / (T(1) + exp(-x));
}

/// Hyperbolic tangent, within 2 ulp.
template <class T>
constexpr T tanh(T x) {
  const T a = std::fabs(x);
  const T z = x * x;
  const T small = std::fma(a * z, detail::tanh_tail(z), a);
  const T large = T(1) - T(2) / (exp(a + a) + T(1));
  return std::copysign(where(a < T(0.6), small, large), x);  // of -0 too
}

/// Error function, within 2 ulp in float and 4 in double.
template <class T>
constexpr T erf(T x) {
  const T a = std::fabs(x);
  const T small = std::fma(x, detail::erf_small(x * x), x);
  const T large = std::copysign(T(1) - exp(detail::log_erfc(a)), x);
  return where(a < T(1), small, large);
}

/// The normal distribution at x.
template <class T>
struct Normal {
  T bell;  ///< e^(-x^2/2)
  T cdf;   ///< Phi(x)
};

/// Both within 1.3e-7 in float, Phi within 0.02 % of itself down to -6; within 4 ulp of 1 in double.
constexpr Normal<double> normal(double x) {
  return {exp(-0.5 * x * x), 0.5 * (1 + erf(x * 0.7071067811865476))};
}
constexpr Normal<float> normal(float x) {
  using F = detail::Format<float>;
  const float power = -0.5f * x * x;
  // e^power, which is between 0 and 1, in fewer steps than `exp` takes for any number.
  constexpr float least = -87.f;
  const float z = where(power < least, least, power);
  const float shifted = std::fma(z, 1.442695041f, F::round);
  const float r = std::fma(shifted - F::round, -0.69314718f, z);
  const float y = std::fma(r * r, detail::exp_tail(r), r) + 1.f;
  const F::Int k = std::bit_cast<F::Int>(shifted) - std::bit_cast<F::Int>(F::round);
  const float bell = where(power < least, 0.f, y * detail::pow2<float>(k));
  const float tail = bell * detail::upper_tail(std::fabs(x));
  return {bell, where(x > 0.f, 1.f - tail, tail)};
}

/// a b + c, rounded once.
template <class T>
constexpr T fma(T a, T b, T c) {
  return std::fma(a, b, c);
}
template <class T>
constexpr T sqrt(T x) {
  return std::sqrt(x);
}
template <class T>
constexpr T rsqrt(T x) {
  return T(1) / std::sqrt(x);
}
namespace detail {

/// What is left of an angle after whole quarters of a turn: its sine and cosine, and the number of quarters.
struct Angle {
  double sine, cosine;
  std::int64_t quarters;
};

/// Of a >= 0.
constexpr Angle angle(float a) {
  // a is m 2^(24 j) with m below 2^48, and 2/pi 2^(24 j) counts modulo 4 alone. It stands in two parts, so
  // that what is left of a after whole quarters is right to 2^-55 of one, and floats come no nearer than
  // 2^-30.
  const bool one = a >= 0x1p48f, two = a >= 0x1p72f, three = a >= 0x1p96f, four = a >= 0x1p120f;
  const auto choose = [&](double v0, double v1, double v2, double v3, double v4) {
    return where(four, v4, where(three, v3, where(two, v2, where(one, v1, v0))));
  };
  const double m = static_cast<double>(a) * choose(1, 0x1p-24, 0x1p-48, 0x1p-72, 0x1p-96);
  const double high = choose(0x1.45f306dc9c883p-1, -0x1.236377d5ac07bp-1, 0x1.529fc2757d1f5p-4,
                             0x1.3abe8fa9a6eep-3, 0x1.f534ddc0db629p+0);
  const double low = choose(-0x1.6b01ec5417056p-55, -0x1.505c1596447e5p-57, 0x1.a6ee06db14acdp-59,
                            0x1.b6c52b3278872p-57, 0x1.664f10e4107f9p-54);
  const double turned = m * high;
  const double shifted = turned + Format<double>::round;  // rounds, and leaves the integer in the low bits
  const double rest =
      (turned - (shifted - Format<double>::round)) + std::fma(m, low, std::fma(m, high, -turned));
  // Taylor's polynomials, within 2^-34 up to 0.6 quarters.
  const double r = rest * 1.5707963267948966, z = r * r;
  const double s =
      std::fma(r * z, horner(z, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800), r);
  const double c =
      horner(z, 1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600);
  return {s, c, std::bit_cast<std::int64_t>(shifted)};
}

/// The sine of an angle, or its cosine: that of `quarters` more quarters of a turn. For a >= 0.
constexpr float sine(float a, std::int64_t quarters) {
  const Angle rest = angle(a);
  const std::int64_t quadrant = rest.quarters + quarters;
  const double y = where((quadrant & 1) != 0, rest.cosine, rest.sine);
  return static_cast<float>(where((quadrant & 2) != 0, -y, y));
}

}  // namespace detail

/// Sine and cosine, within 1 ulp; radians, of any size.
constexpr float sin(float x) {
  const float y = detail::sine(std::fabs(x), 0);
  return where(std::signbit(x), -y, y);
}
constexpr float cos(float x) { return detail::sine(std::fabs(x), 1); }
constexpr double sin(double x) {
  const double y = detail::sine_of(detail::remainder_of(std::fabs(x)), 0);
  return where(std::signbit(x), -y, y);
}
constexpr double cos(double x) { return detail::sine_of(detail::remainder_of(std::fabs(x)), 1); }

/// `x` where the condition holds, else 0, by bits: for a condition that may be the same for a whole loop, of
/// which the compiler makes no vector by `where`.
template <class T>
constexpr T only_if(bool condition, T x) {
  using Bits = std::make_unsigned_t<typename detail::Format<T>::Int>;
  return std::bit_cast<T>(std::bit_cast<Bits>(x) & (condition ? ~Bits{0} : Bits{0}));
}

namespace detail {

/// x to the power y, where `power(size, y)` is that of a number that is not negative.
template <class Power>
constexpr double signed_power(double x, double y, const Power& power) {
  // What follows from the power alone is numbers and bits, since of a truth that is the same in all lanes the
  // compiler makes no vector.
  constexpr double infinity = std::numeric_limits<double>::infinity();
  using Bits = std::uint64_t;
  const double half = 0.5 * y;
  const bool integer = std::trunc(y) == y, odd = integer && std::trunc(half) != half;
  const Bits sign = odd ? Bits{1} << 63 : 0;
  const double none_below = integer ? -infinity : 0;
  // Of a power of 0 the base counts as 1.
  const double size = only_if(y != 0, std::fabs(x)) + (y != 0 ? 0.0 : 1.0);
  const double value = where(size == 1, 1.0, power(size, y));  // of an infinite power too
  const double with_sign =
      std::bit_cast<double>(std::bit_cast<Bits>(value) | (std::bit_cast<Bits>(x) & sign));
  const bool none = x + (x - x) < none_below;  // not of -inf, where the sum is NaN
  const double defined = where(none, std::numeric_limits<double>::quiet_NaN(), with_sign);
  return where(x == 1, 1.0, defined);
}

}  // namespace detail

/// x to the power y, with IEEE 754's values at the edges; within 1 ulp.
constexpr double pow(double x, double y) {
  return detail::signed_power(x, y, [](double size, double power) {
    const double general = detail::exp_of(detail::product_of_log(power, detail::log_of(size)));
    return only_if(power == 2, size * size) + only_if(power != 2, general);  // `square`, to the bit
  });
}
/// In float through double: a loop with one width of lanes is a loop of vectors.
constexpr float pow(float x, float y) {
  return static_cast<float>(
      detail::signed_power(x, y, [](double size, double power) { return exp(power * log(size)); }));
}

struct SinCos {
  float sin, cos;
};
/// Sine and cosine of `turns` full turns, 0 <= turns < 1, within 2 ulp of 1.
template <class T = float>
constexpr SinCos sincos_turns(T turns) {
  using F = detail::Format<float>;
  const float shifted = std::fma(turns, 4.f, F::round);
  const std::int32_t quadrant = std::bit_cast<std::int32_t>(shifted);
  const float t = std::fma(shifted - F::round, -0.25f, turns);
  const float z = t * t;
  const float s = t * detail::horner(z, 6.2831855f, -41.341663f, 81.59255f, -75.40204f);
  const float c = std::fma(z, detail::horner(z, -19.739208f, 64.93932f, -85.44378f, 59.247383f), 1.f);
  const bool odd = (quadrant & 1) != 0;
  const float sine = where(odd, c, s), cosine = where(odd, s, c);
  return {where((quadrant & 2) != 0, -sine, sine), where(((quadrant + 1) & 2) != 0, -cosine, cosine)};
}

}  // namespace sherd::math
