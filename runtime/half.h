// f16 and bf16 as storage types: two bytes that convert to and from float. Arithmetic happens in float.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "runtime/export.h"
#include "runtime/math_steps.h"

namespace sherd {

namespace detail {

/// `x` rounded to odd: the float below or above it whose last bit is 1, unless it is a float itself. Rounded
/// on to 16 bits that is `x` rounded once, since what was cut off stays visible (Boldo and Melquiond, 2005).
constexpr float odd_float(double x) {
  const auto nearest = static_cast<float>(x);
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  const double is = nearest < 0 ? -static_cast<double>(nearest) : static_cast<double>(nearest);
  const double wanted = x < 0 ? -x : x;
  const std::uint32_t step =
      static_cast<std::uint32_t>(is < wanted) - static_cast<std::uint32_t>(is > wanted);
  return std::bit_cast<float>((bits & 1u) == 0 ? bits + step : bits);
}
template <class N>
  requires(std::is_integral_v<N>)
constexpr float odd_float(N x) {
  if constexpr (sizeof(N) < 4) {
    return static_cast<float>(x);
  } else if constexpr (sizeof(N) == 4) {
    return odd_float(static_cast<double>(x));
  } else {
    // Beyond 2^53 the last bits become one, far below the last of a float.
    constexpr N exact = N{1} << 53, cut = 0x7ff;
    const bool fits = x < exact && (!std::is_signed_v<N> || x > -exact);
    const N odd = (x & cut) == 0 ? x : static_cast<N>((x & ~cut) | (cut + 1));
    return odd_float(static_cast<double>(fits ? x : odd));
  }
}
/// A number of which 16 bits are made by rounding, but a float.
template <class N>
concept RoundedOnce = std::is_same_v<N, double> || std::is_integral_v<N>;

// The bits of 16-bit floats as those of f32, and back. `U` is an unsigned integer of 32 bits, or lanes of
// them.

/// Method: rescale by powers of two (F. Giesen).
template <class U>
constexpr U f32_of_f16(U half) {
  using math::where;
  using F = math::as_many_t<U, float>;
  const U shifted = (half & U(0x7fffu)) << 13;
  const F normal = std::bit_cast<F>(shifted) * F(0x1p112f);
  const U magnitude =
      where((half & U(0x7c00u)) == U(0x7c00u), shifted | U(0x7f800000u), std::bit_cast<U>(normal));
  return magnitude | ((half & U(0x8000u)) << 16);
}
template <class U>
constexpr U f16_of_f32(U x) {
  using math::where;
  using F = math::as_many_t<U, float>;
  const U sign = (x >> 16) & U(0x8000u), a = x & U(0x7fffffffu);
  // Below 2^-14 the result is subnormal: adding 0.5 lets the float adder do the shift and the rounding.
  const U sub = std::bit_cast<U>(std::bit_cast<F>(a) + F(0.5f)) - U(0x3f000000u);
  const U norm = (a - U(0x38000000u) + U(0xfffu) + ((a >> 13) & U(1u))) >> 13;
  const U special = where(a > U(0x7f800000u), U(0x7e00u), U(0x7c00u));
  const U finite = where(a < U(0x38800000u), sub, norm);
  return sign | where(a >= U(0x47800000u), special, finite);
}
template <class U>
constexpr U f32_of_bf16(U half) {
  return half << 16;
}
template <class U>
constexpr U bf16_of_f32(U x) {
  using math::where;
  const U rounded = (x + U(0x7fffu) + ((x >> 16) & U(1u))) >> 16;
  return where((x & U(0x7fffffffu)) > U(0x7f800000u), U(0x7fc0u) | (x >> 16), rounded);
}

}  // namespace detail

/// IEEE binary16. Conversions round to nearest, ties to even; NaN stays NaN, overflow goes to infinity.
struct SHERD_API Half {
  std::uint16_t bits = 0;

  constexpr Half() = default;
  constexpr explicit Half(float value)
      : bits(static_cast<std::uint16_t>(detail::f16_of_f32(std::bit_cast<std::uint32_t>(value)))) {}
  template <detail::RoundedOnce N>
  constexpr explicit Half(N value) : Half(detail::odd_float(value)) {}
  constexpr explicit operator float() const {
    return std::bit_cast<float>(detail::f32_of_f16<std::uint32_t>(bits));
  }
  static constexpr Half from_bits(std::uint16_t bits) {
    Half h;
    h.bits = bits;
    return h;
  }
};

/// bfloat16: the upper half of a float. Conversion rounds to nearest, ties to even; NaN stays NaN, overflow
/// goes to infinity.
struct SHERD_API BFloat16 {
  std::uint16_t bits = 0;

  constexpr BFloat16() = default;
  constexpr explicit BFloat16(float value)
      : bits(static_cast<std::uint16_t>(detail::bf16_of_f32(std::bit_cast<std::uint32_t>(value)))) {}
  template <detail::RoundedOnce N>
  constexpr explicit BFloat16(N value) : BFloat16(detail::odd_float(value)) {}
  constexpr explicit operator float() const {
    return std::bit_cast<float>(detail::f32_of_bf16<std::uint32_t>(bits));
  }
  static constexpr BFloat16 from_bits(std::uint16_t bits) {
    BFloat16 h;
    h.bits = bits;
    return h;
  }
};

static_assert(sizeof(Half) == 2 && sizeof(BFloat16) == 2);

}  // namespace sherd
