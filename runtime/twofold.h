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
template <DoubleNumber D>
struct Twofold {
  D high, low;
};

/// a + b, of which a is the larger or 0.
template <DoubleNumber D>
constexpr Twofold<D> ordered_sum(D a, D b) {
  const D high = a + b;
  return {high, (a - high) + b};
}
template <DoubleNumber D>
constexpr Twofold<D> sum(D a, D b) {
  const D high = a + b, of_b = high - a;
  return {high, (a - (high - of_b)) + (b - of_b)};
}
template <DoubleNumber D>
constexpr Twofold<D> product(D a, D b) {
  const D high = a * b;
  return {high, fma(a, b, -high)};
}
template <DoubleNumber D>
constexpr Twofold<D> product(Twofold<D> a, Twofold<D> b) {
  const Twofold<D> p = product(a.high, b.high);
  return {p.high, p.low + fma(a.high, b.low, a.low * b.high)};
}
template <DoubleNumber D>
constexpr D rounded(Twofold<D> x) {
  return x.high + x.low;
}

// ---- logarithm and power ----

/// log((1+s)/(1-s)) = 2s + s z (2/3 + z Q(z)) for z = s^2 below 0.0295: Q.
template <DoubleNumber D>
constexpr D log_far_tail(D z) {
  return horner(z, 0.4, 0.28571428571428564, 0.2222222222222847, 0.1818181817964499, 0.1538461576290815,
                0.13333296397963834, 0.11766819021629554, 0.10456195110401492, 0.1076362151501126);
}

/// Natural logarithm within 2^-63 of itself; x is not negative.
template <DoubleNumber D>
constexpr Twofold<D> log_of(D x) {
  using F = Format<D>;
  using Int = typename F::Int;
  using Limits = std::numeric_limits<double>;
  using Wrapping = typename F::Unsigned;  // the differences of negative inputs overflow and are not used
  const auto subnormal = x < D(Limits::min());
  const auto bits = std::bit_cast<Wrapping>(where(subnormal, x * D(0x1p52), x));
  const auto e = std::bit_cast<Int>(bits - Wrapping(F::sqrt_half)) >> F::mantissa;
  const D f = std::bit_cast<D>(bits - (std::bit_cast<Wrapping>(e) << F::mantissa)) - D(1);
  const D k = from_integer<D>(e) - where(subnormal, D(52), D(0));
  const Twofold<D> under = ordered_sum(D(2), f);
  const D inverse = D(1) / under.high, s = f * inverse;
  const D s_low = fma(-s, under.low, fma(-s, under.high, f)) * inverse;
  Twofold<D> z = product(s, s);
  z.low = fma(D(2) * s, s_low, z.low);
  const Twofold<D> third = ordered_sum(D(0x1.5555555555555p-1), z.high * log_far_tail(z.high));
  const Twofold<D> tail = product(z, Twofold<D>{third.high, third.low + D(0x1.5555555555555p-55)});
  const Twofold<D> rest = product(Twofold<D>{s, s_low}, tail);
  const Twofold<D> near_one = ordered_sum(D(2) * s, rest.high);
  // ln 2 in two parts, of which the first times k is exact.
  const Twofold<D> y = ordered_sum(k * D(0x1.62e42fefa3800p-1), near_one.high);
  const D low = fma(k, D(0x1.ef35793c76730p-45), near_one.low + fma(D(2), s_low, rest.low));
  const Twofold<D> both = ordered_sum(y.high, y.low + low);
  const D at_end = where(x == D(0), D(-Limits::infinity()), x);
  const auto inside = (x > D(0)) & (x < D(Limits::infinity()));
  return {where(inside, both.high, at_end), where(inside, both.low, D(0))};
}

/// y times a logarithm.
template <DoubleNumber D>
constexpr Twofold<D> product_of_log(D y, Twofold<D> log) {
  const Twofold<D> p = product(y, log.high);
  const auto finite = fabs(p.high) < D(1000);  // no more is asked of `exp_of`
  return {p.high, where(finite, fma(y, log.low, p.low), D(0))};
}

/// (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2, a minimax fit.
template <DoubleNumber D>
constexpr D exp_tail(D r) {
  return horner(r, 0.5000000000000011, 0.16666666666666424, 0.04166666666653041, 0.008333333333485978,
                0.0013888888943577257, 0.00019841269525330447, 2.4801493155084117e-05, 2.7557569628739367e-06,
                2.7630225945857e-07, 2.5005301309803347e-08);
}

/// e^rest 2^n, within 0.51 ulp.
template <DoubleNumber D>
constexpr D scaled_exp(Twofold<D> rest, typename Format<D>::Int n) {
  const D r = rest.high;
  const Twofold<D> y = ordered_sum(D(1), r);
  const D tail = fma(r * r, exp_tail(r), fma(rest.low, r, rest.low));
  // Two factors, because 2^n alone leaves the range of normal numbers at both ends.
  return (y.high + (y.low + tail)) * pow2<D>(n >> 1) * pow2<D>(n - (n >> 1));
}
/// e^x, times 2^`doublings`.
template <DoubleNumber D>
constexpr D exp_of(Twofold<D> x, std::int64_t doublings = 0) {
  using F = Format<D>;
  const D low = where(x.high < D(F::exp_min), D(F::exp_min), x.high);
  const D z = where(low > D(711), D(711), low);
  const D shifted = fma(z, D(1.4426950408889634), D(F::round));
  const D n = shifted - D(F::round);
  const Twofold<D> rest = sum(fma(n, D(-F::ln2_hi), z), n * D(-F::ln2_lo));
  return scaled_exp(sum(rest.high, rest.low + x.low), low_bits(shifted) + typename F::Int(doublings));
}

