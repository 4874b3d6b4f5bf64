// Batch normalisation over all axes but the second (Ioffe and Szegedy, 2015).
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Inputs: x (N, C, ...), weight, bias, running mean, running variance ((C) each, or none). Outputs: y, and
/// the mean and variance it was made with: the batch's in training, else the running ones. A gradient flows
/// to the first three.
struct BatchNorm {
  static constexpr std::string_view name = "batch_norm";
  static constexpr Arity arity = 5;
  static constexpr Mask optional = 0b11110;
  static constexpr Mask dense = 0b11110;
  bool training = true;
  double eps = 1e-5;

  /// Running statistics of a training step may change before its backward.
  Reads reads(Mask) const { return {training ? Mask{0b00111} : Mask{0b11111}, 0b110}; }
  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("training", training);
    on("eps", eps);
  }
  bool operator==(const BatchNorm&) const = default;
};

/// Inputs: gy, x, weight or none, mean, variance. Outputs: gradients of x, weight and bias, the last two in
/// the dtype of the statistics.
struct BatchNormGrad {
  static constexpr std::string_view name = "batch_norm_grad";
  static constexpr Arity arity = 5;
  static constexpr Mask optional = 0b100;
  static constexpr Mask dense = 0b11100;
  static constexpr bool differentiable = false;
  bool training = true;
  double eps = 1e-5;

  Specs infer(SpecSpan in) const { return {in[1], in[3], in[3]}; }
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("training", training);
    on("eps", eps);
  }
  bool operator==(const BatchNormGrad&) const = default;
};

}  // namespace sherd::ops
