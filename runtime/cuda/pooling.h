// Pooling of images, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Dense images (planes, rows, columns) and their windows (planes, down, across), of which window i begins at
/// i stride - padding. The output is of windows in a forward, of pixels in a gradient. With `channels` that
/// many planes are an image, and their elements lie side by side: (planes / channels, rows, columns,
/// channels).
struct PoolCall {
  struct Axis {
    int kernel = 1, stride = 1, padding = 0;
  };
  DType dtype = DType::f32;
  Axis down_rule, across_rule;
  std::int64_t planes = 0;
  int channels = 0;  ///< below 2^30 / columns and / across; 0: planes lie one after another
  int rows = 0, columns = 0, down = 0, across = 0;
  const void* x = nullptr;
  void* y = nullptr;
  void* numbers = nullptr;  ///< of the largest pixels in their windows
  bool few_numbers = true;  ///< u8, else i64
  cudaStream_t stream = nullptr;
};
/// Writes the largest pixels and `numbers`: of equal ones the first, NaN largest of all.
void launch_max_pool(const PoolCall& call);
/// Each pixel's sum of the windows that `numbers` gives it, in their order.
void launch_max_pool_grad(const PoolCall& call);
/// Means; what is outside the image counts as 0.
void launch_avg_pool(const PoolCall& call);
/// Each pixel's share of its windows.
void launch_avg_pool_grad(const PoolCall& call);

}  // namespace sherd::cuda