// ---- angles ----

/// What is left of an angle after whole quarters of a turn, and their number.
template <DoubleNumber D>
struct Quarters {
  Twofold<D> rest;
  typename Format<D>::Int count;
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

/// Whether an angle is finite and so large that two parts of it are too few.
template <DoubleNumber D>
constexpr auto is_large(D a) {
  return (a >= D(0x1p29)) & (a < D(std::numeric_limits<double>::infinity()));
}
/// What `remainder_of_large` gives in place of what is not right for so large an angle.
constexpr void replace_large(Quarters<double>& of, double a) { of = remainder_of_large(a); }

/// Of a >= 0. NaN for what is not finite.
template <DoubleNumber D>
constexpr Quarters<D> remainder_of(D a) {
  const D round(Format<D>::round);
  const D shifted = fma(a, D(0x1.45f306dc9c883p-1), round);
  const D n = shifted - round;
  // pi/2 in three parts; what the first leaves is exact.
  const D left = fma(-n, D(0x1.921fb54442d18p+0), a);
  const Twofold<D> second = product(n, D(0x1.1a62633145c07p-54)), rest = sum(left, -second.high);
  const D low = fma(n, D(0x1.f1976b7ed8fbcp-110), rest.low - second.low);
  Quarters<D> of{ordered_sum(rest.high, low), std::bit_cast<typename Format<D>::Int>(shifted)};
  if (any(is_large(a))) replace_large(of, a);
  return of;
}

template <DoubleNumber D>
struct SineAndCosine {
  D sine, cosine;
};
/// Of an angle of at most an eighth of a turn, within 0.6 ulp; minimax fits.
template <DoubleNumber D>
constexpr SineAndCosine<D> sine_and_cosine(Twofold<D> angle) {
  const D r = angle.high, z = r * r;
  const D s =
      horner(z, -0.16666666666666666, 0.008333333333333331, -0.00019841269841265017, 2.7557319219301936e-06,
             -2.5052106219528367e-08, 1.6058529573291737e-10, -7.586576648405261e-13);
  const D c =
      horner(z, 0.041666666666666664, -0.0013888888888888887, 2.4801587301584618e-05, -2.7557319221382125e-07,
             2.0876755783897636e-09, -1.1470459750244853e-11, 4.74580492324984e-14);
  const D half = D(0.5) * z, most = D(1) - half;
  const D sine = r + fma(angle.low, most, r * z * s);
  const D cosine = most + (((D(1) - most) - half) + fma(z * z, c, -r * angle.low));
  return {sine, cosine};
}
/// The sine of an angle, or its cosine: that of `more` more quarters of a turn.
template <DoubleNumber D>
constexpr D sine_of(Quarters<D> angle, std::int64_t more) {
  using Int = typename Format<D>::Int;
  const SineAndCosine<D> of = sine_and_cosine(angle.rest);
  const Int quadrant = angle.count + Int(more);
  const D y = where((quadrant & Int(1)) != Int(0), of.cosine, of.sine);
  return where((quadrant & Int(2)) != Int(0), -y, y);
}

/// The angle of (x, y), within 1 ulp.
template <DoubleNumber D>
constexpr D angle_of(D y, D x) {
  const D infinity(std::numeric_limits<double>::infinity());
  const D a = fabs(y), b = fabs(x);
  const auto steep = a > b;
  const D smaller = where(steep, b, a), larger = where(steep, a, b);
  // Sums of the largest numbers stay finite.
  const D scale = where(larger > D(0x1p1000), D(0.25), D(1)), low = smaller * scale, high = larger * scale;
  // Beyond a sixteenth of a turn what lies beyond the eighth, of the same sign as it is.
  const auto wide = (low > high * D(0.41421356237309503)) | (low == infinity);
  const Twofold<D> less = sum(low, -high), both = ordered_sum(high, low);
  const auto plain = (high > D(0)) & (low < high) & (high < infinity);  // else 0, or the eighth itself
  const D n = where(wide, less.high, low), n_low = where(wide, less.low, D(0));
  const D d = where(wide, both.high, high), d_low = where(wide, both.low, D(0));
  const D over = where(plain, n, D(0)), under = where(plain, d, D(1));
  const D q = over / under;
  const D left = fma(-q, where(plain, d_low, D(0)), fma(-q, under, over) + where(plain, n_low, D(0)));
  const D q_low = left / under;
  // (atan(q)/q - 1) / q^2 in z = q^2, a minimax fit.
  const D z = q * q;
  const D tail = horner(z, -0.3333333333333333, 0.19999999999999993, -0.1428571428571149, 0.11111111110751482,
                        -0.0909090906681608, 0.07692306729194896, -0.06666641869131183, 0.058819230561140225,
                        -0.05258020272656758, 0.04719259188242093, -0.04103887546862687, 0.030622995553735516,
                        -0.013905374533113234);
  const D rest = fma(q * z, tail, q_low);
  // Eighths of a turn, to which the rest is added or from which it is taken.
  const D near = where(wide, D(1), D(0)), up = where(steep, D(2) - near, near);
  const D direction = copysign(D(1), x);
  const D eighths = where(direction < D(0), D(4) - up, up), sign = where(steep, D(-1), D(1)) * direction;
  const Twofold<D> angle = ordered_sum(eighths * D(0x1.921fb54442d18p-1), sign * q);  // exact products
  const D result = angle.high + (angle.low + fma(eighths, D(0x1.1a62633145c07p-55), sign * rest));
  const auto ordered = (a >= b) | (a < b);
  return copysign(where(ordered, result, x + y), y);
}

}  // namespace sherd::math::detail
