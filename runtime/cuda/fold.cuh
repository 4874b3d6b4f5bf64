// Folds of a dense (outer, reduce, inner) array over its middle axis: kernels for any rule of what is added.
// The tree depends on the sizes alone.
#pragma once

#include <array>
#include <bit>
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

/// The reduced axis in `count` pieces of `length`; results lie at [piece][outer][inner]. An empty piece
/// gives 0.
struct Pieces {
  std::int64_t outer, reduce, inner, count, length;
  std::int64_t pitch = inner;  ///< elements from one row of `inner` to the next
};

/// What rules that do not look at the first element are given for it.
template <class Rule, class T>
__device__ compute_t<T> first_of(const T* x) {
  if constexpr (Rule::reads_first) return widen(*x);
  return {};
}

/// How many of `first`, `first + step`, ... are below `last`.
__device__ inline int steps_until(std::int64_t first, std::int64_t last, std::int64_t step) {
  return first < last ? static_cast<int>((last - first + step - 1) / step) : 0;
}

/// Adds `count` packs, which lie `step` elements apart, to the run, `at_once` of them loaded before the first
/// is used: one after the other, each would wait for memory. `top(j)` is what a rule may read.
template <int at_once, int V, class Rule, class Top>
__device__ void add_run(const Rule& rule, const typename Rule::Element* from, std::int64_t step, int count,
                        typename Rule::Run (&run)[V], const Top& top) {
  using Loaded = Raw<V, typename Rule::Element>;
  const auto add = [&](const Loaded& pack) {
    compute_t<typename Rule::Element> wide[V];
    pack.widen_to(wide);
#pragma unroll
    for (int j = 0; j < V; ++j) run[j] += rule.term(wide[j], top(j));
  };
  if constexpr (at_once == 1) {
#pragma unroll 4
    for (; count > 0; --count, from += step) add(Loaded::load(from));
  } else {
    for (; count > 0; count -= at_once, from += at_once * step) {
      Loaded loaded[at_once];
#pragma unroll
      for (int u = 0; u < at_once; ++u)
        if (u < count) loaded[u] = Loaded::load(from + u * step);
#pragma unroll
      for (int u = 0; u < at_once; ++u) {
        if (u >= count) break;
        add(loaded[u]);
      }
    }
  }
}

/// `x` of the thread `step` lanes on.
template <class X>
__device__ X from_lane_behind(const X& x, int step) {
  constexpr int words = sizeof(X) / sizeof(std::uint32_t);
  auto of = std::bit_cast<std::array<std::uint32_t, words>>(x);
#pragma unroll
  for (int i = 0; i < words; ++i) of[i] = __shfl_down_sync(whole_warp, of[i], step);
  return std::bit_cast<X>(of);
}

/// What the threads of a block have, by a tree whose halves are added to each other; a warp's work, in whose
/// first lane it is.
template <class Total>
__device__ Total total_of(const Total (&partial)[threads_per_block]) {
  constexpr int warps = threads_per_block / warp_size;
  Total mine[warps];
#pragma unroll
  for (int w = 0; w < warps; ++w) mine[w] = partial[w * warp_size + threadIdx.x];
#pragma unroll
  for (int half = warps / 2; half > 0; half /= 2)
#pragma unroll
    for (int w = 0; w < half; ++w) mine[w] += mine[w + half];
#pragma unroll
  for (int step = warp_size / 2; step > 0; step /= 2) mine[0] += from_lane_behind(mine[0], step);
  return mine[0];
}

/// Along contiguous elements: a block a fold of a piece, `blockIdx.y`, its threads side by side with packs of
/// `V`, then a tree.
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
      const std::int64_t mine = first + threadIdx.x * V;
      // Of wide packs more would be more code than is fast.
      constexpr int at_once = V == 1 ? 8 : V <= 4 ? 4 : 1;
      add_run<at_once>(rule, row + mine, threads_per_block * V,
                       steps_until(mine, last, threads_per_block * V), run, [&](int) { return top; });
#pragma unroll
      for (int j = 0; j < V; ++j) total += run[j];
    }
    partial[threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.x < warp_size) {
      const Total all = total_of(partial);
      if (threadIdx.x == 0) rule.store(blockIdx.y * p.outer + o, all);
    }
    __syncthreads();
  }
}

/// Elements that a thread which folds across rows loads at once: what it adds them up in are registers.
template <class Rule>
constexpr int pack_across() {
  constexpr int wide = wide_count<typename Rule::Element>,
                most = 64 / static_cast<int>(sizeof(typename Rule::Run));
  return wide < most ? wide : most;
}
/// Blocks of such threads at once, at least.
template <int Rows, int V, class Rule>
constexpr int blocks_across() {
  if (Rows == 1) return 16;
  return (V * sizeof(typename Rule::Run) > 32 ? 512 : 1024) / (block_columns * Rows);
}

