// The loop of small products, for the library's kernel and for those of products with regions behind them.
#pragma once

#include "runtime/cuda/small_factors.h"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {

/// What a thread of a block of `small_side` by `small_side` does: `at(row, column, element)` with the element
/// of matrix `matrix` of the batch that is its own, in the type of arithmetic, if there is one. Sums are
/// taken in order of k. Most of its time is waiting for memory, so all loads are on their way before the
/// first is used.
template <class T, class At>
__device__ void small_product_of(const SmallFactors& c, std::int64_t matrix, const At& at) {
  using C = compute_t<T>;
  constexpr int side = small_side, depth = 64, loads = depth / side;
  __shared__ C rows[side][depth + 1], columns[side][depth + 1];
  const int tx = static_cast<int>(threadIdx.x), ty = static_cast<int>(threadIdx.y);
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * side + ty,
                     column = static_cast<std::int64_t>(blockIdx.x) * side + tx,
                     loaded_column = column - tx + ty;
  const bool inside = row < c.m && column < c.n;
  const T* a = static_cast<const T*>(c.a) + matrix * c.stride_a;
  const T* b = static_cast<const T*>(c.b) + matrix * c.stride_b;
  T bias{}, residual{};
  if (inside && c.bias) bias = static_cast<const T*>(c.bias)[column];
  if (inside && c.residual) residual = static_cast<const T*>(c.residual)[(matrix * c.m + row) * c.n + column];
  C total = 0;
  for (std::int64_t begin = 0; begin < c.k; begin += depth) {
    T of_a[loads] = {}, of_b[loads] = {};
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const std::int64_t k = begin + i * side + tx;
      if (k >= c.k) continue;
      if (row < c.m) of_a[i] = a[c.transpose_a ? k * c.lda + row : row * c.lda + k];
      if (loaded_column < c.n)
        of_b[i] = b[c.transpose_b ? loaded_column * c.ldb + k : k * c.ldb + loaded_column];
    }
    if (begin > 0) __syncthreads();  // what was there has been read
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      rows[ty][i * side + tx] = widen(of_a[i]);
      columns[ty][i * side + tx] = widen(of_b[i]);
    }
    __syncthreads();
    const int length = static_cast<int>(c.k - begin < depth ? c.k - begin : depth);
#pragma unroll 16
    for (int i = 0; i < length; ++i) total = std::fma(rows[ty][i], columns[tx][i], total);
  }
  if (!inside) return;
  if (c.bias) total += widen(bias);
  if (c.residual) total += widen(residual);
  at(row, column, total);
}

}  // namespace sherd::cuda
