// Convolutions whose groups have one input channel each. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Dense images (batch, channels, size[0], size[1]) and (batch, channels multiplier, count[0], count[1]), and
/// kernels (channels multiplier, kernel[0], kernel[1]), in f32 or 16 bits. Sums are taken in f32, in an order
/// that depends on the sizes alone, and rounded once.
struct DepthwiseCall {
  DType dtype = DType::f32;
  std::int64_t batch = 0, channels = 0, multiplier = 1;
  std::int64_t size[2] = {}, count[2] = {}, kernel[2] = {};
  std::int64_t stride[2] = {1, 1}, padding[2] = {}, dilation[2] = {1, 1};
  const void *x = nullptr, *y = nullptr, *w = nullptr;  ///< the two of them that are read
  const void* bias = nullptr;                           ///< of what is made, x or y; may be null
  void* out = nullptr;
  cudaStream_t stream = nullptr;

  constexpr std::int64_t outputs() const { return channels * multiplier; }
  std::int64_t taps() const { return kernel[0] * kernel[1]; }
  /// Pieces that the gradient of kernels is summed in.
  std::int64_t pieces() const;
  /// Room for pieces() times as many f32 as the kernels have elements, for that gradient.
  float* partial = nullptr;
};
void launch_depthwise(const DepthwiseCall& call);
void launch_depthwise_grad_input(const DepthwiseCall& call);
void launch_depthwise_grad_weight(const DepthwiseCall& call);

}  // namespace sherd::cuda
