// Layers of images beside convolutions and pooling.
#pragma once

#include <optional>

#include "nn/module.h"
#include "runtime/images.h"

namespace sherd::nn {

/// Whether a normalisation scales and shifts what it gives by parameters.
enum class Affine { no, yes };
struct InstanceNormOptions {
  double eps = 1e-5;  ///< added to the variance
  Affine affine = Affine::no;
  TensorOptions tensor{};
};
/// Normalisation of each channel of each sample of x (N, channels, ...) alone, always by its own statistics;
/// weight (channels) starts at 1, bias (channels) at 0, where there are some.
struct SHERD_API InstanceNorm final : Layer<InstanceNorm> {
  std::optional<Param> weight, bias;
  std::int64_t channels;
  double eps;
  explicit InstanceNorm(std::int64_t channels, const InstanceNormOptions& options = {});
  /// ShapeError for another number of channels.
  Tensor forward(const Tensor& x) const;
  void visit(auto&& on) {
    if (weight) on("weight", *weight);
    if (bias) on("bias", *bias);
  }
};

/// (..., C r^2, H, W) to (..., C, H r, W r), r = factor; `pixel_shuffle`.
struct SHERD_API PixelShuffle final : Layer<PixelShuffle> {
  std::int64_t factor;
  explicit PixelShuffle(std::int64_t factor) : factor(factor) {}
  Tensor forward(const Tensor& x) const { return pixel_shuffle(x, factor); }
  void visit(auto&&) {}
};
/// (..., C, H r, W r) to (..., C r^2, H, W).
struct SHERD_API PixelUnshuffle final : Layer<PixelUnshuffle> {
  std::int64_t factor;
  explicit PixelUnshuffle(std::int64_t factor) : factor(factor) {}
  Tensor forward(const Tensor& x) const { return pixel_unshuffle(x, factor); }
  void visit(auto&&) {}
};

// Compiled once, in the library.
extern template class Layer<InstanceNorm>;
extern template class Layer<PixelShuffle>;
extern template class Layer<PixelUnshuffle>;

}  // namespace sherd::nn
