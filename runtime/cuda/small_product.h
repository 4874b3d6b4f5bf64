// Products of small matrices, for which the library's kernels are mostly overhead. Safe to include in device
// code.
#pragma once

#include "runtime/cuda/kernels.h"
#include "runtime/cuda/small_factors.h"

namespace sherd::cuda {

/// The result is dense.
struct SmallProduct {
  DType dtype = DType::f32;
  SmallFactors of{};
  std::int64_t batch = 1;
  void* result = nullptr;
  cudaStream_t stream = nullptr;

  /// Whether this kernel is the faster one: of other floats than f32 tensor cores make more.
  static bool fits(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t batch) {
    constexpr std::int64_t most = 1 << 16;                                   // results
    const std::int64_t most_work = dtype == DType::f32 ? 1 << 20 : 1 << 16;  // multiplications
    return k > 0 && m <= most && n <= most && k <= 256 && batch <= 64 && m * n <= most &&
           m * n * k * batch <= most_work;
  }
};
void launch_small_product(const SmallProduct& call);

}  // namespace sherd::cuda
