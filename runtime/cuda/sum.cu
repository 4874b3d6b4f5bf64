#include <type_traits>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

constexpr int block_rows = 8, block_columns = 32;
constexpr std::int64_t piece_length = 4096,
                       column_length = 512;  // elements of a piece, along and across rows

template <class T>
using accumulator_t = std::conditional_t<std::is_integral_v<T>, std::int64_t, compute_t<T>>;

/// One piece of the reduced axis a `blockIdx.y`; results lie at [piece][outer][inner]. An empty piece gives
/// 0.
struct Pieces {
  std::int64_t outer, reduce, inner, length;
};

template <class TO, class Acc>
__device__ TO finished(Acc total, double divisor) {
  if constexpr (std::is_integral_v<Acc>)
    return static_cast<TO>(total);
  else
    return static_cast<TO>(total / static_cast<Acc>(divisor));
}

/// Sums along contiguous elements: a block a sum, its threads side by side, then a tree.
template <class T, class TO, class Acc>
__global__ void __launch_bounds__(threads_per_block) sum_rows(Pieces p, double divisor, const T* x, TO* out) {
  __shared__ Acc partial[threads_per_block];
  const std::int64_t begin = blockIdx.y * p.length, end = min(begin + p.length, p.reduce);
  for (std::int64_t o = blockIdx.x; o < p.outer; o += gridDim.x) {
    const T* row = x + o * p.reduce;
    Acc total = 0;
    for (std::int64_t i = begin + threadIdx.x; i < end; i += threads_per_block)
      total += static_cast<Acc>(row[i]);
    partial[threadIdx.x] = total;
    for (unsigned half = threads_per_block / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    if (threadIdx.x == 0) out[blockIdx.y * p.outer + o] = finished<TO>(partial[0], divisor);
    __syncthreads();
  }
}

/// Sums across rows: neighbouring threads take neighbouring packs of `V` columns, `block_rows` of them share
/// a pack. The tree of a column is the same for every `V`.
template <int V, class T, class TO, class Acc>
__global__ void __launch_bounds__(threads_per_block)
    sum_columns(Pieces p, double divisor, const T* x, TO* out) {
  __shared__ Acc partial[block_rows][block_columns][V];
  auto& mine = partial[threadIdx.y][threadIdx.x];
  const std::int64_t begin = blockIdx.y * p.length, end = min(begin + p.length, p.reduce);
  const std::int64_t across = (p.inner + block_columns * V - 1) / (block_columns * V);
  for (std::int64_t b = blockIdx.x; b < p.outer * across; b += gridDim.x) {
    const std::int64_t o = b / across, column = (b % across * block_columns + threadIdx.x) * V;
    Acc total[V] = {};
    if (column < p.inner) {
      const T* from = x + o * p.reduce * p.inner + column;
#pragma unroll 4
      for (std::int64_t i = begin + threadIdx.y; i < end; i += block_rows) {
        const Packed<V, T> pack = load_pack<V>(from + i * p.inner);
#pragma unroll
        for (int j = 0; j < V; ++j) total[j] += static_cast<Acc>(pack.at[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < V; ++j) mine[j] = total[j];
    for (unsigned half = block_rows / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.y < half)
#pragma unroll
        for (int j = 0; j < V; ++j) mine[j] += partial[threadIdx.y + half][threadIdx.x][j];
    }
    if (threadIdx.y == 0 && column < p.inner)
#pragma unroll
      for (int j = 0; j < V; ++j)
        out[(blockIdx.y * p.outer + o) * p.inner + column + j] = finished<TO>(mine[j], divisor);
    __syncthreads();
  }
}

template <class T, class TO, class Acc>
void sum_pieces(Pieces p, std::int64_t pieces, double divisor, const void* x, void* out,
                cudaStream_t stream) {
  const T* from = static_cast<const T*>(x);
  TO* to = static_cast<TO*>(out);
  const auto grid = [&](std::int64_t across) {
    return dim3(blocks_for(p.outer * across * threads_per_block), static_cast<unsigned>(pieces));
  };
  if (p.inner == 1) {
    sum_rows<T, TO, Acc><<<grid(1), threads_per_block, 0, stream>>>(p, divisor, from, to);
    return;
  }
  const auto columns = [&]<int V>() {
    constexpr int width = block_columns * V;
    sum_columns<V, T, TO, Acc>
        <<<grid((p.inner + width - 1) / width), dim3(block_columns, block_rows), 0, stream>>>(p, divisor,
                                                                                              from, to);
  };
  if (std::is_floating_point_v<Acc> && wide_rows<T>(p.inner, from))
    columns.template operator()<std::is_floating_point_v<Acc> ? wide_count<T> : 1>();
  else
    columns.template operator()<1>();
}

template <class T>
void sum(const SumCall& c) {
  using Acc = accumulator_t<T>;
  using TO = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>;
  const std::int64_t pieces = c.pieces();
  const Pieces all{c.outer, c.reduce, c.inner, (c.reduce + pieces - 1) / pieces};
  if (pieces == 1) return sum_pieces<T, TO, Acc>(all, 1, c.divisor, c.x, c.out, c.stream);
  sum_pieces<T, Acc, Acc>(all, pieces, 1, c.x, c.partial, c.stream);
  sum_pieces<Acc, TO, Acc>({1, pieces, c.outer * c.inner, pieces}, 1, c.divisor, c.partial, c.out, c.stream);
}

}  // namespace

std::int64_t SumCall::pieces() const {
  const std::int64_t results = outer * inner, length = inner == 1 ? piece_length : column_length;
  const std::int64_t wanted = (reduce + length - 1) / length;
  if (results >= 1 << 16 || wanted <= 1) return 1;
  // Partial sums beyond these cost more than they bring.
  const std::int64_t most = results < 512 ? 1024 : (1 << 19) / results;
  return wanted < most ? wanted : most;
}

void launch_sum(const SumCall& c) {
  for_any(c.dtype, [&]<class T>() { sum<T>(c); });
}

}  // namespace sherd::cuda
