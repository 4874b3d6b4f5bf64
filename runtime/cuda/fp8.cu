#include "runtime/cuda/fp8.h"

#include <cuda_fp8.h>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/types.cuh"
#include "runtime/ops/eight.h"

namespace sherd::cuda {
namespace {

constexpr int tile = 64, pack = 8, packs = tile / pack;
using Eights = Packed<pack, unsigned char>;

/// A tile a block: each thread rounds packs of a row, and the block turns the tile in its own memory.
template <class T>
__global__ void __launch_bounds__(threads_per_block) round_to_eight(const RoundToEight c) {
  __shared__ unsigned char turned[tile][tile + 4];  // [column][row]
  const double largest = ops::scalable(c.largest ? *c.largest : 0, c.top);
  const float whole_scale = static_cast<float>(c.top / largest);
  if (c.largest && blockIdx.x == 0 && threadIdx.x == 0) *c.unscale = static_cast<float>(largest / c.top);
  const __nv_fp8_interpretation_t format = c.fine ? __NV_E4M3 : __NV_E5M2;
  const auto across = static_cast<unsigned>(blocks_of(c.columns, tile));
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x / across) * tile,
                     first_column = static_cast<std::int64_t>(blockIdx.x % across) * tile;
  for (int i = static_cast<int>(threadIdx.x); i < tile * packs; i += threads_per_block) {
    const int r = i / packs, k = i % packs * pack;
    const std::int64_t row = first_row + r, column = first_column + k;
    if (row >= c.rows || column >= c.columns) continue;
    const Packed<pack, T> x = load_pack<pack>(static_cast<const T*>(c.x) + row * c.columns + column);
    const float row_scale = c.row_scale ? c.row_scale[row] : whole_scale;
    Eights out;
#pragma unroll
    for (int j = 0; j < pack; ++j) {
      const float scale = c.column_scale ? c.column_scale[column + j] : row_scale;
      out.at[j] = __nv_cvt_float_to_fp8(widen(x.at[j]) * scale, __NV_SATFINITE, format);
      turned[k + j][r] = out.at[j];
    }
    if (c.as_is) store_pack(static_cast<unsigned char*>(c.as_is) + row * c.columns + column, out);
  }
  if (!c.transposed) return;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < tile * packs; i += threads_per_block) {
    const int k = i / packs, r = i % packs * pack;
    const std::int64_t row = first_row + r, column = first_column + k;
    if (row >= c.rows || column >= c.columns) continue;
    Eights out;
#pragma unroll
    for (int j = 0; j < pack; ++j) out.at[j] = turned[k][r + j];
    store_pack(static_cast<unsigned char*>(c.transposed) + column * c.rows + row, out);
  }
}

__device__ void store_scales(const ScalesCall& c, std::int64_t i, float magnitude) {
  const double largest = ops::scalable(magnitude, c.top);
  c.scale[i] = static_cast<float>(c.top / largest);
  c.unscale[i] = static_cast<float>(largest / c.top);
}
/// Magnitudes order like integers, NaN above all.
__device__ int magnitude_bits(float x) { return __float_as_int(x) & 0x7fffffff; }

/// A warp a row.
template <class T>
__global__ void __launch_bounds__(threads_per_block) scales_of_rows(const ScalesCall c) {
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * (threads_per_block / warp_size) + threadIdx.x / warp_size;
  if (row >= c.rows) return;
  int top = 0;
  for (std::int64_t i = threadIdx.x % warp_size * pack; i < c.columns; i += warp_size * pack) {
    float x[pack];
    Raw<pack, T>::load(static_cast<const T*>(c.x) + row * c.columns + i).widen_to(x);
#pragma unroll
    for (int j = 0; j < pack; ++j) top = max(top, magnitude_bits(x[j]));
  }
  top = __reduce_max_sync(whole_warp, top);
  if (threadIdx.x % warp_size == 0) store_scales(c, row, __int_as_float(top));
}

constexpr int column_packs = 32, column_rows = 8;
constexpr std::int64_t rows_of_column_block = 256;

/// The bits of the largest magnitudes of columns, into `scale`, which is 0 before.
template <class T>
__global__ void __launch_bounds__(column_packs* column_rows) largest_of_columns(const ScalesCall c) {
  __shared__ int shared[column_rows][column_packs][pack];
  const auto across = static_cast<unsigned>(blocks_of(c.columns, column_packs * pack));
  const std::int64_t column =
                         (static_cast<std::int64_t>(blockIdx.x % across) * column_packs + threadIdx.x) * pack,
                     begin = static_cast<std::int64_t>(blockIdx.x / across) * rows_of_column_block,
                     end = min(begin + rows_of_column_block, c.rows);
  int top[pack] = {};
  if (column < c.columns)
    for (std::int64_t row = begin + threadIdx.y; row < end; row += column_rows) {
      float x[pack];
      Raw<pack, T>::load(static_cast<const T*>(c.x) + row * c.columns + column).widen_to(x);
#pragma unroll
      for (int j = 0; j < pack; ++j) top[j] = max(top[j], magnitude_bits(x[j]));
    }
#pragma unroll
  for (int j = 0; j < pack; ++j) shared[threadIdx.y][threadIdx.x][j] = top[j];
  __syncthreads();
  if (threadIdx.y != 0 || column >= c.columns) return;
#pragma unroll
  for (int j = 0; j < pack; ++j) {
    for (int other = 1; other < column_rows; ++other) top[j] = max(top[j], shared[other][threadIdx.x][j]);
    atomicMax(reinterpret_cast<int*>(c.scale) + column + j, top[j]);
  }
}
__global__ void __launch_bounds__(threads_per_block) scales_of_columns(const ScalesCall c) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x;
  if (i < c.columns) store_scales(c, i, c.scale[i]);
}

template <class T>
void launch_scales_of(const ScalesCall& c) {
  if (!c.of_columns) {
    const unsigned blocks = grid_of(blocks_of(c.rows, threads_per_block / warp_size));
    scales_of_rows<T><<<blocks, threads_per_block, 0, c.stream>>>(c);
    return;
  }
  cudaMemsetAsync(c.scale, 0, static_cast<std::size_t>(c.columns) * sizeof(float), c.stream);
  const unsigned tiles =
      grid_of(blocks_of(c.columns, column_packs * pack) * blocks_of(c.rows, rows_of_column_block));
  largest_of_columns<T><<<tiles, dim3(column_packs, column_rows), 0, c.stream>>>(c);
  scales_of_columns<<<grid_of(blocks_of(c.columns, threads_per_block)), threads_per_block, 0, c.stream>>>(c);
}

}  // namespace

void launch_round_to_eight(const RoundToEight& c) {
  const unsigned grid = grid_of(blocks_of(c.columns, tile) * blocks_of(c.rows, tile));
  if (c.dtype == DType::bf16)
    round_to_eight<BFloat16><<<grid, threads_per_block, 0, c.stream>>>(c);
  else
    round_to_eight<Half><<<grid, threads_per_block, 0, c.stream>>>(c);
}

void launch_scales(const ScalesCall& c) {
  c.dtype == DType::bf16 ? launch_scales_of<BFloat16>(c) : launch_scales_of<Half>(c);
}

}  // namespace sherd::cuda
