// Negative log likelihood of class indices, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/faults.h"
#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Dense rows of log-probabilities with a target each; a row whose target is `ignore` does not count.
struct NllCall {
  DType dtype = DType::f32;
  std::int64_t rows = 0, classes = 0, ignore = -100;
  bool mean = true;
  const void* scores = nullptr;
  const std::int64_t* targets = nullptr;
  const void* weight = nullptr;  ///< (classes) of the compute dtype, or null: all 1
  FaultSlot faults{};
  cudaStream_t stream = nullptr;
  /// Blocks that sum rows, each of which leaves two f64 in the room for partial sums.
  std::int64_t blocks() const;
};
/// The sum or mean in `loss`, or each row's loss in `each`, one of which is null; the weights that counted in
/// `total`, of the compute dtype. A target out of range is reported, and its loss is NaN.
void launch_nll(const NllCall& call, double* partial, void* loss, void* each, void* total);
/// gx of `dtype` from the gradient of the loss, or of each row's where `each`.
void launch_nll_grad(const NllCall& call, const void* gy, bool each, const void* total, void* gx);

}  // namespace sherd::cuda
