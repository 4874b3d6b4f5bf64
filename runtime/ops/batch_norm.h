// Batch normalisation over all axes but the second (Ioffe and Szegedy, 2015).
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Inputs: x (N, C, ...), weight, bias, running mean, running variance ((C) each, or none), and a residual of
/// the shape of x, or none, which is added. Outputs: y, after ReLU if the op has it, and the mean and
/// variance it was made with: the batch's in training, else the running ones. A gradient flows to the first
/// three and to the residual.
struct BatchNorm {
  static constexpr std::string_view name = "batch_norm";
  static constexpr Arity arity = 6;
  static constexpr Mask optional = 0b111110;
  static constexpr Mask dense = 0b011110;
  bool training = true;
  double eps = 1e-5;
  bool relu = false;

  Reads reads(Mask needs) const;
  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("training", training);
    on("eps", eps);
    on("relu", relu);
  }
  bool operator==(const BatchNorm&) const = default;
};

/// Inputs: gy, x, weight or none, mean, variance, y where ReLU made it, else none, bias or none, and a second
/// part of gy, which is added to it, or none. Outputs: gradients of x, weight and bias, the last two in the
/// dtype of the statistics, and of the residual where it is asked for.
struct BatchNormGrad {
  static constexpr std::string_view name = "batch_norm_grad";
  static constexpr Arity arity = 8;
  static constexpr Mask optional = 0b11100100;
  static constexpr std::size_t first_part = 0, second_part = 7;  ///< of gy (runtime/in_parts.h)
  static constexpr Mask dense = 0b1011100;
  static constexpr bool differentiable = false;
  bool training = true;
  double eps = 1e-5;
  bool of_residual = false;
  /// No residual was added: y is ReLU of x, weight, bias and statistics alone, which a kernel may make again
  /// in place of reading it.
  bool of_inputs = false;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("training", training);
    on("eps", eps);
    on("of_residual", of_residual);
    on("of_inputs", of_inputs);
  }
  bool operator==(const BatchNormGrad&) const = default;
};

/// Moves running statistics towards a batch's: (1 - momentum) running + momentum batch, the variance's times
/// `unbiased`, n / (n - 1). Inputs: running mean, mean, running variance, variance, (C) each; the running
/// ones, in one dtype, are written, rounded once from the batch's, which are f32 or f64.
struct RunningStatistics {
  static constexpr std::string_view name = "running_statistics_";
  static constexpr Arity arity = 4;
  static constexpr bool differentiable = false;
  static constexpr Mask mutates = 0b101;
  double momentum = 0.1, unbiased = 1;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  /// For kernels of what lies dense: moves others by `reference`, and says whether it did.
  bool moved_others(Inputs in) const;
  void fields(auto&& on) const {
    on("momentum", momentum);
    on("unbiased", unbiased);
  }
  bool operator==(const RunningStatistics&) const = default;
};

}  // namespace sherd::ops