/// How many of `block_columns` threads take neighbouring packs of one piece: a power of two.
inline int lanes_for(std::int64_t packs) {
  int lanes = 1;
  while (lanes < block_columns && lanes < packs) lanes *= 2;
  return lanes;
}

/// Across rows: `lanes` neighbouring threads take neighbouring packs of `V` columns, the next ones those of
/// another piece or fold; `Rows` threads share a pack. The tree of a column is the same for every `V`.
template <int Rows, int V, class Rule>
__global__ void __launch_bounds__(block_columns* Rows, blocks_across<Rows, V, Rule>())
    fold_columns(const Rule rule, Pieces p, int lanes, const typename Rule::Element* x) {
  using T = typename Rule::Element;
  __shared__ typename Rule::Total partial[Rows][V][block_columns];
  wait_for_earlier();
  const auto mine = [](int j) -> typename Rule::Total& { return partial[threadIdx.y][j][threadIdx.x]; };
  const std::int64_t across = blocks_of(p.inner, lanes * V), units = p.count * p.outer * across;
  const int beside = block_columns / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
  for (std::int64_t of_block = blockIdx.x; of_block * beside < units; of_block += gridDim.x) {
    const std::int64_t unit = of_block * beside + static_cast<int>(threadIdx.x) / lanes, fold = unit / across,
                       piece = fold / p.outer, o = fold % p.outer;
    const std::int64_t begin = piece * p.length, end = min(begin + p.length, p.reduce),
                       column = (unit % across * lanes + lane) * V;
    const bool inside = unit < units && column < p.inner;
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
      const std::int64_t row = first + threadIdx.y;
      constexpr int at_once = V > 1 && V * sizeof(typename Rule::Run) <= 32 ? 4 : 8;  // that have registers
      add_run<at_once>(rule, from + row * p.pitch, Rows * p.pitch, steps_until(row, last, Rows), run,
                       [&](int j) { return top[j]; });
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
      for (int j = 0; j < V; ++j) rule.store(fold * p.inner + column + j, mine(j));
    __syncthreads();
  }
}

template <int Rows, int V, class Rule>
void launch_columns(const Rule& rule, const Pieces& p, const typename Rule::Element* x, cudaStream_t stream) {
  const int lanes = lanes_for(blocks_of(p.inner, V));
  const std::int64_t units = p.count * p.outer * blocks_of(p.inner, std::int64_t{lanes} * V);
  launch_early(fold_columns<Rows, V, Rule>,
               blocks_for(blocks_of(units, block_columns / lanes) * threads_per_block),
               dim3(block_columns, Rows), stream, rule, p, lanes, x);
}

template <bool joins, class Rule>
void fold_pieces(const Rule& rule, Pieces p, const void* x, cudaStream_t stream) {
  using T = typename Rule::Element;
  const T* from = static_cast<const T*>(x);
  // Of integers bools alone, which are counted often: others would be more kernels.
  constexpr bool in_packs = std::is_floating_point_v<compute_t<T>> || std::is_same_v<T, bool>;
  constexpr int wide = in_packs ? wide_count<T> : 1, across = in_packs ? pack_across<Rule>() : 1;
  if (p.inner == 1) {
    const auto rows = [&]<int V>() {
      const dim3 grid(blocks_for(p.outer * threads_per_block), static_cast<unsigned>(p.count));
      launch_early(fold_rows<V, Rule>, grid, threads_per_block, stream, rule, p, from);
    };
    if constexpr (!joins && wide > 1) {
      // Short rows would leave most threads without a pack.
      const bool enough = p.length % wide == 0 && p.length >= threads_per_block * wide;
      if (enough && wide_rows<T>(p.reduce, from)) return rows.template operator()<wide>();
    }
    return rows.template operator()<1>();
  }
  const auto columns = [&]<int Rows, int V>() { launch_columns<Rows, V>(rule, p, from, stream); };
  if constexpr (joins) {
    columns.template operator()<join_rows, 1>();
  } else if (in_packs && wide_rows<T>(p.inner, from) && wide_rows<T>(p.pitch, from)) {
    if (p.reduce <= 2)  // both in one thread: more would be another tree
      columns.template operator()<1, across>();
    else
      columns.template operator()<block_rows, across>();
  } else {
    columns.template operator()<block_rows, 1>();
  }
}

/// A fold by `whole`, or in `c.pieces()`, each by `piece` into `c.partial`, which `join` folds again.
template <class Whole, class Piece, class Join>
void fold(const FoldCall& c, const Whole& whole, const Piece& piece, const Join& join) {
  const std::int64_t pieces = c.pieces();
  const Pieces all{
      c.outer, c.reduce, c.inner, pieces, blocks_of(c.reduce, pieces), c.pitch == 0 ? c.inner : c.pitch};
  if (pieces == 1) return fold_pieces<false>(whole, all, c.x, c.stream);
  fold_pieces<false>(piece, all, c.x, c.stream);
  fold_pieces<true>(join, Pieces{1, pieces, c.outer * c.inner, 1, pieces}, c.partial, c.stream);
}

}  // namespace sherd::cuda
