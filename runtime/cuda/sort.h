// The largest elements of rows in order, as a call on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Dense rows of at most 2^31 columns; the `k` largest of each and their places, largest first, NaN before
/// all, equal ones by place.
struct SortCall {
  DType dtype = DType::f32;
  std::int64_t rows = 0, columns = 0, k = 0;
  const void* x = nullptr;
  void* values = nullptr;
  std::int64_t* places = nullptr;
  cudaStream_t stream = nullptr;
  void* scratch = nullptr;  ///< `scratch_bytes()`, aligned to 256

  std::int64_t scratch_bytes() const;
};
void launch_sort(const SortCall& call);

}  // namespace sherd::cuda
