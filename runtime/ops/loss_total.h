// The mean or sum of a loss over all elements of two tensors, in one pass.
#pragma once

#include "runtime/op.h"
#include "runtime/ops/loss_kind.h"

namespace sherd::ops {

/// Inputs: input and target of one shape. Output: the sum of their losses over all elements, or the mean,
/// 0-d; of 16-bit floats summed in f32 and rounded once.
struct LossTotal {
  static constexpr std::string_view name = "loss_total";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr Reads reads{.inputs = 0b11};
  LossKind kind;
  bool mean = true;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("loss", static_cast<int>(kind.of));
    on("bound", kind.bound);
    on("divisor", kind.divisor);
    on("mean", mean);
  }
  bool operator==(const LossTotal&) const = default;
};

/// Inputs: the gradient of the total, input and target. Outputs: the gradients of those of the last two that
/// `needs` names.
struct LossTotalGrad {
  static constexpr std::string_view name = "loss_total_grad";
  static constexpr Arity arity = 3;
  static constexpr Mask dense = 0b111;
  LossTotal forward;
  Mask needs = 0b11;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    forward.fields(on);
    on("needs", needs);
  }
  bool operator==(const LossTotalGrad&) const = default;
};

}  // namespace sherd::ops
