// What a kernel of a small product is given.
#pragma once

#include <cstdint>

namespace sherd::cuda {

/// op(A) op(B) (+ bias) (+ residual), (m, n), row-major; the residual is dense. Steps between rows and
/// between the matrices of a batch in elements.
struct SmallFactors {
  std::int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false;
  std::int64_t lda = 0, ldb = 0, stride_a = 0, stride_b = 0;
  const void *a = nullptr, *b = nullptr, *bias = nullptr, *residual = nullptr;
};

constexpr int small_side = 16;  ///< of a block's part of the result, a thread an element

}  // namespace sherd::cuda
