// Losses summed over all elements, as launches see them. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"
#include "runtime/ops/loss_total.h"

namespace sherd::cuda {

/// `n` elements each of a dense input and target.
struct LossCall {
  static constexpr std::int64_t chunk = 1 << 14;  ///< elements that a block sums
  DType dtype = DType::f32;
  bool mean = true;
  std::int64_t n = 0;
  const void *x = nullptr, *t = nullptr;
  cudaStream_t stream = nullptr;
  std::int64_t chunks() const { return blocks_of(n, chunk); }
};

/// Launches the kernel that writes the sum of each chunk, and says whether it was accepted.
using LaunchLoss = cudaError_t (*)(const void* loss, const LossCall& call, double* partial);
/// The same of the one that writes the gradients that are asked for, of x and of t, for `gy` of the total.
using LaunchLossGrad = cudaError_t (*)(const void* loss, const LossCall& call, const void* gy, void* gx,
                                       void* gt);

/// The kernels of a loss but for those launches; what looks into tensors is done here.
SHERD_API void run_loss_total(std::string_view op, bool mean, Inputs in, Outputs out, const void* loss,
                              LaunchLoss launch);
SHERD_API void run_loss_total_grad(std::string_view op, bool mean, Mask needs, Inputs in, Outputs out,
                                   const void* loss, LaunchLossGrad launch);

/// Writes the sum of all chunks, or the mean, rounded once.
void launch_join_chunks(const LossCall& call, const double* partial, void* out);

}  // namespace sherd::cuda
