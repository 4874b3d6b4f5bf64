// Normalisation of groups of channels (Wu and He, 2018).
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Inputs: x (N, C, ...), weight (C) or none, bias (C) or none, these in the dtype that x is computed in.
/// Outputs: y, and each group's mean and 1 / deviation (N * groups) for the gradient.
struct GroupNorm {
  static constexpr std::string_view name = "group_norm";
  static constexpr Arity arity = 3;
  static constexpr Mask optional = 0b110;
  static constexpr Mask dense = 0b111;
  static constexpr Reads reads{.inputs = 0b111, .outputs = 0b110};
  std::int64_t groups = 1;
  double eps = 1e-5;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("groups", groups);
    on("eps", eps);
  }
  bool operator==(const GroupNorm&) const = default;
};

/// Inputs: gy, x, weight or none, mean, 1 / deviation. Outputs: gradients of x, weight and bias.
struct GroupNormGrad {
  static constexpr std::string_view name = "group_norm_grad";
  static constexpr Arity arity = 5;
  static constexpr Mask optional = 0b100;
  static constexpr Mask dense = 0b11111;
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  bool operator==(const GroupNormGrad&) const = default;
};

}  // namespace sherd::ops
