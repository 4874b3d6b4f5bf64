// Scaling of images (N, C, H, W).
#pragma once

#include "runtime/op.h"
#include "runtime/ops/resampled_axis.h"

namespace sherd::ops {

/// Each result is the nearest pixel, or lies on lines between its neighbours along the height and then the
/// width: computed in the compute dtype, rounded once.
struct Interpolate {
  static constexpr std::string_view name = "interpolate";
  static constexpr Mask dense = 1;
  static constexpr Reads reads{};
  ResampledAxis down, across;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    down.fields("rows", on);
    across.fields("columns", on);
  }
  bool operator==(const Interpolate&) const = default;
};

/// Input: the gradient of the result. Output: each pixel's sum of what it has of the results.
struct InterpolateGrad {
  static constexpr std::string_view name = "interpolate_grad";
  static constexpr Mask dense = 1;
  static constexpr Reads reads{};
  ResampledAxis down, across;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const { Interpolate{down, across}.fields(on); }
  bool operator==(const InterpolateGrad&) const = default;
};

}  // namespace sherd::ops
