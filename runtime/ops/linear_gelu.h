// A linear layer and its GELU as one op, so that the gradient of the bias is summed where that of GELU is
// made.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Inputs: x (..., in), weight (out, in), bias (out) or none. Outputs: gelu of the layer's result, and that
/// result for the gradient.
struct LinearGelu {
  static constexpr std::string_view name = "linear_gelu";
  static constexpr Arity arity = 3;
  static constexpr Mask optional = 0b100;

  /// All inputs: any gradient that is to be differentiated again depends on the layer's result.
  static Reads reads(Mask needs) { return {needs == 0 ? Mask{0} : Mask{0b111}, 0b10}; }
  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  bool operator==(const LinearGelu&) const = default;
};

/// Inputs: gradient of gelu(x) and x, (rows, columns) each. Outputs: the gradient of x, and its sums over
/// rows (columns).
struct GeluGradSums {
  static constexpr std::string_view name = "gelu_grad_sums";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  bool operator==(const GeluGradSums&) const = default;
};

}  // namespace sherd::ops
