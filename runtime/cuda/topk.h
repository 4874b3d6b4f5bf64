// The largest elements of rows, as a call on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Dense rows; the `k` largest of each and their places, largest first, equal ones by place.
struct TopKCall {
  DType dtype = DType::f32;
  std::int64_t rows = 0, columns = 0, k = 0;
  const void* x = nullptr;
  void* values = nullptr;
  std::int64_t* places = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_topk(const TopKCall& call);

}  // namespace sherd::cuda
