// Products of small matrices, for which the library's kernels are mostly overhead. Safe to include in device
// code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// C = op(A) op(B) (+ bias) (+ residual), row-major; C and the residual are dense. Sums are taken in the type
/// of arithmetic, in order of k.
struct SmallProduct {
  DType dtype = DType::f32;
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
  bool transpose_a = false, transpose_b = false;
  std::int64_t lda = 0, ldb = 0, stride_a = 0, stride_b = 0;  ///< elements, as ProductShape has them
  const void *a = nullptr, *b = nullptr, *bias = nullptr, *residual = nullptr;
  void* c = nullptr;
  cudaStream_t stream = nullptr;

  /// Whether this kernel is the faster one.
  static bool fits(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t batch) {
    constexpr std::int64_t most = 1 << 16;  // multiplications
    return m <= most && n <= most && k <= 256 && batch <= 64 && m * n <= most && m * n * k * batch <= most;
  }
};
void launch_small_product(const SmallProduct& call);

}  // namespace sherd::cuda
