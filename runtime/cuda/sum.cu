#include <algorithm>
#include <type_traits>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/launch.cuh"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

constexpr int block_columns = 32;
constexpr int block_rows = 8, join_rows = 32;  // of a block that sums the array, and of one that joins pieces
constexpr std::int64_t piece_length = 4096;    // elements of a piece along rows
constexpr std::int64_t enough_blocks = 1056;   // across rows: what the largest GPU has room for, twice
constexpr std::int64_t least_length = 128;

template <class T>
using accumulator_t = std::conditional_t<std::is_integral_v<T>, std::int64_t, compute_t<T>>;
/// What a thread adds runs of `run_length` numbers up in: a sum of f32 loses with every number added to it.
template <class Acc>
using total_t = std::conditional_t<std::is_floating_point_v<Acc>, double, Acc>;
constexpr std::int64_t run_length = 32;

/// One piece of the reduced axis a `blockIdx.y`; results lie at [piece][outer][inner]. An empty piece gives
/// 0.
struct Pieces {
  std::int64_t outer, reduce, inner, length;
  int power = 0;  ///< as in SumCall
};

/// What is summed of an element.
template <class Acc>
__device__ Acc term(Acc x, int power) {
  if constexpr (std::is_floating_point_v<Acc>) {
    if (power == 1) return std::fabs(x);
    if (power == 2) return x * x;
  }
  return x;
}

template <class TO, class Acc>
__device__ TO finished(total_t<Acc> total, double divisor) {
  if constexpr (std::is_integral_v<Acc>)
    return static_cast<TO>(total);
  else
    return static_cast<TO>(static_cast<Acc>(total) / static_cast<Acc>(divisor));
}

/// Sums along contiguous elements: a block a sum, its threads side by side, then a tree.
template <class T, class TO, class Acc>
__global__ void __launch_bounds__(threads_per_block) sum_rows(Pieces p, double divisor, const T* x, TO* out) {
  __shared__ total_t<Acc> partial[threads_per_block];
  wait_for_earlier();
  const std::int64_t begin = blockIdx.y * p.length, end = min(begin + p.length, p.reduce);
  for (std::int64_t o = blockIdx.x; o < p.outer; o += gridDim.x) {
    const T* row = x + o * p.reduce;
    total_t<Acc> total = 0;
    for (std::int64_t first = begin; first < end; first += run_length * threads_per_block) {
      const std::int64_t last = min(first + run_length * threads_per_block, end);
      Acc run = 0;
#pragma unroll 8
      for (std::int64_t i = first + threadIdx.x; i < last; i += threads_per_block)
        run += term(static_cast<Acc>(static_cast<compute_t<T>>(row[i])), p.power);
      total += run;
    }
    partial[threadIdx.x] = total;
    for (unsigned half = threads_per_block / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    if (threadIdx.x == 0) out[blockIdx.y * p.outer + o] = finished<TO, Acc>(partial[0], divisor);
    __syncthreads();
  }
}

/// Sums across rows: neighbouring threads take neighbouring packs of `V` columns, `Rows` of them share a
/// pack. The tree of a column is the same for every `V`.
template <int Rows, int V, class T, class TO, class Acc>
__global__ void __launch_bounds__(block_columns* Rows, 1024 / (block_columns * Rows))
    sum_columns(Pieces p, double divisor, const T* x, TO* out) {
  __shared__ total_t<Acc> partial[Rows][V][block_columns];
  wait_for_earlier();
  const auto mine = [](int j) -> total_t<Acc>& { return partial[threadIdx.y][j][threadIdx.x]; };
  const std::int64_t begin = blockIdx.y * p.length, end = min(begin + p.length, p.reduce);
  const std::int64_t across = (p.inner + block_columns * V - 1) / (block_columns * V);
  for (std::int64_t b = blockIdx.x; b < p.outer * across; b += gridDim.x) {
    const std::int64_t o = b / across, column = (b % across * block_columns + threadIdx.x) * V;
#pragma unroll
    for (int j = 0; j < V; ++j) mine(j) = 0;
    const T* from = x + o * p.reduce * p.inner + column;
    for (std::int64_t first = begin; column < p.inner && first < end; first += run_length * Rows) {
      const std::int64_t last = min(first + run_length * Rows, end);
      Acc run[V] = {};
#pragma unroll 8
      for (std::int64_t i = first + threadIdx.y; i < last; i += Rows) {
        if constexpr (V > 1) {
          compute_t<T> wide[V];
          Raw<V, T>::load(from + i * p.inner).widen_to(wide);
#pragma unroll
          for (int j = 0; j < V; ++j) run[j] += term(static_cast<Acc>(wide[j]), p.power);
        } else {
          run[0] += term(static_cast<Acc>(static_cast<compute_t<T>>(from[i * p.inner])), p.power);
        }
      }
#pragma unroll
      for (int j = 0; j < V; ++j) mine(j) += run[j];
    }
    for (unsigned half = Rows / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.y < half)
#pragma unroll
        for (int j = 0; j < V; ++j) mine(j) += partial[threadIdx.y + half][j][threadIdx.x];
    }
    if (threadIdx.y == 0 && column < p.inner)
#pragma unroll
      for (int j = 0; j < V; ++j)
        out[(blockIdx.y * p.outer + o) * p.inner + column + j] = finished<TO, Acc>(mine(j), divisor);
    __syncthreads();
  }
}

