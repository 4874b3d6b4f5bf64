// Folds of a dense (outer, reduce, inner) array over its middle axis: kernels for any rule of what is added.
// The tree depends on the sizes alone.
#pragma once

#include <type_traits>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/fold_sizes.h"
#include "runtime/cuda/launch.cuh"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {

// A rule has the types `Element`, `Run` (what a thread adds runs of `run_length` terms up in) and `Total`
// (what runs are added up in); `term(x, first)` of an element widened, `first` being the first of its fold,
// where the rule says `reads_first`; and `store(i, total)` of the i-th result.

/// One piece of the reduced axis a `blockIdx.y`; results lie at [piece][outer][inner]. An empty piece gives
/// 0.
struct Pieces {
  std::int64_t outer, reduce, inner, length;
  std::int64_t pitch = inner;  ///< elements from one row of `inner` to the next
};

/// What rules that do not look at the first element are given for it.
template <class Rule, class T>
__device__ compute_t<T> first_of(const T* x) {
  if constexpr (Rule::reads_first) return widen(*x);
  return {};
}

/// Along contiguous elements: a block a fold, its threads side by side with packs of `V`, then a tree.
template <int V, class Rule>
__global__ void __launch_bounds__(threads_per_block)
    fold_rows(const Rule rule, Pieces p, const typename Rule::Element* x) {
  using T = typename Rule::Element;
  using Total = typename Rule::Total;
  constexpr std::int64_t stretch = run_length * threads_per_block * V;
  __shared__ Total partial[threads_per_block];
  wait_for_earlier();
  const std::int64_t begin = blockIdx.y * p.length, end = min(begin + p.length, p.reduce);
  for (std::int64_t o = blockIdx.x; o < p.outer; o += gridDim.x) {
    const T* row = x + o * p.reduce;
    const auto top = first_of<Rule>(row);
    Total total{};
    for (std::int64_t first = begin; first < end; first += stretch) {
      const std::int64_t last = min(first + stretch, end);
      typename Rule::Run run[V] = {};
#pragma unroll V> 1 ? 4 : 8
      for (std::int64_t i = first + threadIdx.x * V; i < last; i += threads_per_block * V) {
        if constexpr (V > 1) {
          compute_t<T> wide[V];
          Raw<V, T>::load(row + i).widen_to(wide);
#pragma unroll
          for (int j = 0; j < V; ++j) run[j] += rule.term(wide[j], top);
        } else {
          run[0] += rule.term(widen(row[i]), top);
        }
      }
#pragma unroll
      for (int j = 0; j < V; ++j) total += run[j];
    }
    partial[threadIdx.x] = total;
    for (unsigned half = threads_per_block / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    if (threadIdx.x == 0) rule.store(blockIdx.y * p.outer + o, partial[0]);
    __syncthreads();
  }
}

/// Across rows: neighbouring threads take neighbouring packs of `V` columns, `Rows` of them share a pack. The
/// tree of a column is the same for every `V`.
template <int Rows, int V, class Rule>
__global__ void __launch_bounds__(block_columns* Rows, Rows > 1 ? 1024 / (block_columns * Rows) : 16)
    fold_columns(const Rule rule, Pieces p, const typename Rule::Element* x) {
  using T = typename Rule::Element;
  __shared__ typename Rule::Total partial[Rows][V][block_columns];
  wait_for_earlier();
  const auto mine = [](int j) -> typename Rule::Total& { return partial[threadIdx.y][j][threadIdx.x]; };
  const std::int64_t begin = blockIdx.y * p.length, end = min(begin + p.length, p.reduce);
  const std::int64_t across = (p.inner + block_columns * V - 1) / (block_columns * V);
  for (std::int64_t b = blockIdx.x; b < p.outer * across; b += gridDim.x) {
    const std::int64_t o = b / across, column = (b % across * block_columns + threadIdx.x) * V;
    const bool inside = column < p.inner;
    const T* from = x + o * p.reduce * p.pitch + column;
    compute_t<T> top[V] = {};
#pragma unroll
    for (int j = 0; j < V; ++j) {
      mine(j) = {};
      if (inside) top[j] = first_of<Rule>(from + j);
    }
    for (std::int64_t first = begin; inside && first < end; first += run_length * Rows) {
      const std::int64_t last = min(first + run_length * Rows, end);
      typename Rule::Run run[V] = {};
#pragma unroll 8
      for (std::int64_t i = first + threadIdx.y; i < last; i += Rows) {
        if constexpr (V > 1) {
          compute_t<T> wide[V];
          Raw<V, T>::load(from + i * p.pitch).widen_to(wide);
#pragma unroll
          for (int j = 0; j < V; ++j) run[j] += rule.term(wide[j], top[j]);
        } else {
          run[0] += rule.term(widen(from[i * p.pitch]), top[0]);
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
    if (threadIdx.y == 0 && inside)
#pragma unroll
      for (int j = 0; j < V; ++j) rule.store((blockIdx.y * p.outer + o) * p.inner + column + j, mine(j));
    __syncthreads();
  }
}

template <bool joins, class Rule>
void fold_pieces(const Rule& rule, Pieces p, std::int64_t pieces, const void* x, cudaStream_t stream) {
  using T = typename Rule::Element;
  const T* from = static_cast<const T*>(x);
  const auto grid = [&](std::int64_t across) {
    return dim3(blocks_for(p.outer * across * threads_per_block), static_cast<unsigned>(pieces));
  };
  // Of integers bools alone, which are counted often: others would be more kernels.
  constexpr bool in_packs = std::is_floating_point_v<compute_t<T>> || std::is_same_v<T, bool>;
  constexpr int wide = in_packs ? wide_count<T> : 1;
  if (p.inner == 1) {
    const auto rows = [&]<int V>() {
      launch_early(fold_rows<V, Rule>, grid(1), threads_per_block, stream, rule, p, from);
    };
    if constexpr (!joins && wide > 1) {
      // Short rows would leave most threads without a pack.
      const bool enough = p.length % wide == 0 && p.length >= threads_per_block * wide;
      if (enough && wide_rows<T>(p.reduce, from)) return rows.template operator()<wide>();
    }
    return rows.template operator()<1>();
  }
  const auto columns = [&]<int Rows, int V>() {
    constexpr int width = block_columns * V;
    launch_early(fold_columns<Rows, V, Rule>, grid((p.inner + width - 1) / width), dim3(block_columns, Rows),
                 stream, rule, p, from);
  };
  if constexpr (joins) {
    columns.template operator()<join_rows, 1>();
  } else if (in_packs && wide_rows<T>(p.inner, from) && wide_rows<T>(p.pitch, from)) {
    if (p.reduce <= 2)  // both in one thread: more would be another tree
      columns.template operator()<1, wide>();
    else
      columns.template operator()<block_rows, wide>();
  } else {
    columns.template operator()<block_rows, 1>();
  }
}

/// A fold by `whole`, or in `c.pieces()`, each by `piece` into `c.partial`, which `join` folds again.
template <class Whole, class Piece, class Join>
void fold(const FoldCall& c, const Whole& whole, const Piece& piece, const Join& join) {
  const std::int64_t pieces = c.pieces();
  const Pieces all{c.outer, c.reduce, c.inner, (c.reduce + pieces - 1) / pieces,
                   c.pitch == 0 ? c.inner : c.pitch};
  if (pieces == 1) return fold_pieces<false>(whole, all, 1, c.x, c.stream);
  fold_pieces<false>(piece, all, pieces, c.x, c.stream);
  fold_pieces<true>(join, {1, pieces, c.outer * c.inner, pieces}, 1, c.partial, c.stream);
}

}  // namespace sherd::cuda
