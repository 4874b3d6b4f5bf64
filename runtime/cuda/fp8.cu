#include "runtime/cuda/fp8.h"

#include <cuda_fp8.h>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

constexpr int tile = 64, pack = 8, packs = tile / pack;
using Eights = Packed<pack, unsigned char>;

/// A tile a block: each thread rounds packs of a row, and the block turns the tile in its own memory.
template <class T>
__global__ void __launch_bounds__(threads_per_block) round_to_eight(const RoundToEight c) {
  __shared__ unsigned char turned[tile][tile + 4];  // [column][row]
  const double largest = *c.largest;
  const float scale = static_cast<float>(largest == 0 ? 1 : c.top / largest);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
    *c.unscale = static_cast<float>(largest == 0 ? 1 : largest / c.top);
  const __nv_fp8_interpretation_t format = c.fine ? __NV_E4M3 : __NV_E5M2;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * tile,
                     first_column = static_cast<std::int64_t>(blockIdx.x) * tile;
  for (int i = static_cast<int>(threadIdx.x); i < tile * packs; i += threads_per_block) {
    const int r = i / packs, k = i % packs * pack;
    const std::int64_t row = first_row + r, column = first_column + k;
    if (row >= c.rows || column >= c.columns) continue;
    const Packed<pack, T> x = load_pack<pack>(static_cast<const T*>(c.x) + row * c.columns + column);
    Eights out;
#pragma unroll
    for (int j = 0; j < pack; ++j) {
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

unsigned tiles(std::int64_t n) { return static_cast<unsigned>((n + tile - 1) / tile); }

}  // namespace

void launch_round_to_eight(const RoundToEight& c) {
  const dim3 grid(tiles(c.columns), tiles(c.rows));
  if (c.dtype == DType::bf16)
    round_to_eight<BFloat16><<<grid, threads_per_block, 0, c.stream>>>(c);
  else
    round_to_eight<Half><<<grid, threads_per_block, 0, c.stream>>>(c);
}

}  // namespace sherd::cuda
