// Matrix products on the CPU. C is cut into fixed tiles and one thread computes a tile, so bits never depend
// on the number of threads.
#pragma once

#include <cstdint>

#include "runtime/half.h"

namespace sherd::cpu {

/// C = op(A) op(B) + bias (+ C), row-major, `batch` times. op(A) is m x k, op(B) is k x n, C is m x n.
template <class T>
struct Gemm {
  std::int64_t m = 0, n = 0, k = 0;
  const T* a = nullptr;
  std::int64_t lda = 0;      ///< elements from one stored row of A to the next
  bool transpose_a = false;  ///< A is stored k x m
  const T* b = nullptr;
  std::int64_t ldb = 0;
  bool transpose_b = false;  ///< B is stored n x k, as a Linear's weight is
  T* c = nullptr;
  std::int64_t ldc = 0;
  bool accumulate = false;  ///< add to what C holds
  const T* bias = nullptr;  ///< n values added to every row, or null
  std::int64_t batch = 1;
  std::int64_t stride_a = 0, stride_b = 0,
               stride_c = 0;  ///< elements from one matrix of the batch to the next
};

/// Computes it for double, float, Half or BFloat16 (halves in float, large
/// bf16 as it is where oneDNN and the processor can; both sum in f32 and round once). C must not overlap A or
/// B. k = 0 counts as a product of zeros. Throws InternalError when the matrix library fails (no memory for
/// its buffers).
template <class T>
void gemm(const Gemm<T>& g);

}  // namespace sherd::cpu
