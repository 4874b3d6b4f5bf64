// A gradient norm whose bits no order of summation changes, and clipping by it, over lists of tensors.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Largest absolute value of all inputs, f64 0-d: 0 for no elements, NaN when there is one.
struct LargestMagnitude {
  static constexpr std::string_view name = "largest_magnitude";
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  bool operator==(const LargestMagnitude&) const = default;
};

// The Euclidean norm of any number of tensors in two steps. Its bits do not depend on how elements are
// ordered or cut into tensors, of one floating dtype or several, and not on ranks either: between the steps
// sums meet by a sum.

/// Sum of the squares of all inputs without rounding, i64 (134), as `ExactSquares` lays it out. Sums add
/// element by element. Fewer than 2^32 elements in all.
struct SquareSums {
  static constexpr std::string_view name = "square_sums";
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  bool operator==(const SquareSums&) const = default;
};

/// The norm, f64 0-d, of the whole sum (i64 (134)): infinite or NaN if an element was.
struct NormOfSums {
  static constexpr std::string_view name = "norm_of_sums";
  static constexpr Arity arity = 1;
  static constexpr Mask dense = 1;
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  bool operator==(const NormOfSums&) const = default;
};

/// min(1, limit / (norm + 1e-6)), 0-d f64 as `norm` is.
SHERD_API Tensor clip_factor(const Tensor& norm, double limit);

/// `x` times a factor (0-d f64) as kernels clip it: in f64, then rounded to the type that `x` is computed in
/// and to its own.
Tensor times_factor(const Tensor& x, const Tensor& factor);

/// Multiplies inputs 1.. by min(1, limit / (input 0 + 1e-6)), input 0 being their norm (0-d, f64); by NaN
/// when that is one.
struct ClipScale {
  static constexpr std::string_view name = "clip_scale_";
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr bool differentiable = false;
  double limit = 1;

  bool writes(std::size_t i) const { return i >= 1; }
  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { on("limit", limit); }
  bool operator==(const ClipScale&) const = default;
};

}  // namespace sherd::ops
