// f16 and bf16 as storage types: two bytes that convert to and from float. Arithmetic happens in float.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "runtime/export.h"

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

}  // namespace detail

/// IEEE binary16. Conversions round to nearest, ties to even; NaN stays NaN, overflow goes to infinity.
struct SHERD_API Half {
  std::uint16_t bits = 0;

  constexpr Half() = default;
  constexpr explicit Half(float value) : bits(from_float(value)) {}
  template <detail::RoundedOnce N>
  constexpr explicit Half(N value) : Half(detail::odd_float(value)) {}
  constexpr explicit operator float() const { return to_float(bits); }
  static constexpr Half from_bits(std::uint16_t bits) {
    Half h;
    h.bits = bits;
    return h;
  }

 private:
  // Without branches, so that loops over halves vectorise (method: rescale by powers of two, F. Giesen).
  static constexpr float to_float(std::uint16_t h) {
    const std::uint32_t shifted = static_cast<std::uint32_t>(h & 0x7fffu) << 13;
    const float normal = std::bit_cast<float>(shifted) * std::bit_cast<float>(0x77800000u);  // times 2^112
    const std::uint32_t magnitude =
        (h & 0x7c00u) == 0x7c00u ? (shifted | 0x7f800000u) : std::bit_cast<std::uint32_t>(normal);
    return std::bit_cast<float>(magnitude | (static_cast<std::uint32_t>(h & 0x8000u) << 16));
  }
  static constexpr std::uint16_t from_float(float f) {
    const std::uint32_t x = std::bit_cast<std::uint32_t>(f);
    const std::uint32_t sign = (x >> 16) & 0x8000u;
    const std::uint32_t a = x & 0x7fffffffu;
    // Below 2^-14 the result is subnormal: adding 0.5 lets the float adder do the shift and the rounding.
    const std::uint32_t sub = std::bit_cast<std::uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3f000000u;
    const std::uint32_t norm = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
    const std::uint32_t special = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const std::uint32_t finite = a < 0x38800000u ? sub : norm;
    return static_cast<std::uint16_t>(sign | (a >= 0x47800000u ? special : finite));
  }
};

/// bfloat16: the upper half of a float. Conversion rounds to nearest, ties to even; NaN stays NaN, overflow
/// goes to infinity.
struct SHERD_API BFloat16 {
  std::uint16_t bits = 0;

  constexpr BFloat16() = default;
  constexpr explicit BFloat16(float value) : bits(from_float(value)) {}
  template <detail::RoundedOnce N>
  constexpr explicit BFloat16(N value) : BFloat16(detail::odd_float(value)) {}
  constexpr explicit operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  static constexpr BFloat16 from_bits(std::uint16_t bits) {
    BFloat16 h;
    h.bits = bits;
    return h;
  }

 private:
  static constexpr std::uint16_t from_float(float f) {
    const std::uint32_t x = std::bit_cast<std::uint32_t>(f);
    const std::uint32_t rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
    return static_cast<std::uint16_t>((x & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u | (x >> 16) : rounded);
  }
};

static_assert(sizeof(Half) == 2 && sizeof(BFloat16) == 2);

}  // namespace sherd
