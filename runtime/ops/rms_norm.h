// Normalisation by the root of the mean square over the last axis (Zhang and Sennrich, 2019).
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Inputs: x (..., n), weight (n) or none. Outputs: y, and each row's 1 / root of the mean square for the
/// gradient.
struct RmsNorm {
  static constexpr std::string_view name = "rms_norm";
  static constexpr Arity arity = 2;
  static constexpr Mask optional = 0b10;
  static constexpr Mask dense = 0b11;
  static constexpr Reads reads{.inputs = 0b11, .outputs = 0b10};
  static constexpr Peephole peephole{.adds_gradients =
                                         0b1};  // of a residual stream, which goes round the layer
  double eps = 1e-5;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { on("eps", eps); }
  bool operator==(const RmsNorm&) const = default;
};

/// Inputs: gy, x, weight or none, 1 / root, and what to add to the gradient of x or none; the sum is rounded
/// once. Outputs: gradients of x and weight.
struct RmsNormGrad {
  static constexpr std::string_view name = "rms_norm_grad";
  static constexpr Arity arity = 5;
  static constexpr Mask optional = 0b10100;
  static constexpr Mask dense = 0b11111;
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  bool operator==(const RmsNormGrad&) const = default;
};

}  // namespace sherd::ops
