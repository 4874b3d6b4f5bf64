// Layer normalisation over the last axis (Ba, Kiros and Hinton, 2016).
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Inputs: x (..., n), weight (n) or none, bias (n) or none. Outputs: y, and each row's mean and 1/deviation
/// for the gradient.
struct LayerNorm {
  static constexpr std::string_view name = "layer_norm";
  static constexpr Arity arity = 3;
  static constexpr Mask optional = 0b110;
  static constexpr Mask dense = 0b111;
  static constexpr Reads reads{.inputs = 0b111, .outputs = 0b110};
  // A residual stream goes round the layer; sums are for the bias of the layer that made the stream.
  static constexpr Peephole peephole{.adds_gradients = 0b1, .gives_sums = 0b1};
  double eps = 1e-5;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { on("eps", eps); }
  bool operator==(const LayerNorm&) const = default;
};

/// Inputs: gy, x, weight or none, mean, rstd, and what to add to the gradient of x or none; the sum is
/// rounded once. Outputs: gradients of x, weight and bias.
struct LayerNormGrad {
  static constexpr std::string_view name = "layer_norm_grad";
  static constexpr Arity arity = 6;
  static constexpr Mask optional = 0b100100;
  static constexpr Mask dense = 0b111111;
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  bool operator==(const LayerNormGrad&) const = default;
};

/// The same of x (..., n) with two axes or more, and the sums of its gradient over all but the last.
struct LayerNormGradSums {
  static constexpr std::string_view name = "layer_norm_grad_sums";
  static constexpr Arity arity = LayerNormGrad::arity;
  static constexpr Mask optional = LayerNormGrad::optional;
  static constexpr Mask dense = LayerNormGrad::dense;
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  bool operator==(const LayerNormGradSums&) const = default;
};

}  // namespace sherd::ops
