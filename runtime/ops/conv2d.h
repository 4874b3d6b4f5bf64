// Convolution of images: cross-correlation with kernels of weights.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// How kernels lie on an image, along its height and its width.
struct ConvRule {
  /// Sizes are below it, so that no sum or product of them wraps.
  static constexpr std::int64_t most = std::int64_t{1} << 31;
  struct Axis {
    std::int64_t stride = 1, padding = 0, dilation = 1;
    /// ValueError, in the name of `call`, for what no convolution has.
    void check_for(std::string_view call) const;
    bool operator==(const Axis&) const = default;
  };
  Axis down, across;
  std::int64_t groups = 1;

  void fields(auto&& on) const {
    on("stride_down", down.stride), on("stride_across", across.stride);
    on("padding_down", down.padding), on("padding_across", across.padding);
    on("dilation_down", down.dilation), on("dilation_across", across.dilation);
    on("groups", groups);
  }
  bool operator==(const ConvRule&) const = default;
};

/// Inputs: x (N, C, H, W), weight (out, C / groups, height, width), bias (out) or none.
struct Conv2d {
  static constexpr std::string_view name = "conv2d";
  static constexpr Arity arity = 3;
  static constexpr Mask optional = 0b100;
  static constexpr Mask dense = 0b110;
  ConvRule rule;

  static Reads reads(Mask needs) { return {((needs & 1) << 1) | ((needs >> 1) & 1), 0}; }
  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { rule.fields(on); }
  bool operator==(const Conv2d&) const = default;
};

/// Inputs: gy, weight, bias (C) or none. Output: the gradient of images of `rows` x `columns`, which is a
/// transposed convolution of gy; plus the bias.
struct Conv2dGradInput {
  static constexpr std::string_view name = "conv2d_grad_input";
  static constexpr Arity arity = 3;
  static constexpr Mask optional = 0b100;
  static constexpr Mask dense = 0b110;
  ConvRule rule;
  std::int64_t rows = 1, columns = 1;

  static Reads reads(Mask needs) { return Conv2d::reads(needs); }
  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    rule.fields(on);
    on("rows", rows), on("columns", columns);
  }
  bool operator==(const Conv2dGradInput&) const = default;
};

/// Inputs: gy, x. Output: the gradient of kernels of `height` x `width`.
struct Conv2dGradWeight {
  static constexpr std::string_view name = "conv2d_grad_weight";
  static constexpr Arity arity = 2;
  ConvRule rule;
  std::int64_t height = 1, width = 1;

  static Reads reads(Mask needs) { return Conv2d::reads(needs); }
  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    rule.fields(on);
    on("height", height), on("width", width);
  }
  bool operator==(const Conv2dGradWeight&) const = default;
};

/// In other ops: the windows that kernels of height x width see, (N, down, across, C * height * width).
Tensor windows_of(const ConvRule& rule, const Tensor& x, std::int64_t height, std::int64_t width,
                  std::int64_t down, std::int64_t across);
/// Its transpose: each pixel of images of `rows` x `columns` is the sum of its places in the windows.
Tensor images_of(const ConvRule& rule, const Tensor& windows, std::int64_t height, std::int64_t width,
                 std::int64_t rows, std::int64_t columns);

}  // namespace sherd::ops
