// Sums of squares without rounding: as integers, to which no order of addition makes a difference. Shared by
// the CPU and by device code.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "runtime/half.h"

namespace sherd {

/// A sum of squares of finite doubles is limbs[i] 2^(32 i - 2176), i below 132: room for the squares of the
/// smallest and of the largest. A limb has 64 bits for what 2^32 squares add to it. Behind them stand the
/// number of infinities and of NaNs. Sums add limb by limb.
struct ExactSquares {
  static constexpr int digits = 132, infinities = digits, nans = digits + 1, limbs = digits + 2;
  static constexpr int lowest = -2176;  ///< the exponent of the lowest bit
};

/// Calls `add(limb, value)` so that `value` 2^`exponent` is added; within range of the sum.
template <class Add>
constexpr void add_scaled(std::uint64_t value, int exponent, const Add& add) {
  const int place = exponent - ExactSquares::lowest, shift = place % 32;
  int limb = place / 32;
  // 64 bits lie across three limbs.
  const std::uint64_t low = (value & 0xffffffffu) << shift, high = (value >> 32) << shift;
  const std::uint64_t parts[] = {low & 0xffffffffu, (low >> 32) + (high & 0xffffffffu), high >> 32};
  for (const std::uint64_t part : parts) {
    if (part != 0) add(limb, part);
    ++limb;
  }
}

/// The same for the square of `x`.
template <class Add>
constexpr void add_square(double x, const Add& add) {
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x) << 1 >> 1;
  if (bits == 0) return;
  const std::uint64_t fraction = bits & 0xfffffffffffffu;
  const int raised = static_cast<int>(bits >> 52);
  if (raised == 0x7ff) return add(fraction == 0 ? ExactSquares::infinities : ExactSquares::nans, 1);
  const std::uint64_t mantissa = raised == 0 ? fraction : fraction | 0x10000000000000u;
  const int exponent = raised == 0 ? -1074 : raised - 1075;
  // (high 2^27 + low)^2, whose terms have at most 54 bits.
  const std::uint64_t high = mantissa >> 27, low = mantissa & 0x7ffffffu;
  add_scaled(high * high, 2 * exponent + 54, add);
  if (low == 0) return;  // all that came from f32
  add_scaled(2 * high * low, 2 * exponent + 27, add);
  add_scaled(low * low, 2 * exponent, add);
}

/// Bits of a magnitude, the leading one counted.
template <class T>
inline constexpr int mantissa_bits = std::numeric_limits<T>::digits;
template <>
inline constexpr int mantissa_bits<Half> = 11;
template <>
inline constexpr int mantissa_bits<BFloat16> = 8;

/// How squares of a piece of at most 2048 elements are summed without rounding in 32 or more numbers of f64,
/// 64 in each, where the largest magnitude is in [2^top, 2^(top+1)) and magnitudes have `Mantissa` bits.
/// Those from `least` on are split at the grid 2^`high`, by adding and subtracting `splitter`: what lies on
/// the grid sums exactly, and so does what lies below it, of which there is none for up to 16 bits. Smaller
/// ones but 0 are left for `add_square`.
template <int Mantissa>
struct SquaresGrid {
  static constexpr bool split = Mantissa > 16;
  static constexpr int below_grid = 48;

  int high;                          ///< the sums are integers times 2^high, and times 2^(high - below_grid)
  double splitter, to_high, to_low;  ///< the last two make those integers of them
  double least;

  constexpr explicit SquaresGrid(int top)
      : high(2 * top - 45),
        splitter(1.5 * power(52 + high)),
        to_high(power(-high)),
        to_low(power(below_grid - high)),
        least(power(top - (split ? 23 : (45 - 2 * (Mantissa - 1)) / 2))) {}
  /// Where the largest magnitude is `x`, which is neither 0 nor infinite.
  constexpr static SquaresGrid of(double x) {
    return SquaresGrid(static_cast<int>(std::bit_cast<std::uint64_t>(x) >> 52) - 1023);
  }

  /// Adds the sums of the piece, of all its numbers as integers.
  template <class Add>
  constexpr void finish(std::int64_t above, std::int64_t below, const Add& add) const {
    const std::int64_t carry =
        below >> below_grid;  // towards minus infinity: what lies below may be negative
    add_scaled(static_cast<std::uint64_t>(above + carry), high, add);
    add_scaled(static_cast<std::uint64_t>(below - carry * (std::int64_t{1} << below_grid)), high - below_grid,
               add);
  }

 private:
  /// 2^exponent, of the normal numbers.
  static constexpr double power(int exponent) {
    return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
  }
};

/// A sum of finite squares as digits of 32 bits each, the lowest first; there is one for each such number.
struct SquareDigits {
  std::uint32_t at[ExactSquares::digits + 1] = {};

  constexpr explicit SquareDigits(const std::int64_t* limbs) {
    std::uint64_t carry = 0;
    for (int i = 0; i <= ExactSquares::digits; ++i) {
      if (i < ExactSquares::digits) carry += static_cast<std::uint64_t>(limbs[i]);
      at[i] = static_cast<std::uint32_t>(carry);
      carry >>= 32;
    }
  }
  bool operator==(const SquareDigits&) const = default;
};

/// The square root of a sum, rounded twice: as a number of f64, and as its root. NaN if there was one, else
/// infinity if there was one.
constexpr double root_of(const std::int64_t* limbs) {
  if (limbs[ExactSquares::nans] != 0) return std::numeric_limits<double>::quiet_NaN();
  if (limbs[ExactSquares::infinities] != 0) return std::numeric_limits<double>::infinity();
  const SquareDigits digits(limbs);
  int top = ExactSquares::digits;  // the first that is not 0
  while (top >= 0 && digits.at[top] == 0) --top;
  if (top < 0) return 0;
  const auto at = [&](int i) { return i < 0 ? std::uint32_t{0} : digits.at[i]; };
  // The first 64 bits, the last of them 1 if anything follows: rounding to 53 needs to know no more.
  std::uint64_t bits = std::uint64_t{at(top)} << 32 | at(top - 1);
  int zeros = 0;  // std::countl_zero is 64 of anything in nvcc's device code
  while (bits << zeros >> 63 == 0) ++zeros;
  const std::uint64_t next = std::uint64_t{at(top - 2)} << zeros;
  bits = bits << zeros | next >> 32;
  bool more = static_cast<std::uint32_t>(next) != 0;
  for (int i = 0; i < top - 2; ++i) more = more || digits.at[i] != 0;
  auto sum = static_cast<double>(bits | (more ? 1 : 0));
  int exponent = 32 * (top - 1) - zeros + ExactSquares::lowest;
  if (exponent % 2 != 0) {
    sum *= 2;
    --exponent;
  }
  return std::ldexp(std::sqrt(sum), exponent / 2);
}

}  // namespace sherd
