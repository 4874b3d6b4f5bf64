// Cross entropy of rows of logits, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/faults.h"
#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// How the losses of the rows are combined.
enum class RowLosses { mean, sum, each };

/// Dense logits (rows, columns) of `dtype`; the other floating arrays are of its compute type. A target
/// outside [0, columns) that is not ignored is reported, and its loss and gradient are NaN.
struct CrossEntropyCall {
  DType dtype = DType::f32;
  DType loss_dtype = DType::f32;  ///< as `dtype`, or f32, which also has the bits of f32 logits
  RowLosses form = RowLosses::mean;
  std::int64_t ignore_index = -100, rows = 0, columns = 0;
  void* logits = nullptr;
  const std::int64_t* targets = nullptr;
  void* loss = nullptr;         ///< one value, or one for each row
  void* normalizers = nullptr;  ///< of each row the largest logit, then of each the log of the sum below it
  void* count = nullptr;
  void* row_loss = nullptr;  ///< scratch memory for one value a row
  FaultSlot faults{};
  cudaStream_t stream = nullptr;
};
void launch_cross_entropy(const CrossEntropyCall& call);

struct CrossEntropyGradCall {
  DType dtype = DType::f32, loss_dtype = DType::f32;
  RowLosses form = RowLosses::mean;
  std::int64_t ignore_index = -100, rows = 0, columns = 0;
  const void *gy = nullptr, *logits = nullptr;
  const std::int64_t* targets = nullptr;
  const void *normalizers = nullptr, *count = nullptr;
  void* gx = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_cross_entropy_grad(const CrossEntropyGradCall& call);

/// Whether a row of logits is enough for a block and fits its own memory, so that loss and gradient take one
/// pass.
bool one_pass(const CrossEntropyCall& call);
/// The same loss, and the logits' gradient for a loss's of 1 over the logits; `each` is not a form of it. The
/// count is written first, and logsumexp is not.
void launch_cross_entropy_over(const CrossEntropyCall& call);

/// x *= *factor, which is of `dtype` or f32, unless that is 1.
void launch_scale_unless_one(DType dtype, DType factor_dtype, void* x, const void* factor, std::int64_t n,
                             cudaStream_t stream);

}  // namespace sherd::cuda