template <bool joins, class T, class TO, class Acc>
void sum_pieces(Pieces p, std::int64_t pieces, double divisor, const void* x, void* out,
                cudaStream_t stream) {
  const T* from = static_cast<const T*>(x);
  TO* to = static_cast<TO*>(out);
  const auto grid = [&](std::int64_t across) {
    return dim3(blocks_for(p.outer * across * threads_per_block), static_cast<unsigned>(pieces));
  };
  if (p.inner == 1) {
    launch_early(sum_rows<T, TO, Acc>, grid(1), threads_per_block, stream, p, divisor, from, to);
    return;
  }
  const auto columns = [&]<int Rows, int V>() {
    constexpr int width = block_columns * V;
    launch_early(sum_columns<Rows, V, T, TO, Acc>, grid((p.inner + width - 1) / width),
                 dim3(block_columns, Rows), stream, p, divisor, from, to);
  };
  if constexpr (joins)
    columns.template operator()<join_rows, 1>();
  else if (std::is_floating_point_v<Acc> && wide_rows<T>(p.inner, from))
    columns.template operator()<block_rows, std::is_floating_point_v<Acc> ? wide_count<T> : 1>();
  else
    columns.template operator()<block_rows, 1>();
}

template <class T, class TO = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>,
          class Acc = accumulator_t<T>>
void sum(const SumCall& c) {
  const std::int64_t pieces = c.pieces();
  const Pieces all{c.outer, c.reduce, c.inner, (c.reduce + pieces - 1) / pieces, c.power};
  if (pieces == 1) return sum_pieces<false, T, TO, Acc>(all, 1, c.divisor, c.x, c.out, c.stream);
  sum_pieces<false, T, Acc, Acc>(all, pieces, 1, c.x, c.partial, c.stream);
  sum_pieces<true, Acc, TO, Acc>({1, pieces, c.outer * c.inner, pieces}, 1, c.divisor, c.partial, c.out,
                                 c.stream);
}

}  // namespace

std::int64_t SumCall::pieces() const {
  const std::int64_t results = outer * inner;
  if (inner == 1) {
    const std::int64_t wanted = (reduce + piece_length - 1) / piece_length;
    return results >= 1 << 16 ? 1 : std::clamp<std::int64_t>(wanted, 1, 1024);
  }
  if (results == 0 || reduce <= 4 * least_length) return 1;
  const std::int64_t width = block_columns * 16 / size_of(dtype),  // of a block whose loads are wide
      blocks = outer * ((inner + width - 1) / width);
  return std::clamp<std::int64_t>(enough_blocks / blocks, 1, (reduce + least_length - 1) / least_length);
}

void launch_sum(const SumCall& c) {
  if (c.power == 0) return for_any(c.dtype, [&]<class T>() { sum<T>(c); });
  for_floating(c.dtype, [&]<class T>() { sum<T, double, double>(c); });  // they hold every square of f32
}

}  // namespace sherd::cuda
