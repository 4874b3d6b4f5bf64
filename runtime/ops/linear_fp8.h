// A linear layer whose products are taken of 8-bit numbers (Micikevicius et al., 2022).
#pragma once

#include "runtime/op.h"
#include "runtime/ops/eight.h"

namespace sherd::ops {

/// Inputs: x (..., in), weight (out, in), bias (out) or none. x and weight are rounded to e4m3, each after
/// scaling its largest magnitude, or that of each of its rows, to the format's; sums are in f32. Outputs: the
/// result, and, unless rows are scaled, the largest magnitudes of x and weight (0-d, f64) for the gradient.
struct LinearFp8 {
  static constexpr std::string_view name = "linear_fp8";
  static constexpr Arity arity = 3;
  static constexpr Mask optional = 0b100;
  static constexpr Mask dense = 0b111;
  bool by_rows = false;

  Reads reads(Mask) const { return {0b11, by_rows ? Mask{0} : Mask{0b110}}; }
  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { on("by_rows", by_rows); }
  bool operator==(const LinearFp8&) const = default;
};

/// Inputs: gradient of the result (rows, out), which is rounded to e5m2, x (rows, in), weight, and the
/// largest magnitudes of these two. Outputs: gradients of x and weight. `by_rows`: every factor is rounded to
/// e4m3, by the largest magnitudes of what it is a row of a factor with: its rows, or its columns where the
/// product turns it.
struct LinearFp8Grad {
  static constexpr std::string_view name = "linear_fp8_grad";
  static constexpr Arity arity = 5;
  static constexpr Mask optional = 0b11000;
  static constexpr Mask dense = 0b11111;
  static constexpr bool differentiable = false;
  bool by_rows = false;

  Specs infer(SpecSpan in) const { return {in[1], in[2]}; }
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { on("by_rows", by_rows); }
  bool operator==(const LinearFp8Grad&) const = default;
};

}  // namespace sherd::ops
