// Rounding matrices to 8 bits, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// A dense (rows, columns) array of bf16 or f16, both sizes multiples of 8, to e4m3 (`fine`) or e5m2.
struct RoundToEight {
  DType dtype = DType::bf16;
  bool fine = true;
  std::int64_t rows = 0, columns = 0;
  double top = 0;  ///< largest number of the format, which the largest magnitude becomes
  const void* x = nullptr;
  const double* largest = nullptr;  ///< of all; or one of the next two, which `launch_scales` made
  const float *row_scale = nullptr, *column_scale = nullptr;
  void *as_is = nullptr, *transposed = nullptr;  ///< either may be null
  float* unscale = nullptr;  ///< gets what the 8-bit numbers are to be multiplied by, for `largest`
  cudaStream_t stream = nullptr;
};
void launch_round_to_eight(const RoundToEight& call);

/// What the rows of such an array, or its columns, are multiplied by so that the largest magnitude of each
/// becomes `top`, and what undoes that.
struct ScalesCall {
  DType dtype = DType::bf16;
  std::int64_t rows = 0, columns = 0;
  bool of_columns = false;
  double top = 0;
  const void* x = nullptr;
  float *scale = nullptr, *unscale = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_scales(const ScalesCall& call);

}  // namespace sherd::cuda
