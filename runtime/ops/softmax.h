// Softmax along the last axis.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// softmax, or its logarithm, over the last axis.
struct Softmax {
  static constexpr std::string_view name = "softmax";
  static constexpr Mask dense = 1;
  static constexpr Reads reads{.outputs = 1};
  bool log = false;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { on("log", log); }
  bool operator==(const Softmax&) const = default;
};

/// Inputs: the output and its gradient.
struct SoftmaxGrad {
  static constexpr std::string_view name = "softmax_grad";
  static constexpr Arity arity = 2;
  static constexpr Mask dense = 0b11;
  static constexpr bool differentiable = false;
  bool log = false;

  Specs infer(SpecSpan in) const { return {in[0]}; }
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { on("log", log); }
  bool operator==(const SoftmaxGrad&) const = default;
};

}  // namespace sherd::ops
