// Softmax of rows, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Dense rows; `log` for the logarithm.
struct SoftmaxCall {
  DType dtype = DType::f32;
  bool log = false;
  std::int64_t rows = 0, columns = 0;
  const void* x = nullptr;
  void* y = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_softmax(const SoftmaxCall& call);

struct SoftmaxGradCall {
  DType dtype = DType::f32;
  bool log = false;
  std::int64_t rows = 0, columns = 0;
  const void *y = nullptr, *gy = nullptr;
  void* gx = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_softmax_grad(const SoftmaxGradCall& call);

/// y[row] = log of the sum of e^x, in the type that `dtype` is computed in; `columns` > 0.
struct LogSumExpCall {
  DType dtype = DType::f32;
  std::int64_t rows = 0, columns = 0;
  const void* x = nullptr;
  void* y = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_logsumexp(const LogSumExpCall& call);

}  // namespace sherd::cuda
