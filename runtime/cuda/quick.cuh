// Functions of floats that the library computes through double, with the same bits in half the instructions
// and fewer. A short formula comes near the value: where all numbers that near round to one float, that is
// the result. Where not, for one element in thousands, the library's own formula is computed.
#pragma once

#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "runtime/cuda/elementwise.cuh"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cuda {
namespace quick {

using math::where;
using math::detail::horner;

/// A float that is right unless in doubt. Its functions are those of this namespace: functors are generic in
/// their scalar, and find them.
struct Number {
  float value = 0;
  bool doubt = false;

  constexpr Number() = default;
  template <class X>
    requires std::is_arithmetic_v<X>
  explicit constexpr Number(X x, bool doubtful = false) : value(static_cast<float>(x)), doubt(doubtful) {}

  friend constexpr Number operator-(Number a) { return Number(-a.value, a.doubt); }
  friend constexpr Number operator-(Number a, Number b) {
    return Number(a.value - b.value, a.doubt || b.doubt);
  }
  friend constexpr Number operator*(Number a, Number b) {
    return Number(a.value * b.value, a.doubt || b.doubt);
  }
  friend constexpr bool operator!=(Number a, Number b) { return a.value != b.value; }
  friend constexpr Number only_if(bool condition, Number x) {
    return Number(math::only_if(condition, x.value), x.doubt);
  }
  friend constexpr Number copysign(Number x, float sign) {
    return Number(std::copysign(x.value, sign), x.doubt);
  }
};

/// The most that a formula here and the library's are apart, as a part of the value: 2^-near. The library's
/// sine is off by 2^-36.6 itself.
inline constexpr int near = 38, near_of_sine = 36;

__device__ inline std::int32_t high_word(double x) {
  return static_cast<std::int32_t>(std::bit_cast<std::uint64_t>(x) >> 32);
}
__device__ inline std::uint32_t low_word(double x) {
  return static_cast<std::uint32_t>(std::bit_cast<std::uint64_t>(x));
}

/// `y` as a float, for a value that is at most 2^-bits of itself away from it; in doubt where that might
/// round otherwise, and where `y` is not `usual` or too large for a float. A subnormal value is nearer to a
/// float than that, or not usual.
template <int bits = near>
__device__ Number rounded(double y, bool usual = true) {
  // A float has 24 of 53 bits, and rounding turns at half of its last.
  constexpr std::uint32_t half = 1u << 28, off = 1u << (53 - bits);
  const bool turns = ((low_word(y) - (half - off)) & (2 * half - 1)) <= 2 * off;
  const bool large = static_cast<std::uint32_t>(high_word(y)) << 1 >= 2u * 0x47efffffu;  // NaN too
  return Number(y, turns || large || !usual);
}
/// -x if `turn` is odd, else x.
__device__ inline double turned(double x, std::uint32_t turn) {
  return std::bit_cast<double>(std::bit_cast<std::uint64_t>(x) ^ std::uint64_t{turn} << 63);
}

inline constexpr float infinity = std::numeric_limits<float>::infinity();

/// 1 / x and 1 / sqrt(x), within 2^-19 of themselves.
__device__ inline double reciprocal_estimate(double x) {
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  return y;
}
__device__ inline double rsqrt_estimate(double x) {
  double y;
  asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  return y;
}
/// n / d, within 2^-51; NaN by 0.
__device__ inline double quotient(double n, double d) {
  const double r = reciprocal_estimate(d), left = std::fma(-d, r, 1.0);
  return n * std::fma(r, std::fma(left, left, left), r);
}
/// Within 2^-51; NaN of 0.
__device__ inline double root(double x) {
  const double r = rsqrt_estimate(x), y = x * r, left = std::fma(-y, r, 1.0);
  return y * std::fma(left, std::fma(0.375, left, 0.5), 1.0);
}
/// 2^k x, which is normal as x is.
__device__ inline double scaled(double x, std::int32_t k) {
  return std::bit_cast<double>(std::bit_cast<std::uint64_t>(x) +
                               (std::uint64_t{static_cast<std::uint32_t>(k)} << 52));
}

/// An integer below 2^31, as a number and as one.
struct Whole {
  double number;
  std::int32_t integer;
};
/// The nearest to x y.
__device__ inline Whole whole_of(double x, double y) {
  constexpr double round = math::detail::Format<double>::round;
  const double shifted = std::fma(x, y, round);
  return {shifted - round, static_cast<std::int32_t>(low_word(shifted))};
}

// Polynomials are weighted minimax fits.

/// What n pi / parts leave of an angle below 2^26.
template <int parts>
__device__ double rest_of_angle(double x, double n) {
  return std::fma(n, -0x1.1a62633145c07p-53 / parts, std::fma(n, -0x1.921fb54442d18p+1 / parts, x));
}
__device__ inline bool small_angle(float x) { return std::fabs(x) < 0x1p26f; }

/// sin(r) for |r| <= pi/2.
__device__ inline double sine(double r) {
  return r * horner(r * r, 1.0, -0.16666666666504454, 0.008333333321076403, -0.00019841266727428167,
                    2.755695290687548e-06, -2.503018867762857e-08, 1.5409406330168588e-10);
}
__device__ inline Number sin(Number number) {
  const float x = number.value;
  const Whole n = whole_of(x, 0.3183098861837907);
  const double y = sine(rest_of_angle<1>(x, n.number));
  return rounded<near_of_sine>(turned(y, n.integer), small_angle(x));
}
__device__ inline Number cos(Number number) {
  const float x = number.value;
  const Whole n = whole_of(1.0, std::fma(double{x}, 0.3183098861837907, -0.5));
  const double y = sine(rest_of_angle<1>(x, n.number + 0.5));
  return rounded<near_of_sine>(turned(y, n.integer + 1), small_angle(x));
}
__device__ inline Number tan(Number number) {
  const float x = number.value;
  const Whole n = whole_of(x, 0.6366197723675814);
  const double r = rest_of_angle<2>(x, n.number), z = r * r;
  const double s = r * horner(z, 1.0, -0.16666666666630317, 0.008333333325071425, -0.00019841263725115768,
                              2.7555338898067605e-06, -2.476039877103118e-08);
  const double c = horner(z, 1.0, -0.4999999999948886, 0.041666666553333676, -0.001388888065431805,
                          2.4798959648775947e-05, -2.717471110686184e-07);
  const bool odd = (n.integer & 1) != 0;
  const double y = quotient(where(odd, c, s), turned(where(odd, s, c), n.integer));
  return rounded<near_of_sine>(y, small_angle(x));
}

/// The angle of (b, a), of sizes; `steep` if a is the larger, `back` for that of (-b, a).
__device__ inline double angle(double a, double b, bool steep, bool back) {
  const double q = quotient(where(steep, b, a), where(steep, a, b));
  const double flat =
      q * horner(q * q, 1.0, -0.333333333258191, 0.1999999929276014, -0.14285690850793134,
                 0.11110715959998121, -0.09086922119003049, 0.0766593806104969, -0.06545540137063151,
                 0.05480285890467245, -0.0426942904434827, 0.028847317631623633, -0.015587878442745522,
                 0.006125979504341397, -0.0015263560046785115, 0.0001788634366132905);
  const double from = where(steep, 1.5707963267948966, where(back, 3.141592653589793, 0.0));
  return from + turned(flat, steep != back);
}
__device__ inline Number atan(Number number) {
  const float a = std::fabs(number.value);
  const double y = angle(a, 1.0, a > 1.f, false);
  return copysign(rounded(y), number.value);
}
__device__ inline Number atan2(Number second, Number first) {
  const float y = second.value, x = first.value, a = std::fabs(y), b = std::fabs(x);
  const double right = angle(a, b, a > b, std::signbit(x));
  return copysign(rounded(right, right >= 0x1p-126), y);
}

/// asin(a), or the half of acos(a) where a is large.
__device__ inline double arc(double a, bool large) {
  const double z = where(large, std::fma(-0.5, a, 0.5), a * a), r = where(large, root(z), a);
  return r * horner(z, 1.0, 0.1666666666644169, 0.07500000042921419, 0.04464282884877615,
                    0.030382864890774818, 0.02235504063515406, 0.017548165377137548, 0.012556521374745043,
                    0.01791528321409641, -0.0073101751457479444, 0.03151371736352568);
}
__device__ inline Number asin(Number number) {
  const float a = std::fabs(number.value);
  const bool large = a > 0.5f;
  const double y = std::fma(where(large, -2.0, 1.0), arc(a, large), where(large, 1.5707963267948966, 0.0));
  return copysign(rounded(y), number.value);
}
__device__ inline Number acos(Number number) {
  const float x = number.value, a = std::fabs(x);
  const bool large = a > 0.5f, back = x < 0.f;
  const double from = where(large, where(back, 3.141592653589793, 0.0), 1.5707963267948966);
  const double times = where(large, 2.0, -1.0);
  return rounded(std::fma(turned(times, back), arc(a, large), from));
}

/// For a up to 100, which is r and whole times ln 2: half the sum and the difference of e^(a - r) and its
/// inverse, and cosh and sinh of r.
struct Hyperbola {
  double sum, difference, cosh, sinh;
};
__device__ inline Hyperbola hyperbola(double a) {
  const Whole n = whole_of(a, 1.4426950408889634);
  const double r = std::fma(n.number, -0.6931471805599453, a), z = r * r;
  const double up = scaled(0.5, n.integer), down = scaled(0.5, -n.integer);
  return {
      up + down, up - down,
      horner(z, 1.0, 0.4999999999959835, 0.04166666699142422, 0.0013888807275352559, 2.4882399567692298e-05),
      r * horner(z, 1.0, 0.16666666666630167, 0.008333333362846288, 0.00019841195670187607,
                 2.7630767985103494e-06)};
}
__device__ inline Number sinh(Number number) {
  const float a = std::fabs(number.value);
  const Hyperbola of = hyperbola(std::fmin(a, 100.f));
  const double y = std::fma(of.difference, of.cosh, of.sum * of.sinh);
  return copysign(rounded(y), number.value);
}
__device__ inline Number cosh(Number number) {
  const Hyperbola of = hyperbola(std::fmin(std::fabs(number.value), 100.f));
  return rounded(std::fma(of.sum, of.cosh, of.difference * of.sinh));
}

/// log((1 + t) / (1 - t)) for t = n / (2 d), |t| < 0.204.
__device__ inline double log_of_ratio(double n, double d) {
  const double s = quotient(n, d);
  return s * horner(s * s, 1.0, 0.33333333332985043 / 4, 0.20000000160536313 / 16, 0.14285689681703803 / 64,
                    0.11112840319151679 / 256, 0.09029785380578893 / 1024, 0.08741261070028629 / 4096);
}
__device__ inline double log_of_mantissa(double m) { return log_of_ratio(m - 1, std::fma(0.5, m, 0.5)); }

/// x is 2^exponent times what lies between the roots of 1/2 and of 2.
struct Split {
  double mantissa, exponent;
  bool none;  ///< the exponent is 0
};
__device__ inline Split split(double x) {
  const std::int32_t exponent = (high_word(x) - 0x3fe6a09e) >> 20;
  return {scaled(x, -exponent), static_cast<double>(exponent), exponent == 0};
}
__device__ inline double log2_of(double x) {
  const Split of = split(x);
  return std::fma(log_of_mantissa(of.mantissa), 1.4426950408889634, of.exponent);
}
/// Whether x is finite and above 0.
__device__ inline bool has_log(float x) { return std::bit_cast<std::uint32_t>(x) - 1 < 0x7f7fffffu; }

__device__ inline Number log2(Number number) {
  const float x = number.value;
  return rounded(log2_of(x), has_log(x));
}
__device__ inline Number log10(Number number) {
  const float x = number.value;
  const Split of = split(x);
  const double y =
      std::fma(log_of_mantissa(of.mantissa), 0.4342944819032518, of.exponent * 0.3010299956639812);
  return rounded(y, has_log(x));
}
__device__ inline Number asinh(Number number) {
  const double a = std::fabs(number.value), hypotenuse = root(std::fma(a, a, 1.0));
  const Split of = split(a + hypotenuse);
  // Of a small a no bit is lost: (1 + t) / (1 - t) = a + hypotenuse for t = a / (1 + hypotenuse).
  const double n = where(of.none, a, of.mantissa - 1), m = where(of.none, hypotenuse, of.mantissa);
  const double y = std::fma(of.exponent, 0.6931471805599453, log_of_ratio(n, std::fma(0.5, m, 0.5)));
  return copysign(rounded(y, std::fabs(number.value) < infinity), number.value);
}
__device__ inline Number acosh(Number number) {
  const double x = number.value;
  const Split of = split(x + root(std::fma(x, x, -1.0)));
  const double y = std::fma(of.exponent, 0.6931471805599453, log_of_mantissa(of.mantissa));
  return rounded(y, number.value > 1.f && number.value < infinity);
}
/// Half the logarithm of (1 + a) / (1 - a).
__device__ inline Number atanh(Number number) {
  const float size = std::fabs(number.value);
  const double a = size, p = 1 + a, left = 1 - a;
  // Near the binary logarithm of p / left, since words grow with logarithms.
  const std::int32_t exponent = (high_word(p) - high_word(left) + (1 << 19)) >> 20;
  const double q = scaled(left, exponent), n = where(exponent == 0, a + a, p - q);
  const double y =
      std::fma(static_cast<double>(exponent), 0.6931471805599453, log_of_ratio(n, 0.5 * (p + q)));
  return copysign(rounded(0.5 * y, size < 1.f), number.value);
}

/// 2^x, a normal number.
__device__ inline double exp2_of(double x) {
  const Whole n = whole_of(x, 1.0);
  const double y = horner(x - n.number, 1.0, 0.6931471805412246, 0.24022650694741518, 0.05550410959272468,
                          0.009618129559664797, 0.0013333434111089534, 0.00015403097369892868,
                          1.5314221432713755e-05, 1.334442412555039e-06);
  return scaled(y, n.integer);
}
__device__ inline Number exp2(Number number) {
  const float x = number.value;
  return rounded(exp2_of(x), std::fabs(x) < 126.f);
}
__device__ inline Number pow(Number base, Number exponent) {
  const float x = base.value, y = exponent.value, size = std::fabs(x), half = 0.5f * y;
  const bool back = x < 0.f, whole = std::trunc(y) == y, odd = whole && std::trunc(half) != half;
  const double power = y * log2_of(size), value = exp2_of(power);
  const bool usual = has_log(size) && std::fabs(power) < 126;
  const Number result = rounded(turned(value, back && odd), usual);
  return where(usual && back && !whole, Number(std::numeric_limits<float>::quiet_NaN()), result);
}

/// `F`, computed with the functions of this namespace.
template <class F>
struct Quick {
  F f;
  __device__ Number operator()(std::same_as<float> auto... x) const { return f(Number(x)...); }
  /// Without doubt. Seldom run, so once in a kernel.
  __device__ __noinline__ float exactly(std::same_as<float> auto... x) const { return f(x...); }
};

/// `Remainder` by one step; quotients that are too long for one are in doubt.
struct Remainder {
  ops::Remainder f;
  __device__ Number operator()(float a, float b) const {
    const double x = std::fabs(double{a}), y = std::fabs(double{b}), whole = std::trunc(quotient(x, y));
    double size = std::fma(-whole, y, x);  // the quotient may be one off, and this is exact
    size += where(size < 0, y, 0.0);
    size -= where(size >= y, y, 0.0);
    const float rest = std::copysign(static_cast<float>(size), a);
    return Number(where(rest != 0 && (rest < 0) != (b < 0), rest + b, rest), !(whole < 0x1p28));
  }
  __device__ __noinline__ float exactly(float a, float b) const { return f(a, b); }
};

template <class F, class... O>
constexpr bool is_one_of(OpList<O...>) {
  return (std::same_as<F, O> || ...);
}
/// Functors that gain by it. Whatever else they do must be done with a `Number` as with a float.
using Functors =
    OpList<ops::Sin, ops::Cos, ops::Tan, ops::Asin, ops::Acos, ops::Atan, ops::Atan2, ops::Sinh, ops::Cosh,
           ops::Asinh, ops::Acosh, ops::Atanh, ops::Exp2, ops::Log2, ops::Log10, ops::Pow,
           WithScalar<ops::Pow>, ElementwiseGrad<ops::Sin, 0>, ElementwiseGrad<ops::Cos, 0>,
           ElementwiseGrad<ops::Sinh, 0>, ElementwiseGrad<ops::Cosh, 0>, ElementwiseGrad<ops::Pow, 0>,
           ElementwiseGrad<WithScalar<ops::Pow>, 0>>;

}  // namespace quick

template <class F>
inline constexpr bool is_quick<quick::Quick<F>> = true;
template <>
inline constexpr bool is_quick<quick::Remainder> = true;
template <>
struct DenseForm<ops::Remainder> {
  using type = quick::Remainder;
};
template <class F>
  requires(quick::is_one_of<F>(quick::Functors{}))
struct DenseForm<F> {
  using type = quick::Quick<F>;
};

}  // namespace sherd::cuda
