// Negative log likelihood of class indices.
#pragma once

#include "runtime/op.h"
#include "runtime/ops.h"

namespace sherd::ops {

/// Inputs: log-probabilities (n, classes), targets (n) i64, and weights of the classes or none, of their
/// compute dtype. Outputs: the loss (0-d, or (n) without reduction), and the sum of the weights of the
/// counted targets, 1 each without weights, which a mean is divided by.
struct Nll {
  static constexpr std::string_view name = "nll_loss";
  static constexpr Arity arity = 3;
  static constexpr Mask optional = 0b100;
  static constexpr Mask dense = 0b111;
  Reduction reduction = Reduction::mean;
  std::int64_t ignore_index = -100;
  std::string_view call = "nll_loss";  ///< what messages name

  static Reads reads(Mask needs) { return {0b110 | static_cast<Mask>(has(needs, 2)), 0b10}; }
  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("reduction", static_cast<int>(reduction));
    on("ignore_index", ignore_index);
  }
  bool operator==(const Nll&) const = default;
};

/// Inputs: gradient of the loss, targets, sum of weights, and weights or none. Output: gradient of the
/// log-probabilities.
struct NllGrad {
  static constexpr std::string_view name = "nll_loss_grad";
  static constexpr Arity arity = 4;
  static constexpr Mask optional = 0b1000;
  static constexpr Mask dense = 0b1111;
  static constexpr bool differentiable = false;
  Nll forward;
  std::int64_t classes = 0;
  DType dtype = DType::f32;  ///< of the log-probabilities

  Specs infer(SpecSpan in) const { return {{{in[1].shape[0], classes}, dtype, in[0].device}}; }
  Tensors reference(Inputs in) const;
  bool operator==(const NllGrad&) const = default;
};

}  // namespace sherd::ops
