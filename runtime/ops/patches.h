// A convolution's windows as rows, so that it becomes one product of matrices.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// What both directions share: windows of height x width pixels.
struct PatchRule {
  std::int64_t height = 1, width = 1, stride = 1, padding = 0;
  void fields(auto&& on) const {
    on("height", height);
    on("width", width);
    on("stride", stride);
    on("padding", padding);
  }
  bool operator==(const PatchRule&) const = default;
};

/// Images (N, C, H, W) to windows (N, windows down, windows across, C * height * width).
struct Patches {
  static constexpr std::string_view name = "patches";
  static constexpr Mask dense = 1;
  static constexpr Reads reads{};
  PatchRule rule;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { rule.fields(on); }
  bool operator==(const Patches&) const = default;
};

/// Windows back to images of the given size: each pixel is the sum of its places.
struct PatchesGrad {
  static constexpr std::string_view name = "patches_grad";
  static constexpr Mask dense = 1;
  static constexpr Reads reads{};
  PatchRule rule;
  std::int64_t rows = 1, columns = 1;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    rule.fields(on);
    on("rows", rows);
    on("columns", columns);
  }
  bool operator==(const PatchesGrad&) const = default;
};

}  // namespace sherd::ops
