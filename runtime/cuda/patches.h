// A convolution's windows, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Dense images (batch, channels, size[0], size[1]) and windows (batch, count[0], count[1], channels
/// kernel[0] kernel[1]).
struct PatchesCall {
  DType dtype = DType::f32;
  std::int64_t batch = 0, channels = 0, size[2] = {}, count[2] = {}, kernel[2] = {}, stride = 1, padding = 0;
  const void* from = nullptr;
  void* to = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_patches(const PatchesCall& call);
/// Each pixel becomes the sum of its places, in the order of the windows.
void launch_patches_grad(const PatchesCall& call);

}  // namespace sherd::cuda
