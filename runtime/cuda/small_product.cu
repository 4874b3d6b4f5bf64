#include "runtime/cuda/small_product.h"

#include <algorithm>
#include <cmath>

#include "runtime/cuda/launch.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

constexpr int side = 16, depth = 64;  // of a block's part of C, a thread an element; of its parts of A and B

/// Most of its time is waiting for memory, so all loads are on their way before the first is used.
template <class T>
__global__ void __launch_bounds__(side* side) small_product(const __grid_constant__ SmallProduct c) {
  using C = compute_t<T>;
  constexpr int loads = depth / side;
  __shared__ C rows[side][depth + 1], columns[side][depth + 1];
  wait_for_earlier();
  const int tx = static_cast<int>(threadIdx.x), ty = static_cast<int>(threadIdx.y);
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * side + ty,
                     column = static_cast<std::int64_t>(blockIdx.x) * side + tx,
                     loaded_column = column - tx + ty, at = (blockIdx.z * c.m + row) * c.n + column;
  const bool inside = row < c.m && column < c.n;
  const T* a = static_cast<const T*>(c.a) + blockIdx.z * c.stride_a;
  const T* b = static_cast<const T*>(c.b) + blockIdx.z * c.stride_b;
  T bias{}, residual{};
  if (inside && c.bias) bias = static_cast<const T*>(c.bias)[column];
  if (inside && c.residual) residual = static_cast<const T*>(c.residual)[at];
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
    const int length = static_cast<int>(min(static_cast<std::int64_t>(depth), c.k - begin));
#pragma unroll 16
    for (int i = 0; i < length; ++i) total = std::fma(rows[ty][i], columns[tx][i], total);
  }
  if (!inside) return;
  if (c.bias) total += widen(bias);
  if (c.residual) total += widen(residual);
  static_cast<T*>(c.c)[at] = narrow<T>(total);
}

}  // namespace

void launch_small_product(const SmallProduct& c) {
  const auto parts = [](std::int64_t n) { return static_cast<unsigned>((n + side - 1) / side); };
  for_floating(c.dtype, [&]<class T>() {
    launch_early(small_product<T>, dim3(parts(c.n), parts(c.m), static_cast<unsigned>(c.batch)),
                 dim3(side, side), c.stream, c);
  });
}

}  // namespace sherd::cuda
