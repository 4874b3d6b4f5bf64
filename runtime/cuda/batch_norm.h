// Batch normalisation of channels that lie side by side, as calls on plain pointers. Safe to include in
// device code.
#pragma once

#include "runtime/cuda/kernels.h"
#include "runtime/cuda/norm_epilogue.h"

namespace sherd::cuda {

/// x: dense (batch, channels, inner) of `dtype`; the calls here take an inner of 1, plane_norm.h the others.
/// Arrays of one value a channel are of its compute type; weight and bias may be null.
struct BatchNormCall {
  DType dtype = DType::f32;
  std::int64_t batch = 0, channels = 0, inner = 0;
  double eps = 0;
  const void *x = nullptr, *weight = nullptr, *bias = nullptr;
  void *mean = nullptr, *variance = nullptr, *y = nullptr;
  NormEpilogue epilogue{};  ///< not of a gradient, which has its own
  cudaStream_t stream = nullptr;
  /// Pieces that the batch is cut into, so that few channels keep many blocks busy.
  std::int64_t pieces() const;
  double* sums = nullptr;  ///< room for 2 channels pieces()
};
/// Writes mean and variance (without bias correction).
void launch_channel_statistics(const BatchNormCall& call);
/// Writes y from mean and variance, after the epilogue.
void launch_batch_norm(const BatchNormCall& call);

struct BatchNormGradCall {
  BatchNormCall forward;  ///< x, weight, bias where results are made again, mean and variance
  bool through_statistics = true;
  const void *gy = nullptr, *more = nullptr;  ///< more: is added to gy, if it is given
  void *gx = nullptr, *gweight = nullptr, *gbias = nullptr;
  void* of_channels = nullptr;  ///< room for 2 values of the compute type a channel
  NormEpilogueGrad epilogue{};
};
void launch_batch_norm_grad(const BatchNormGradCall& call);

/// `kept` times the running statistics plus `of_mean` and `of_variance` times the batch's, (channels) each.
struct RunningStatisticsCall {
  DType running = DType::f32, batch = DType::f32;
  std::int64_t channels = 0;
  double kept = 0, of_mean = 0, of_variance = 0;
  void *running_mean = nullptr, *running_variance = nullptr;
  const void *mean = nullptr, *variance = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_running_statistics(const RunningStatisticsCall& call);

}  // namespace sherd::cuda
