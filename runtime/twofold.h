// Sums of two numbers, for functions whose steps need more bits than one has, and what they are made of:
// logarithms, powers and angles, of floats, doubles and lanes of them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "runtime/math_steps.h"

namespace sherd::math::detail {

/// high + low, where low is at most half a unit in the last place of high.
template <class T>
struct Twofold {
  T high, low;
};
/// A constant of which a double is `high`.
template <SingleNumber T>
constexpr Twofold<T> constant(double high, double low) {
  const float nearest = static_cast<float>(high);
  return {T(nearest), T(static_cast<float>((high - nearest) + low))};
}
template <DoubleNumber T>
constexpr Twofold<T> constant(double high, double low) {
  return {T(high), T(low)};
}

/// a + b, of which a is the larger or 0.
template <class T>
constexpr Twofold<T> ordered_sum(T a, T b) {
  const T high = a + b;
  return {high, (a - high) + b};
}
template <class T>
constexpr Twofold<T> sum(T a, T b) {
  const T high = a + b, of_b = high - a;
  return {high, (a - (high - of_b)) + (b - of_b)};
}
template <class T>
constexpr Twofold<T> product(T a, T b) {
  const T high = a * b;
  return {high, fma(a, b, -high)};
}
template <class T>
constexpr Twofold<T> product(Twofold<T> a, Twofold<T> b) {
  const Twofold<T> p = product(a.high, b.high);
  return {p.high, p.low + fma(a.high, b.low, a.low * b.high)};
}
template <class T>
constexpr Twofold<T> quotient(Twofold<T> a, Twofold<T> b) {
  const T inverse = T(1) / b.high, q = a.high * inverse;
  return {q, fma(-q, b.low, fma(-q, b.high, a.high) + a.low) * inverse};
}
/// 0 of 0.
template <class T>
constexpr Twofold<T> root(Twofold<T> x) {
  const T y = sqrt(x.high), half = T(0.5) / where(y == T(0), T(1), y);
  return {y, (fma(-y, y, x.high) + x.low) * half};
}
template <class T>
constexpr T rounded(Twofold<T> x) {
  return x.high + x.low;
}

// ---- logarithm and power ----

/// x, above 0 and finite, is (1 + beyond_one) 2^exponent, where the first lies between the roots of 1/2 and
/// of 2; `shift` is the exponent again, but for subnormal x.
template <class T>
struct Split {
  T beyond_one, exponent;
  typename Format<T>::Int shift;
};
/// Of a normal number.
template <class T>
constexpr Split<T> split_normal(T x) {
  using F = Format<T>;
  using Wrapping = typename F::Unsigned;  // the differences of negative inputs overflow and are not used
  const auto bits = std::bit_cast<Wrapping>(x);
  const auto e = std::bit_cast<typename F::Int>(bits - Wrapping(F::sqrt_half)) >> F::mantissa;
  const T f = std::bit_cast<T>(bits - (std::bit_cast<Wrapping>(e) << F::mantissa)) - T(1);
  return {f, from_integer<T>(e), e};
}
template <class T>
constexpr Split<T> split(T x) {
  using F = Format<T>;
  const auto subnormal = x < T(std::numeric_limits<element_t<T>>::min());
  Split<T> of = split_normal(where(subnormal, x * pow2<T>(typename F::Int(F::mantissa)), x));
  of.exponent = of.exponent - where(subnormal, T(F::mantissa), T(0));
  return of;
}
/// What a logarithm is of x: `y`, but -inf at 0, NaN below, and x itself where it is infinite or NaN.
template <class T>
constexpr T with_edges_of_log(T y, T x) {
  using Limits = std::numeric_limits<element_t<T>>;
  const T infinity(Limits::infinity());
  const T with_top = where(x < infinity, y, x), with_zero = where(x == T(0), -infinity, with_top);
  return where(x < T(0), T(Limits::quiet_NaN()), with_zero);
}

/// (log((1+s)/(1-s))/s - 2) / s^2 in z = s^2, for (1+s)/(1-s) between the roots of 1/2 and of 2; minimax
/// fits, as all here are.
template <DoubleNumber T>
constexpr T log_tail(T z) {
  return horner(z, 0.6666666666666734, 0.399999999994166, 0.2857142874202555, 0.22222198605640625,
                0.18183562830803124, 0.15314085022738003, 0.1479563301717103);
}
/// log((1+s)/(1-s)) = 2s + s z (2/3 + z Q(z)) for z = s^2 below 0.0295: Q.
template <SingleNumber T>
constexpr T log_far_tail(T z) {
  return horner(z, 0.399999976f, 0.285719723f, 0.221797019f, 0.195576549f);
}
template <DoubleNumber T>
constexpr T log_far_tail(T z) {
  return horner(z, 0.4, 0.28571428571428564, 0.2222222222222847, 0.1818181817964499, 0.1538461576290815,
                0.13333296397963834, 0.11766819021629554, 0.10456195110401492, 0.1076362151501126);
}

/// The logarithm of 1 + f + f_low, f_low being far less than f or than 1, of a `Split`: within 2^-63 of
/// itself.
template <DoubleNumber T>
constexpr Twofold<T> log_beyond_one(T f, T f_low) {
  const Twofold<T> under = ordered_sum(T(2), f);
  const T inverse = T(1) / under.high, s = f * inverse;
  const T s_low = fma(-s, under.low + f_low, fma(-s, under.high, f) + f_low) * inverse;
  Twofold<T> z = product(s, s);
  z.low = fma(T(2) * s, s_low, z.low);
  const Twofold<T> two_thirds = constant<T>(0x1.5555555555555p-1, 0x1.5555555555555p-55);
  const Twofold<T> third = ordered_sum(two_thirds.high, z.high * log_far_tail(z.high));
  const Twofold<T> tail = product(z, Twofold<T>{third.high, third.low + two_thirds.low});
  const Twofold<T> rest = product(Twofold<T>{s, s_low}, tail);
  const Twofold<T> both = ordered_sum(T(2) * s, rest.high);
  return {both.high, both.low + fma(T(2), s_low, rest.low)};
}
/// Natural logarithm of x, which is not negative, or of x 2^`doublings`: as near.
template <DoubleNumber T>
constexpr Twofold<T> log_of(Twofold<T> x, T doublings = T(0)) {
  using F = Format<T>;
  const Split<T> of = split(x.high);
  const T f_low = where(x.low == T(0), T(0), x.low * pow2<T>(typename F::Int(0) - of.shift));
  const Twofold<T> mantissa = log_beyond_one(of.beyond_one, f_low);
  const T k = of.exponent + doublings;
  const Twofold<T> y = ordered_sum(k * T(F::short_ln2), mantissa.high);
  const Twofold<T> both = ordered_sum(y.high, y.low + fma(k, T(F::ln2_rest), mantissa.low));
  const T infinity(std::numeric_limits<element_t<T>>::infinity());
  const auto inside = (x.high > T(0)) & (x.high < infinity);
  return {where(inside, both.high, where(x.high == T(0), -infinity, x.high)), where(inside, both.low, T(0))};
}
template <DoubleNumber T>
constexpr Twofold<T> log_of(T x) {
  return log_of(Twofold<T>{x, T(0)});
}

/// log(1 + f + f_low) - f, of a `Split`: without a quotient, within 2^-27 of the logarithm.
template <SingleNumber T>
constexpr T rest_of_log(T f, T f_low = T(0)) {
  const T z = f * f;
  const T tail = horner(f, 0.333333313f, -0.250008196f, 0.200012416f, -0.166234076f, 0.1420158f,
                        -0.131596372f, 0.127622262f, -0.0763635039f);
  // What is low counts 1 / (1 + f), which is 1 - f + f^2 nearly.
  return fma(f_low, fma(f, f - T(1), T(1)), fma(z * f, tail, T(-0.5) * z));
}
/// A logarithm of 1 + f_low beyond what is split.
template <SingleNumber T>
constexpr T log_of_split(Split<T> of, T f_low) {
  using F = Format<T>;
  const T rest = fma(of.exponent, T(F::ln2_lo), rest_of_log(of.beyond_one, f_low));
  return fma(of.exponent, T(F::ln2_hi), of.beyond_one + rest);
}
/// What is low beside a number above 2^-60, as it is beside its mantissa; it counts nothing above 2^60.
template <SingleNumber T>
constexpr T beside_mantissa(T low, typename Format<T>::Int shift) {
  using Int = typename Format<T>::Int;
  return low * pow2<T>(Int(0) - where(shift > Int(60), Int(60), shift));
}
/// Natural logarithm of x 2^`doublings`, rounded, for x of at least 1.
template <DoubleNumber T>
constexpr T rounded_log(Twofold<T> x, T doublings = T(0)) {
  return rounded(log_of(x, doublings));
}
template <SingleNumber T>
constexpr T rounded_log(Twofold<T> x, T doublings = T(0)) {
  using F = Format<T>;
  const Split<T> of = split_normal(x.high);
  const T f_low = beside_mantissa(x.low, of.shift), k = of.exponent + doublings;
  const Twofold<T> y = ordered_sum(k * T(F::short_ln2), of.beyond_one);
  const T rest = y.low + fma(k, T(F::ln2_rest), rest_of_log(of.beyond_one, f_low));
  return where(x.high < T(std::numeric_limits<element_t<T>>::infinity()), y.high + rest, x.high);
}

/// y times a logarithm.
template <DoubleNumber T>
constexpr Twofold<T> product_of_log(T y, Twofold<T> log) {
  const Twofold<T> p = product(y, log.high);
  const auto finite = fabs(p.high) < T(1000);  // no more is asked of `exp_of`
  return {p.high, where(finite, fma(y, log.low, p.low), T(0))};
}

/// (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2, a minimax fit.
template <SingleNumber T>
constexpr T exp_tail(T r) {
  return horner(r, 0.49999994f, 0.16666521f, 0.041668482f, 0.008368666f, 0.0013809038f);
}
template <DoubleNumber T>
constexpr T exp_tail(T r) {
  return horner(r, 0.5000000000000011, 0.16666666666666424, 0.04166666666653041, 0.008333333333485978,
                0.0013888888943577257, 0.00019841269525330447, 2.4801493155084117e-05, 2.7557569628739367e-06,
                2.7630225945857e-07, 2.5005301309803347e-08);
}

/// e^rest 2^n.
template <class T>
constexpr Twofold<T> scaled_exp(Twofold<T> rest, typename Format<T>::Int n) {
  const T r = rest.high;
  const Twofold<T> y = ordered_sum(T(1), r);
  const T tail = fma(r * r, exp_tail(r), fma(rest.low, r, rest.low));
  const Twofold<T> all = ordered_sum(y.high, y.low + tail);
  // Two factors, because 2^n alone leaves the range of normal numbers at both ends.
  const T one = pow2<T>(n >> 1), other = pow2<T>(n - (n >> 1));
  return {all.high * one * other, all.low * one * other};
}
/// e^x, times 2^`doublings`.
template <class T>
constexpr Twofold<T> exp_of(Twofold<T> x, int doublings = 0) {
  using F = Format<T>;
  const T low = where(x.high < T(F::exp_min), T(F::exp_min), x.high);
  const T z = where(low > T(F::half_exp_max), T(F::half_exp_max), low);
  const T shifted = fma(z, T(1.4426950408889634), T(F::round)), n = shifted - T(F::round);
  // Where the first is the smaller of two that are added, both are far below an ulp of e^rest.
  const Twofold<T> rest = ordered_sum(fma(n, T(-F::ln2_hi), z), n * T(-F::ln2_lo));
  return scaled_exp(ordered_sum(rest.high, rest.low + x.low),
                    low_bits(shifted) + typename F::Int(static_cast<element_t<typename F::Int>>(doublings)));
}

// ---- angles ----

/// What is left of an angle after whole quarters of a turn, and their number.
template <class T>
struct Quarters {
  Twofold<T> rest;
  typename Format<T>::Int count;
};

/// Of 2^29 <= a: bits of 2/pi are multiplied as integers, from those on that count modulo 4.
[[gnu::noinline]] constexpr Quarters<double> remainder_of_large(double a) {
  // 2/pi after 32 zeros.
  const std::uint32_t two_over_pi[] = {
      0u,          0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu,
      0xdebbc561u, 0xb7246e3au, 0x424dd2e0u, 0x06492eeau, 0x09d1921cu, 0xfe1deb1cu, 0xb129a73eu, 0xe88235f5u,
      0x2ebb4484u, 0xe99c7026u, 0xb45f7e41u, 0x3991d639u, 0x835339f4u, 0x9c845f8bu, 0xbdf9283bu, 0x1ff897ffu,
      0xde05980fu, 0xef2f118bu, 0x5a0a6d1fu, 0x6d367ecfu, 0x27cb09b7u, 0x4f463f66u, 0x9e5fea2du, 0x7527bac7u,
      0xebe5f17bu, 0x3d0739f7u, 0x8a5292eau, 0x6bfb5fb1u, 0x1f8d5d08u, 0x56033046u, 0xfc7b6babu};
  const auto bits = std::bit_cast<std::uint64_t>(a);
  const int exponent = static_cast<int>(bits >> 52) - 1075;  // a = mantissa 2^exponent
  const std::uint64_t mantissa = (bits & 0xfffffffffffffu) | 0x10000000000000u;
  const int first = exponent - 2 + 32, word = first / 32, shift = first % 32;
  // The product modulo 2^192, of which the first two bits count quarters; digits of 32 bits, the lowest
  // first.
  std::uint64_t digits[7] = {};
  for (int i = 0; i < 6; ++i) {
    const std::uint64_t pair = std::uint64_t{two_over_pi[word + 5 - i]} << 32 | two_over_pi[word + 6 - i];
    const std::uint64_t digit = (pair << shift) >> 32;
    const std::uint64_t low = digit * (mantissa & 0xffffffffu), high = digit * (mantissa >> 32);
    std::uint64_t carry = low;
    for (int j = i; j < 6; ++j) {
      const std::uint64_t more = j == i ? 0 : j == i + 1 ? high & 0xffffffffu : j == i + 2 ? high >> 32 : 0;
      const std::uint64_t total = digits[j] + (carry & 0xffffffffu) + more;
      digits[j] = total & 0xffffffffu;
      carry = (carry >> 32) + (total >> 32);
    }
  }
  std::int64_t count = static_cast<std::int64_t>(digits[5] >> 30);
  const bool negative = (digits[5] >> 29 & 1) != 0;  // more than half: the next quarter is nearer
  if (negative) ++count;
  double parts[6] = {};
  std::uint64_t carry = negative ? 1 : 0;
  for (int i = 0; i < 6; ++i) {
    std::uint64_t digit = ((digits[i] << 2) | (i > 0 ? digits[i - 1] >> 30 : 0)) & 0xffffffffu;
    if (negative) {
      digit = (digit ^ 0xffffffffu) + carry;
      carry = digit >> 32;
      digit &= 0xffffffffu;
    }
    parts[i] = static_cast<double>(digit);
  }
  const Twofold<double> top = ordered_sum(parts[5] * 0x1p-32, parts[4] * 0x1p-64);
  const double below = top.low + parts[3] * 0x1p-96 + parts[2] * 0x1p-128;
  const Twofold<double> part = ordered_sum(top.high, below);
  const Twofold<double> rest = product(part, Twofold<double>{0x1.921fb54442d18p+0, 0x1.1a62633145c07p-54});
  const double sign = negative ? -1 : 1;
  return {{sign * rest.high, sign * rest.low}, count};
}

/// Whether an angle is so large that three parts of a quarter are too few.
template <class T>
constexpr auto is_large(T a) {
  return a >= T(Format<T>::most_quarters);
}
/// Of a >= 0. NaN for what is not finite.
template <class T>
constexpr Quarters<T> remainder_of(T a);

/// What is right for so large an angle, in its place: of a float through double.
constexpr void replace_large(Quarters<double>& of, double a) {
  if (a < std::numeric_limits<double>::infinity()) of = remainder_of_large(a);
}
constexpr void replace_large(Quarters<float>& of, float a) {
  const Quarters<double> wide = remainder_of(static_cast<double>(a));
  const Twofold<float> rest = constant<float>(wide.rest.high, wide.rest.low);
  of = {rest, static_cast<std::int32_t>(wide.count & 3)};
}

template <class T>
constexpr Quarters<T> remainder_of(T a) {
  using F = Format<T>;
  const T round(F::round), shifted = fma(a, T(0x1.45f306dc9c883p-1), round), n = shifted - round;
  const T left = fma(-n, T(F::quarter[0]), a);  // exact
  const Twofold<T> second = product(n, T(F::quarter[1])), rest = sum(left, -second.high);
  const T low = fma(-n, T(F::quarter[2]), rest.low - second.low);
  Quarters<T> of{{rest.high, low}, std::bit_cast<typename F::Int>(shifted)};
  if (any(is_large(a))) replace_large(of, a);
  return of;
}

/// (sin(r)/r - 1) / r^2 in z = r^2, and (cos(r) - 1 + z/2) / z^2, up to an eighth of a turn; minimax fits.
template <SingleNumber T>
constexpr T sine_tail(T z) {
  return horner(z, -0.166666672f, 0.0083333794f, -0.00019852983f, 2.83080362e-06f);
}
template <DoubleNumber T>
constexpr T sine_tail(T z) {
  return horner(z, -0.16666666666666666, 0.008333333333333331, -0.00019841269841265017,
                2.7557319219301936e-06, -2.5052106219528367e-08, 1.6058529573291737e-10,
                -7.586576648405261e-13);
}
template <SingleNumber T>
constexpr T cosine_tail(T z) {
  return horner(z, 0.0416666456f, -0.00138873025f, 2.44308831e-05f);
}
template <DoubleNumber T>
constexpr T cosine_tail(T z) {
  return horner(z, 0.041666666666666664, -0.0013888888888888887, 2.4801587301584618e-05,
                -2.7557319221382125e-07, 2.0876755783897636e-09, -1.1470459750244853e-11,
                4.74580492324984e-14);
}

template <class T>
struct SineAndCosine {
  Twofold<T> sine, cosine;
};
/// Of an angle of at most an eighth of a turn, within 0.6 ulp where they are rounded.
template <class T>
constexpr SineAndCosine<T> sine_and_cosine(Twofold<T> angle) {
  const T r = angle.high, z = r * r;
  const T half = T(0.5) * z, most = T(1) - half;
  const T rest_of_sine = fma(angle.low, most, r * z * sine_tail(z));
  const T rest_of_cosine = ((T(1) - most) - half) + fma(z * z, cosine_tail(z), -r * angle.low);
  return {ordered_sum(r, rest_of_sine), ordered_sum(most, rest_of_cosine)};
}
/// The sine of an angle, or its cosine: that of `more` more quarters of a turn.
template <class T>
constexpr T sine_of(Quarters<T> angle, int more) {
  using Int = typename Format<T>::Int;
  const SineAndCosine<T> of = sine_and_cosine(angle.rest);
  const Int quadrant = angle.count + Int(more);
  const T y = where((quadrant & Int(1)) != Int(0), of.cosine.high, of.sine.high);
  // The second bit is the sign.
  return signed_as(y, std::bit_cast<T>(quadrant << (8 * static_cast<int>(sizeof(element_t<T>)) - 2)));
}

/// (atan(q)/q - 1) / q^2 in z = q^2, up to an eighth of a turn; a minimax fit.
template <SingleNumber T>
constexpr T angle_tail(T z) {
  return horner(z, -0.333333313f, 0.199998021f, -0.142791271f, 0.110094689f, -0.0828223452f, 0.0434871763f);
}
template <DoubleNumber T>
constexpr T angle_tail(T z) {
  return horner(z, -0.3333333333333333, 0.19999999999999993, -0.1428571428571149, 0.11111111110751482,
                -0.0909090906681608, 0.07692306729194896, -0.06666641869131183, 0.058819230561140225,
                -0.05258020272656758, 0.04719259188242093, -0.04103887546862687, 0.030622995553735516,
                -0.013905374533113234);
}
/// The angle of (x, y), within 1 ulp.
template <class T>
constexpr T angle_of(T y, T x) {
  using F = Format<T>;
  const T infinity(std::numeric_limits<element_t<T>>::infinity());
  const T a = fabs(y), b = fabs(x);
  const auto steep = a > b;
  const T smaller = where(steep, b, a), larger = where(steep, a, b);
  // Sums of the largest numbers stay finite.
  const T scale = where(larger > T(F::huge), T(0.25), T(1)), low = smaller * scale, high = larger * scale;
  // Beyond a sixteenth of a turn what lies beyond the eighth, of the same sign as it is.
  const auto wide = (low > high * T(0.41421356237309503)) | (low == infinity);
  const Twofold<T> less = sum(low, -high), both = ordered_sum(high, low);
  const auto plain = (high > T(0)) & (low < high) & (high < infinity);  // else 0, or the eighth itself
  const T n = where(wide, less.high, low), n_low = where(wide, less.low, T(0));
  const T d = where(wide, both.high, high), d_low = where(wide, both.low, T(0));
  const T over = where(plain, n, T(0)), under = where(plain, d, T(1));
  const T q = over / under;
  const T left = fma(-q, where(plain, d_low, T(0)), fma(-q, under, over) + where(plain, n_low, T(0)));
  const T q_low = left / under, z = q * q;
  const T rest = fma(q * z, angle_tail(z), q_low);
  // Eighths of a turn, to which the rest is added or from which it is taken.
  const T near = where(wide, T(1), T(0)), up = where(steep, T(2) - near, near);
  const T direction = copysign(T(1), x);
  const T eighths = where(direction < T(0), T(4) - up, up), sign = where(steep, T(-1), T(1)) * direction;
  const Twofold<T> angle = ordered_sum(eighths * T(F::short_eighth), sign * q);  // exact products
  const T result = angle.high + (angle.low + fma(eighths, T(F::eighth_rest), sign * rest));
  const auto ordered = (a >= b) | (a < b);
  return copysign(where(ordered, result, x + y), y);
}

}  // namespace sherd::math::detail
