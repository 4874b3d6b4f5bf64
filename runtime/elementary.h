// Elementary functions beyond those of runtime/math.h, in the same manner: within 1 ulp, unless it is said
// otherwise.
#pragma once

#include "runtime/math.h"
#include "runtime/wrapping.h"

namespace sherd::math {
namespace detail {

/// `quarters` of a turn, 0, 1 or 2, and `times` the angle, -2, -1, 1 or 2.
template <class T>
constexpr T turned_by(T quarters, T times, Twofold<T> angle) {
  using F = Format<T>;
  const Twofold<T> both = ordered_sum(quarters * T(F::quarter[0]), times * angle.high);
  return both.high + (both.low + fma(quarters, T(F::quarter[1]), times * angle.low));
}

/// A base of logarithms, by those of 2 and of e: `high` of the first is exact times an exponent.
template <class T>
struct Base {
  Twofold<T> of_two, of_e;
};
/// log(1 + f) of a `Split`.
template <DoubleNumber T>
constexpr Twofold<T> log_of_mantissa(T f) {
  return log_beyond_one(f, T(0));
}
template <SingleNumber T>
constexpr Twofold<T> log_of_mantissa(T f) {
  return ordered_sum(f, rest_of_log(f));
}
/// log(x) to a base; exact where that is a number.
template <class T>
constexpr T log_to_base(T x, Base<T> base) {
  const Split<T> of = split(x);
  const Twofold<T> part = product(log_of_mantissa(of.beyond_one), base.of_e);
  const Twofold<T> both = ordered_sum(of.exponent * base.of_two.high, part.high);
  return with_edges_of_log(both.high + (both.low + fma(of.exponent, base.of_two.low, part.low)), x);
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

template <class T>
constexpr T exp2(T x) {
  using F = detail::Format<T>;
  const T least(F::exp_min * 1.4453125f), most(F::half_exp_max * 1.4453125f);  // times log2(e) and a little
  const T low = where(x < least, least, x), z = where(low > most, most, low);
  const T shifted = z + T(F::round), rest = z - (shifted - T(F::round));
  const auto ln2 = detail::constant<T>(0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56);
  const auto r = detail::product(rest, ln2.high);
  return detail::scaled_exp(detail::Twofold<T>{r.high, fma(rest, ln2.low, r.low)}, detail::low_bits(shifted))
      .high;
}
template <class T>
constexpr T log2(T x) {
  const auto e = detail::constant<T>(0x1.71547652b82fep+0, 0x1.777d0ffda0d24p-56);
  return detail::log_to_base(x, detail::Base<T>{{T(1), T(0)}, e});
}
template <class T>
constexpr T log10(T x) {
  using F = detail::Format<T>;
  const auto e = detail::constant<T>(0x1.bcb7b1526e50ep-2, 0x1.95355baaafad3p-57);
  return detail::log_to_base(x, detail::Base<T>{{T(F::short_log10_2), T(F::log10_2_rest)}, e});
}

/// Radians, of any size.
template <DoubleNumber T>
constexpr T tan(T x) {
  using Int = typename detail::Format<T>::Int;
  using detail::Twofold;
  const detail::Quarters<T> angle = detail::remainder_of(fabs(x));
  const detail::SineAndCosine<T> of = detail::sine_and_cosine(angle.rest);
  const auto odd = (angle.count & Int(1)) != Int(0);
  const Twofold<T> over{where(odd, -of.cosine.high, of.sine.high), where(odd, -of.cosine.low, of.sine.low)};
  const Twofold<T> under{where(odd, of.sine.high, of.cosine.high), where(odd, of.sine.low, of.cosine.low)};
  // 0 has no rest that would take its sign, nor what is infinite.
  const Twofold<T> y = detail::quotient(over, under);
  return detail::signed_as(y.high + where(y.low == y.low, y.low, T(0)), x);
}
template <SingleNumber T>
constexpr T tan(T x) {
  using Int = typename detail::Format<T>::Int;
  const detail::Quarters<T> angle = detail::remainder_of(fabs(x));
  const T r = angle.rest.high, z = r * r;
  // A minimax fit up to an eighth of a turn.
  const T tail = detail::horner(z, 0.333333522f, 0.133325741f, 0.0540702045f, 0.0212288219f, 0.0109741436f,
                                -8.5543732e-05f, 0.00446246285f);
  const detail::Twofold<T> y =
      detail::ordered_sum(r, fma(r * z, tail, fma(angle.rest.low, z, angle.rest.low)));
  const auto odd = (angle.count & Int(1)) != Int(0);
  const T inverse = T(-1) / where(odd, y.high, T(1));
  const T turned = fma(fma(inverse, y.high, T(1)) + inverse * y.low, inverse, inverse);
  return detail::signed_as(where(odd, turned, y.high + y.low), x);
}
/// The angle of (x, y), from -pi to pi.
template <class T>
constexpr T atan2(T y, T x) {
  return detail::angle_of(y, x);
}
template <DoubleNumber T>
constexpr T atan(T x) {
  return detail::angle_of(x, T(1));
}
template <SingleNumber T>
constexpr T atan(T x) {
  const T size = fabs(x), a = where(size > T(0x1p60), T(0x1p60), size);
  const auto steep = a > T(1);
  const T over = where(steep, T(1), a), under = where(steep, a, T(1)), q = over / under;
  const T z = q * q;
  // A minimax fit up to 1, and what rounding took from a quotient, which is 1 / a.
  const T tail =
      detail::horner(z, -0.333333284f, 0.199997216f, -0.142804697f, 0.110622779f, -0.0882595032f,
                     0.0677484572f, -0.0451515652f, 0.0229279809f, -0.00749891484f, 0.00114969478f);
  const T rest = fma(q, z * tail, fma(-q, under, over) * q);
  return copysign(detail::turned_by(where(steep, T(1), T(0)), where(steep, T(-1), T(1)), {q, rest}), x);
}
namespace detail {

/// sqrt(1 - x^2).
template <DoubleNumber D>
constexpr D other_side(D x) {
  const Twofold<D> square = product(x, x), rest = ordered_sum(D(1), -square.high);
  return sqrt(rest.high + (rest.low - square.low));
}

/// The angle of the sine a, or half the angle of the cosine where a is large.
template <SingleNumber T>
constexpr Twofold<T> arc(T a, auto large) {
  const T z = where(large, fma(T(-0.5), a, T(0.5)), a * a);
  const Twofold<T> side = root(Twofold<T>{z, T(0)});
  const T r = where(large, side.high, a), low = where(large, side.low, T(0));
  // A minimax fit of (asin(r)/r - 1) / z.
  const T tail =
      horner(z, 0.166666597f, 0.075005196f, 0.0445141383f, 0.0318303518f, 0.0143557088f, 0.0376296677f);
  return {r, fma(r * z, tail, low)};
}

}  // namespace detail

/// NaN outside [-1, 1].
template <SingleNumber T>
constexpr T asin(T x) {
  const T a = fabs(x);
  const auto large = a > T(0.5);
  return copysign(
      detail::turned_by(where(large, T(1), T(0)), where(large, T(-2), T(1)), detail::arc(a, large)), x);
}
template <DoubleNumber T>
constexpr T asin(T x) {
  return detail::angle_of(x, detail::other_side(x));
}
template <SingleNumber T>
constexpr T acos(T x) {
  const T a = fabs(x);
  const auto large = a > T(0.5), back = x < T(0);
  const T quarters = where(large, where(back, T(2), T(0)), T(1)), times = where(large, T(2), T(-1));
  return detail::turned_by(quarters, where(back, -times, times), detail::arc(a, large));
}
template <DoubleNumber T>
constexpr T acos(T x) {
  return detail::angle_of(detail::other_side(x), x);
}

namespace detail {

/// (sinh(x)/x - 1) / x^2 in z = x^2, for |x| <= 1.
template <SingleNumber T>
constexpr T sinh_tail(T z) {
  return horner(z, 0.166666672f, 0.00833331142f, 0.000198426351f, 2.78392508e-06f);
}
template <DoubleNumber T>
constexpr T sinh_tail(T z) {
  return horner(z, 0.16666666666666666, 0.008333333333333333, 1.984126984126984e-04, 2.7557319223985893e-06,
                2.505210838544172e-08, 1.6059043836821613e-10, 7.647163731819816e-13, 2.8114572543455206e-15,
                8.22063524662433e-18);
}

}  // namespace detail

template <class T>
constexpr T sinh(T x) {
  const T a = fabs(x), z = x * x;
  const T small = fma(a * z, detail::sinh_tail(z), a);
  // Half of e^a, which is finite where the result is.
  const auto half = detail::exp_of(detail::Twofold<T>{a, T(0)}, -1);
  const auto large = detail::ordered_sum(half.high, T(-0.25) / half.high);
  const T rest = large.low + half.low;
  return copysign(where(a < T(1), small, large.high + where(rest == rest, rest, T(0))), x);
}
template <class T>
constexpr T cosh(T x) {
  const auto half = detail::exp_of(detail::Twofold<T>{fabs(x), T(0)}, -1);
  const auto all = detail::ordered_sum(half.high, T(0.25) / half.high);
  const T rest = all.low + half.low;
  return all.high + where(rest == rest, rest, T(0));
}
/// log(1 + (|x| + sqrt(1 + x^2) - 1)), of which what follows |x| is less than it; within 1.5 ulp.
template <class T>
constexpr T asinh(T x) {
  using F = detail::Format<T>;
  using detail::Twofold;
  const T a = fabs(x);
  const auto steep = a > T(F::steep);
  const T near = where(steep, T(1), a), square = near * near;
  const Twofold<T> beyond_one = detail::ordered_sum(near, square / (sqrt(T(1) + square) + T(1)));
  const Twofold<T> all = detail::sum(T(1), beyond_one.high);
  const Twofold<T> of{where(steep, a, all.high), where(steep, T(0), all.low + beyond_one.low)};
  return copysign(detail::rounded_log(of, where(steep, T(1), T(0))), x);
}
/// log(1 + (y + sqrt(y^2 + 2y))) of y = x - 1, within 1.7 ulp; NaN below 1.
template <class T>
constexpr T acosh(T x) {
  using F = detail::Format<T>;
  using detail::Twofold;
  const auto steep = x > T(F::steep);
  const T y = where(steep, T(1), x) - T(1);
  const Twofold<T> beyond_one = detail::ordered_sum(sqrt(fma(y, y, y + y)), y);
  const Twofold<T> all = detail::sum(T(1), beyond_one.high);
  const Twofold<T> of{where(steep, x, all.high), where(steep, T(0), all.low + beyond_one.low)};
  return where(x >= T(1), detail::rounded_log(of, where(steep, T(1), T(0))),
               T(std::numeric_limits<element_t<T>>::quiet_NaN()));
}
/// NaN outside [-1, 1].
template <class T>
constexpr T atanh(T x) {
  using detail::Twofold;
  const T a = fabs(x), z = x * x;
  // Half the logarithm of (1 + a) / (1 - a), of which the series is one in a itself.
  const T small = fma(a * z, fma(z, T(0.5) * detail::log_far_tail(z), T(1.0 / 3)), a);
  const Twofold<T> ratio = detail::quotient(detail::ordered_sum(T(1), a), detail::ordered_sum(T(1), -a));
  const T log = detail::rounded_log(Twofold<T>{ratio.high, where(ratio.low == ratio.low, ratio.low, T(0))});
  const T large = where(a <= T(1), T(0.5) * log, T(std::numeric_limits<element_t<T>>::quiet_NaN()));
  return copysign(where(a < T(0.17), small, large), x);
}

namespace detail {

template <DoubleNumber T>
constexpr T rest_of(T a, T b) {
  return fmod(a, b);
}
/// In double, where each step takes 2^51 off a quotient, which is below 2^277: what is left of a float by a
/// float is exact, since quotients have fewer bits than a double.
template <SingleNumber T>
constexpr T rest_of_far(T a, T b) {
  using D = as_many_t<T, double>;
  const D x = to_double(a), y = to_double(b), inverse = D(1) / y;
  D rest = x;
  for (int i = 0; i < 6; ++i) rest = fma(-trunc(rest * inverse), y, rest);
  rest = rest + where(rest < D(0), y, D(0));  // the last quotient may be one off
  return to_single(rest - where(rest >= y, y, D(0)));
}
/// Of a quotient below 2^22 what is left is a float: `fma` rounds nothing.
template <SingleNumber T>
constexpr T rest_of(T a, T b) {
  const T infinity(std::numeric_limits<float>::infinity());
  const T x = fabs(a), size = fabs(b), y = where(size == infinity, T(1), size);
  const T quotient = trunc(where(size == infinity, T(0), x / y));
  T rest = fma(-quotient, y, x);
  rest = rest + where(rest < T(0), y, T(0));  // the quotient may be one off
  rest = rest - where((rest >= y) & (size != infinity), y, T(0));
  const auto far = !(quotient < T(0x1p22)) | !(x < infinity);
  if (any(far)) rest = where(far, rest_of_far(x, y), rest);
  return copysign(where(x < infinity, rest, x - x), a);
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
