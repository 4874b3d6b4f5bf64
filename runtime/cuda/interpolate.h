// Scaling of images, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"
#include "runtime/ops/resampled_axis.h"

namespace sherd::cuda {

/// Dense images (planes, rows, columns), before and after.
struct InterpolateCall {
  DType dtype = DType::f32;
  ops::ResampledAxis down, across;
  std::int64_t planes = 0;
  const void* from = nullptr;
  void* to = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_interpolate(const InterpolateCall& call);
/// From the gradient of the result to that of the image; floats.
void launch_interpolate_grad(const InterpolateCall& call);

}  // namespace sherd::cuda
