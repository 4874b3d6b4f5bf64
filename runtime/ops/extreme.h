// Largest and smallest values.
#pragma once

#include "runtime/ops/sum.h"

namespace sherd::ops {

/// Over `axes`; NaN wins, and equal values share the gradient evenly, as in PyTorch's amax.
struct Extreme : OverAxes {
  static constexpr std::string_view name = "extreme";
  static constexpr Reads reads{.inputs = 1, .outputs = 1};
  bool largest = true;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    OverAxes::fields(on);
    on("largest", largest);
  }
  bool operator==(const Extreme&) const = default;
};

/// Position of the first largest, or smallest, value along one axis, i64; NaN wins.
struct ArgMax {
  static constexpr std::string_view name = "argmax";
  static constexpr bool differentiable = false;
  int axis = 0;
  bool keep = false;
  bool largest = true;

  Specs infer(SpecSpan in) const;
  void fields(auto&& on) const {
    on("axis", axis);
    on("largest", largest);
  }
  bool operator==(const ArgMax&) const = default;
};

}  // namespace sherd::ops
