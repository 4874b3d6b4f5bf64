// The rule by which values of several ranks become one; every back end that combines has it.
#pragma once

#include <cstdint>

namespace sherd {

/// How inputs of several ranks become one value. One rule on every transport: in rank order, in f32 for
/// floats of up to 32 bits, in f64 for f64, in the own type (wrapping) for integers; then, for an average,
/// one division by the number of ranks; then one rounding to the dtype.
struct ReduceOp {
  enum class Kind : std::uint8_t { sum, average, max, prescaled_sum };
  Kind kind = Kind::sum;
  float scale = 1;  ///< every input is multiplied by it first (`prescaled_sum` only)

  static ReduceOp sum() { return {}; }
  /// Floats only (DTypeError).
  static ReduceOp average() { return {Kind::average, 1}; }
  /// The largest; NaN where any rank has a NaN.
  static ReduceOp max() { return {Kind::max, 1}; }
  /// Floats only (DTypeError): the sum of `scale` times each input.
  static ReduceOp prescaled_sum(float scale) { return {Kind::prescaled_sum, scale}; }
  friend bool operator==(const ReduceOp&, const ReduceOp&) = default;
};

}  // namespace sherd
