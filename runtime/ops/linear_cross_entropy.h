// The cross entropy of a linear layer's logits, of which some rows are there at a time (as Hsu et al., 2024):
// the gradient makes them again.
#pragma once

#include "runtime/losses.h"
#include "runtime/op.h"

namespace sherd::ops {

/// What both directions go by.
struct LinearCrossEntropyRule {
  Reduction reduction = Reduction::mean;
  std::int64_t ignore_index = -100;
  LossPrecision precision = LossPrecision::of_logits;
  double label_smoothing = 0;
  std::int64_t chunk = 0;  ///< rows of logits at a time; 0 for as many as `rows_at_a_time` says

  std::int64_t rows_at_a_time(std::int64_t rows, std::int64_t width, std::int64_t classes) const;
  void fields(auto&& on) const {
    on("reduction", static_cast<int>(reduction));
    on("ignore_index", ignore_index);
    on("precision", static_cast<int>(precision));
    on("label_smoothing", label_smoothing);
    on("chunk", chunk);
  }
  bool operator==(const LinearCrossEntropyRule&) const = default;
};

/// Inputs: x (n, width), weight (classes, width), targets (n) i64, bias (classes) or none. Outputs: the loss,
/// and for the gradient the rows' normalizers and the number of counted targets, as `CrossEntropy` has them.
struct LinearCrossEntropy {
  static constexpr std::string_view name = "linear_cross_entropy";
  static constexpr Arity arity = 4;
  static constexpr Mask dense = 0b101;
  static constexpr Mask optional = 0b1000;
  static constexpr Reads reads{.inputs = 0b1111, .outputs = 0b110};
  LinearCrossEntropyRule rule;

  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { rule.fields(on); }
  bool operator==(const LinearCrossEntropy&) const = default;
};

/// Inputs: gradient of the loss, x, weight, targets, bias or none, normalizers, count. Outputs: the gradients
/// in `wanted` (bits of x, weight, bias), in this order.
struct LinearCrossEntropyGrad {
  static constexpr std::string_view name = "linear_cross_entropy_grad";
  static constexpr Arity arity = 7;
  static constexpr Mask dense = 0b1101011;
  static constexpr Mask optional = 0b10000;
  static constexpr bool differentiable = false;
  LinearCrossEntropyRule rule;
  Mask wanted = 0b111;

  Specs infer(SpecSpan in) const;
  void run(Inputs in, Outputs out) const;
  void fields(auto&& on) const {
    rule.fields(on);
    on("wanted", static_cast<std::int64_t>(wanted));
  }
  bool operator==(const LinearCrossEntropyGrad&) const = default;
};

}  // namespace sherd::ops
