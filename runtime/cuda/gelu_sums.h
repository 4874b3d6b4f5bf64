// GELU of 16-bit numbers, and its gradient with its sums over rows, as calls on plain pointers. Safe to
// include in device code. In 16 bits both are computed with the GPU's own exponential, to some 1e-6 before
// they are rounded.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// y = gelu(x) for n numbers of bf16 or f16, dense and aligned to 16 bytes.
void launch_narrow_gelu(DType dtype, const void* x, void* y, std::int64_t n, cudaStream_t stream);

/// Dense (rows, columns) arrays of `dtype`.
struct GeluSumsCall {
  DType dtype = DType::f32;
  std::int64_t rows = 0, columns = 0;
  const void *gy = nullptr, *x = nullptr;
  void *gx = nullptr, *sums = nullptr;
  cudaStream_t stream = nullptr;
  /// Groups of rows that are summed apart, then in order, and the rows of one. Depends on the sizes alone.
  std::int64_t parts() const;
  std::int64_t rows_of_part() const;
  /// Room for parts() columns elements of the compute type.
  void* partial = nullptr;
};
void launch_gelu_sums(const GeluSumsCall& call);

}  // namespace sherd::cuda
