// What the elementary functions of runtime/math.h are made of.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace sherd::math {

/// `c ? a : b`, both sides evaluated.
template <class T>
constexpr T where(bool c, T a, T b) {
  return c ? a : b;
}

namespace detail {

template <class T>
struct Format;
template <>
struct Format<float> {
  using Int = std::int32_t;
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float round = 0x1.8p23f;  // adding it rounds to an integer and leaves that in the low bits
  static constexpr float ln2_hi = 0x1.62e43p-1f, ln2_lo = -0x1.05c61p-29f;
  static constexpr float exp_min = -104.f, exp_max = 89.f;
  static constexpr Int sqrt_half = 0x3f3504f3;
};
template <>
struct Format<double> {
  using Int = std::int64_t;
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double round = 0x1.8p52;
  static constexpr double ln2_hi = 0x1.62e42fefa39efp-1, ln2_lo = 0x1.abc9e3b39803fp-56;
  static constexpr double exp_min = -746., exp_max = 710.;
  static constexpr Int sqrt_half = 0x3fe6a09e667f3bcd;
};

template <class T>
constexpr T horner(T, T c) {
  return c;
}
template <class T, class... C>
constexpr T horner(T x, T c, C... higher) {
  return std::fma(x, horner(x, T(higher)...), c);
}

template <class T>
constexpr T pow2(typename Format<T>::Int k) {
  return std::bit_cast<T>((k + Format<T>::bias) << Format<T>::mantissa);
}

/// A small integer as a number. AVX2 has no conversion of 64 bits, and no vector is made of a loop with one.
template <class T>
constexpr T from_integer(typename Format<T>::Int k) {
  using F = Format<T>;
  return std::bit_cast<T>(static_cast<typename F::Int>(std::bit_cast<typename F::Int>(F::round) + k)) -
         F::round;
}

}  // namespace detail
}  // namespace sherd::math
