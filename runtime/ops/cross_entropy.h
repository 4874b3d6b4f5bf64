// Cross entropy of logits against class indices, without storing probabilities.
#pragma once

#include "runtime/op.h"
#include "runtime/ops.h"

namespace sherd::ops {

/// Inputs: logits (n, classes), targets (n) i64. Outputs: the loss (0-d, or (n) without reduction), in f32
/// for 16-bit logits if it is `wide`; and for the gradient the rows' normalizers (2, n), the largest logits
/// and then the logarithms of the sums of e^(logit - largest), whose sum would lose the digits of sure
/// answers among large logits; and the number of counted targets.
struct CrossEntropy {
  static constexpr std::string_view name = "cross_entropy";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr Reads reads{.inputs = 0b11, .outputs = 0b110};
  static constexpr Peephole peephole{.overwrites = {.inputs = 0b1}};  // large logits never lie twice
  Reduction reduction = Reduction::mean;
  std::int64_t ignore_index = -100;
  LossPrecision precision = LossPrecision::of_logits;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("reduction", static_cast<int>(reduction));
    on("ignore_index", ignore_index);
    on("precision", static_cast<int>(precision));
  }
  bool operator==(const CrossEntropy&) const = default;
};

/// Inputs: gradient of the loss, logits, targets, normalizers, count. Output: gradient of the logits.
struct CrossEntropyGrad {
  static constexpr std::string_view name = "cross_entropy_grad";
  static constexpr Arity arity = 5;
  static constexpr Mask dense = 0b11111;
  static constexpr bool differentiable = false;
  CrossEntropy forward;

  Specs infer(SpecSpan in) const { return {in[1]}; }
  Tensors reference(Inputs in) const;
  bool operator==(const CrossEntropyGrad&) const = default;
};

/// The same, written over the logits.
struct CrossEntropyGradInPlace {
  static constexpr std::string_view name = "cross_entropy_grad_";
  static constexpr Arity arity = CrossEntropyGrad::arity;
  static constexpr Mask dense = CrossEntropyGrad::dense;
  static constexpr Mask mutates = 0b10;
  static constexpr bool differentiable = false;
  CrossEntropyGrad grad;

  Specs infer(SpecSpan) const { return {}; }
  Tensors reference(Inputs in) const { return grad.reference(in); }
  bool operator==(const CrossEntropyGradInPlace&) const = default;
};

/// The loss (0-d) of a mean or sum, and over the logits the gradient that they have where the loss's is 1: a
/// pass less over them. Inputs: logits, which are written, and targets. Outputs: those, and the loss.
struct CrossEntropyInPlace {
  static constexpr std::string_view name = "cross_entropy_";
  static constexpr Arity arity = CrossEntropy::arity;
  static constexpr Mask dense = CrossEntropy::dense;
  static constexpr Mask mutates = 0b1;
  static constexpr Reads reads{.outputs = 0b1};
  static constexpr Peephole peephole{.overwrites = {.outputs = 0b1}};
  CrossEntropy forward;

  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const { forward.fields(on); }
  bool operator==(const CrossEntropyInPlace&) const = default;
};

/// Multiplies input 0 by input 1, a number (0-d, of the dtype or f32) that often is 1, and is looked at on
/// the device.
struct ScaleUnlessOne {
  static constexpr std::string_view name = "scale_unless_one_";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr Mask mutates = 0b1;
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  bool operator==(const ScaleUnlessOne&) const = default;
};

}  // namespace sherd::ops
