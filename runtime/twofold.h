// Sums of two doubles, for functions of double whose steps need more bits than one has. An element's result
// is the same everywhere, as in runtime/math.h.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "runtime/math_steps.h"

namespace sherd::math::detail {

/// high + low, where low is at most half a unit in the last place of high.
struct Twofold {
  double high, low;
};

/// a + b, of which a is the larger or 0.
constexpr Twofold ordered_sum(double a, double b) {
  const double high = a + b;
  return {high, (a - high) + b};
}
constexpr Twofold sum(double a, double b) {
  const double high = a + b, of_b = high - a;
  return {high, (a - (high - of_b)) + (b - of_b)};
}
constexpr Twofold product(double a, double b) {
  const double high = a * b;
  return {high, std::fma(a, b, -high)};
}
constexpr Twofold product(Twofold a, Twofold b) {
  const Twofold p = product(a.high, b.high);
  return {p.high, p.low + std::fma(a.high, b.low, a.low * b.high)};
}
constexpr double rounded(Twofold x) { return x.high + x.low; }

// ---- logarithm and power ----

/// log((1+s)/(1-s)) = 2s + s z (2/3 + z Q(z)) for z = s^2 below 0.0295: Q.
constexpr double log_far_tail(double z) {
  return horner(z, 0.4, 0.28571428571428564, 0.2222222222222847, 0.1818181817964499, 0.1538461576290815,
                0.13333296397963834, 0.11766819021629554, 0.10456195110401492, 0.1076362151501126);
}

/// Natural logarithm within 2^-63 of itself; x is not negative.
constexpr Twofold log_of(double x) {
  using F = Format<double>;
  using Limits = std::numeric_limits<double>;
  const bool subnormal = x < Limits::min();
  const auto bits = std::bit_cast<std::int64_t>(where(subnormal, x * 0x1p52, x));
  using Wrapping = std::uint64_t;  // the differences of negative inputs overflow and are not used
  const auto e = static_cast<std::int64_t>(Wrapping(bits) - Wrapping(F::sqrt_half)) >> F::mantissa;
  const double f = std::bit_cast<double>(Wrapping(bits) - (Wrapping(e) << F::mantissa)) - 1.0;
  const double k = from_integer<double>(e) - where(subnormal, 52.0, 0.0);
  const Twofold under = ordered_sum(2.0, f);
  const double inverse = 1 / under.high, s = f * inverse;
  const double s_low = std::fma(-s, under.low, std::fma(-s, under.high, f)) * inverse;
  Twofold z = product(s, s);
  z.low = std::fma(2 * s, s_low, z.low);
  const Twofold third = ordered_sum(0x1.5555555555555p-1, z.high * log_far_tail(z.high));
  const Twofold tail = product(z, {third.high, third.low + 0x1.5555555555555p-55});
  const Twofold rest = product({s, s_low}, tail);
  const Twofold near_one = ordered_sum(2 * s, rest.high);
  // ln 2 in two parts, of which the first times k is exact.
  const Twofold y = ordered_sum(k * 0x1.62e42fefa3800p-1, near_one.high);
  const double low = std::fma(k, 0x1.ef35793c76730p-45, near_one.low + std::fma(2.0, s_low, rest.low));
  const Twofold both = ordered_sum(y.high, y.low + low);
  const double at_end = where(x == 0, -Limits::infinity(), x);
  const bool inside = x > 0 && x < Limits::infinity();
  return {where(inside, both.high, at_end), where(inside, both.low, 0.0)};
}

/// y times a logarithm.
constexpr Twofold product_of_log(double y, Twofold log) {
  const Twofold p = product(y, log.high);
  const bool finite = std::fabs(p.high) < 1000;  // no more is asked of `exp_of`
  return {p.high, where(finite, std::fma(y, log.low, p.low), 0.0)};
}

/// (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2, a minimax fit.
constexpr double exp_tail(double r) {
  return horner(r, 0.5000000000000011, 0.16666666666666424, 0.04166666666653041, 0.008333333333485978,
                0.0013888888943577257, 0.00019841269525330447, 2.4801493155084117e-05, 2.7557569628739367e-06,
                2.7630225945857e-07, 2.5005301309803347e-08);
}

/// e^rest 2^n, within 0.51 ulp.
constexpr double scaled_exp(Twofold rest, std::int64_t n) {
  const double r = rest.high;
  const Twofold y = ordered_sum(1.0, r);
  const double tail = std::fma(r * r, exp_tail(r), std::fma(rest.low, r, rest.low));
  // Two factors, because 2^n alone leaves the range of normal numbers at both ends.
  return (y.high + (y.low + tail)) * pow2<double>(n >> 1) * pow2<double>(n - (n >> 1));
}
/// e^x, times 2^`doublings`.
constexpr double exp_of(Twofold x, std::int64_t doublings = 0) {
  using F = Format<double>;
  const double low = where(x.high < F::exp_min, F::exp_min, x.high);
  const double z = where(low > 711.0, 711.0, low);
  const double shifted = std::fma(z, 1.4426950408889634, F::round);
  const double n = shifted - F::round;
  const Twofold rest = sum(std::fma(n, -F::ln2_hi, z), n * -F::ln2_lo);
  return scaled_exp(sum(rest.high, rest.low + x.low),
                    std::bit_cast<std::int64_t>(shifted) - std::bit_cast<std::int64_t>(F::round) + doublings);
}

// ---- angles ----

/// What is left of an angle after whole quarters of a turn, and their number.
struct Quarters {
  Twofold rest;
  std::int64_t count;
};

/// Of 2^29 <= a: bits of 2/pi are multiplied as integers, from those on that count modulo 4.
[[gnu::noinline]] constexpr Quarters remainder_of_large(double a) {
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
  const Twofold top = ordered_sum(parts[5] * 0x1p-32, parts[4] * 0x1p-64);
  const double below = top.low + parts[3] * 0x1p-96 + parts[2] * 0x1p-128;
  const Twofold part = ordered_sum(top.high, below);
  const Twofold rest = product(part, {0x1.921fb54442d18p+0, 0x1.1a62633145c07p-54});
  const double sign = negative ? -1 : 1;
  return {{sign * rest.high, sign * rest.low}, count};
}

/// Of a >= 0. NaN for what is not finite.
constexpr Quarters remainder_of(double a) {
  if (a >= 0x1p29 && a < std::numeric_limits<double>::infinity()) return remainder_of_large(a);
  const double shifted = std::fma(a, 0x1.45f306dc9c883p-1, Format<double>::round);
  const double n = shifted - Format<double>::round;
  // pi/2 in three parts; what the first leaves is exact.
  const double left = std::fma(-n, 0x1.921fb54442d18p+0, a);
  const Twofold second = product(n, 0x1.1a62633145c07p-54), rest = sum(left, -second.high);
  const double low = std::fma(n, 0x1.f1976b7ed8fbcp-110, rest.low - second.low);
  return {ordered_sum(rest.high, low), std::bit_cast<std::int64_t>(shifted)};
}

struct SineAndCosine {
  double sine, cosine;
};
/// Of an angle of at most an eighth of a turn, within 0.6 ulp; minimax fits.
constexpr SineAndCosine sine_and_cosine(Twofold angle) {
  const double r = angle.high, z = r * r;
  const double s =
      horner(z, -0.16666666666666666, 0.008333333333333331, -0.00019841269841265017, 2.7557319219301936e-06,
             -2.5052106219528367e-08, 1.6058529573291737e-10, -7.586576648405261e-13);
  const double c =
      horner(z, 0.041666666666666664, -0.0013888888888888887, 2.4801587301584618e-05, -2.7557319221382125e-07,
             2.0876755783897636e-09, -1.1470459750244853e-11, 4.74580492324984e-14);
  const double half = 0.5 * z, most = 1 - half;
  const double sine = r + std::fma(angle.low, most, r * z * s);
  const double cosine = most + (((1 - most) - half) + std::fma(z * z, c, -r * angle.low));
  return {sine, cosine};
}
/// The sine of an angle, or its cosine: that of `more` more quarters of a turn.
constexpr double sine_of(Quarters angle, std::int64_t more) {
  const SineAndCosine of = sine_and_cosine(angle.rest);
  const std::int64_t quadrant = angle.count + more;
  const double y = where((quadrant & 1) != 0, of.cosine, of.sine);
  return where((quadrant & 2) != 0, -y, y);
}

/// The angle of (x, y), within 1 ulp.
constexpr double angle_of(double y, double x) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const double a = std::fabs(y), b = std::fabs(x);
  const bool steep = a > b;
  const double smaller = where(steep, b, a), larger = where(steep, a, b);
  // Sums of the largest numbers stay finite.
  const double scale = where(larger > 0x1p1000, 0.25, 1.0), low = smaller * scale, high = larger * scale;
  // Beyond a sixteenth of a turn what lies beyond the eighth, of the same sign as it is.
  const bool wide = low > high * 0.41421356237309503 || low == infinity;
  const Twofold less = sum(low, -high), both = ordered_sum(high, low);
  const bool plain = high > 0 && low < high && high < infinity;  // else 0, or the eighth itself
  const double n = where(wide, less.high, low), n_low = where(wide, less.low, 0.0);
  const double d = where(wide, both.high, high), d_low = where(wide, both.low, 0.0);
  const double over = where(plain, n, 0.0), under = where(plain, d, 1.0);
  const double q = over / under;
  const double left =
      std::fma(-q, where(plain, d_low, 0.0), std::fma(-q, under, over) + where(plain, n_low, 0.0));
  const double q_low = left / under;
  // (atan(q)/q - 1) / q^2 in z = q^2, a minimax fit.
  const double z = q * q;
  const double tail =
      horner(z, -0.3333333333333333, 0.19999999999999993, -0.1428571428571149, 0.11111111110751482,
             -0.0909090906681608, 0.07692306729194896, -0.06666641869131183, 0.058819230561140225,
             -0.05258020272656758, 0.04719259188242093, -0.04103887546862687, 0.030622995553735516,
             -0.013905374533113234);
  const double rest = std::fma(q * z, tail, q_low);
  // Eighths of a turn, to which the rest is added or from which it is taken.
  const double near = where(wide, 1.0, 0.0), up = where(steep, 2 - near, near);
  const bool back = std::copysign(1.0, x) < 0;  // not `signbit`, of which the compiler makes no vectors
  const double eighths = where(back, 4 - up, up), sign = where(steep, -1.0, 1.0) * where(back, -1.0, 1.0);
  const Twofold angle = ordered_sum(eighths * 0x1.921fb54442d18p-1, sign * q);  // exact products
  const double result = angle.high + (angle.low + std::fma(eighths, 0x1.1a62633145c07p-55, sign * rest));
  const bool unordered = !(a >= b) && !(a < b);
  return std::copysign(where(unordered, x + y, result), y);
}

}  // namespace sherd::math::detail
