// Losses summed over all elements, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"
#include "runtime/ops/loss_kind.h"

namespace sherd::cuda {

/// `n` elements each of a dense input and target.
struct LossTotalCall {
  static constexpr std::int64_t chunk = 1 << 14;  ///< elements that a block sums
  DType dtype = DType::f32;
  ops::LossKind kind;
  bool mean = true;
  std::int64_t n = 0;
  const void *x = nullptr, *t = nullptr;
  cudaStream_t stream = nullptr;
  std::int64_t chunks() const { return blocks_of(n, chunk); }
};
/// Writes the sum, or the mean, rounded once; `partial` has room for chunks().
void launch_loss_total(const LossTotalCall& call, double* partial, void* out);
/// Writes the gradients that are asked for, of x and of t, for the gradient `gy` of the total.
void launch_loss_total_grad(const LossTotalCall& call, const void* gy, void* gx, void* gt);

}  // namespace sherd::cuda
