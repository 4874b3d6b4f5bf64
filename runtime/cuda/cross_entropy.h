// Cross entropy of rows of logits, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/faults.h"
#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// What becomes of the rows' losses.
enum class RowLosses { mean, sum, each };

/// Dense logits (rows, columns); what is not of `dtype` is of its compute type. A target outside of [0,
/// columns) that is not ignored is reported, and makes its loss and its gradient NaN.
struct CrossEntropyCall {
  DType dtype = DType::f32;
  RowLosses form = RowLosses::mean;
  std::int64_t ignore_index = -100, rows = 0, columns = 0;
  const void* logits = nullptr;
  const std::int64_t* targets = nullptr;
  void* loss = nullptr;  ///< one, or one a row
  void *logsumexp = nullptr, *count = nullptr;
  void* row_loss = nullptr;  ///< room for one a row
  FaultSlot faults{};
  cudaStream_t stream = nullptr;
};
void launch_cross_entropy(const CrossEntropyCall& call);

struct CrossEntropyGradCall {
  DType dtype = DType::f32;
  RowLosses form = RowLosses::mean;
  std::int64_t ignore_index = -100, rows = 0, columns = 0;
  const void *gy = nullptr, *logits = nullptr;
  const std::int64_t* targets = nullptr;
  const void *logsumexp = nullptr, *count = nullptr;
  void* gx = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_cross_entropy_grad(const CrossEntropyGradCall& call);

}  // namespace sherd::cuda
