// Pooling over windows of images (N, C, H, W). The padding is at most half a window: each sees a pixel.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// How windows lie on an image, along its height and its width.
struct PoolRule {
  struct Axis {
    std::int64_t kernel = 1, stride = 1, padding = 0;
    std::int64_t beyond = 0;  ///< pixels beyond the padding at the end that the last window may see
    bool operator==(const Axis&) const = default;
  };
  Axis down, across;

  /// What counts the pixels of a window: u8 where that is enough, else i64.
  DType numbers() const {
    constexpr std::int64_t most = 256;
    return down.kernel <= most && across.kernel <= most && down.kernel * across.kernel <= most ? DType::u8
                                                                                               : DType::i64;
  }
  void fields(auto&& on) const {
    on("height", down.kernel), on("width", across.kernel);
    on("stride_down", down.stride), on("stride_across", across.stride);
    on("padding_down", down.padding), on("padding_across", across.padding);
    on("beyond_down", down.beyond), on("beyond_across", across.beyond);
  }
  bool operator==(const PoolRule&) const = default;
};

/// Outputs: each window's largest pixel, and its number in the window, row by row, in `PoolRule::numbers`; of
/// equal ones the first, NaN largest of all. A window that sees padding has numbers for it too.
struct MaxPool2d {
  static constexpr std::string_view name = "max_pool2d";
  static constexpr Reads reads{.outputs = 0b10};
  PoolRule rule;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { rule.fields(on); }
  bool operator==(const MaxPool2d&) const = default;
};

/// Inputs: the gradients of windows, and the numbers of their largest pixels. Output: each pixel's sum, in
/// the order of windows, for images of the given size.
struct MaxPool2dGrad {
  static constexpr std::string_view name = "max_pool2d_grad";
  static constexpr Arity arity = 2;
  static constexpr Reads reads{.inputs = 0b10};
  PoolRule rule;
  std::int64_t rows = 1, columns = 1;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    rule.fields(on);
    on("rows", rows);
    on("columns", columns);
  }
  bool operator==(const MaxPool2dGrad&) const = default;
};

/// The mean of each window; what is outside the image counts as 0.
struct AvgPool2d {
  static constexpr std::string_view name = "avg_pool2d";
  static constexpr Reads reads{};
  PoolRule rule;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { rule.fields(on); }
  bool operator==(const AvgPool2d&) const = default;
};

/// Each window's gradient spread over its pixels, for images of the given size.
struct AvgPool2dGrad {
  static constexpr std::string_view name = "avg_pool2d_grad";
  static constexpr Reads reads{};
  PoolRule rule;
  std::int64_t rows = 1, columns = 1;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    rule.fields(on);
    on("rows", rows);
    on("columns", columns);
  }
  bool operator==(const AvgPool2dGrad&) const = default;
};

}  // namespace sherd::ops
