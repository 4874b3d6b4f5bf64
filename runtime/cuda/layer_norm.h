// Layer and RMS normalisation of rows, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Dense rows of `columns` elements of `dtype`; statistics are of its compute type. weight and bias may be
/// null; where mean is, rows are taken about 0 (RMS normalisation).
struct LayerNormCall {
  DType dtype = DType::f32;
  std::int64_t rows = 0, columns = 0;
  const void *x = nullptr, *weight = nullptr, *bias = nullptr;
  double eps = 0;
  void *y = nullptr, *mean = nullptr, *rstd = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_layer_norm(const LayerNormCall& call);

struct LayerNormGradCall {
  DType dtype = DType::f32;
  std::int64_t rows = 0, columns = 0;
  const void *gy = nullptr, *x = nullptr, *weight = nullptr, *mean = nullptr, *rstd = nullptr;
  const void* more = nullptr;  ///< is added to gx; may be null
  void *gx = nullptr, *gweight = nullptr;
  void* gbias = nullptr;  ///< may be null
  void* sums = nullptr;   ///< of gx over rows; may be null
  cudaStream_t stream = nullptr;
  /// Groups of rows whose shares of the column sums are summed apart, then in order.
  /// Depends on the sizes and the addresses' alignment alone.
  std::int64_t parts() const;
  int kinds() const { return sums != nullptr ? 3 : 2; }  ///< of column sums
  /// Room for parts() kinds() columns elements of the compute type.
  void* partial = nullptr;
};
void launch_layer_norm_grad(const LayerNormGradCall& call);

}  // namespace sherd::cuda
