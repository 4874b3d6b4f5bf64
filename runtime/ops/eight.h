// Formats of 8 bits, and what numbers are scaled by to fill them. Safe to include in device code.
#pragma once

namespace sherd::ops {

/// Formats of 8 bits; named by their bits of exponent and mantissa.
enum class Eight { e4m3, e5m2 };
constexpr double largest_of(Eight format) { return format == Eight::e4m3 ? 448 : 57344; }

/// The largest magnitude that numbers are scaled by so that it becomes `top`: `largest`, but no smaller than
/// leaves the factor and its inverse normal numbers of f32. Zeros stay zeros, where infinity would make NaN
/// of them.
constexpr double scalable(double largest, double top) {
  const double least = top * 0x1p-126;
  return largest < least ? least : largest;
}

}  // namespace sherd::ops
