#include "runtime/cuda/recurrent.h"

#include "runtime/cuda/elementwise.cuh"

namespace sherd::cuda {
namespace {

using ops::CellState;

/// `x` as a number of `dtype` would be.
__device__ float rounded(float x, DType dtype) {
  return dtype == DType::bf16 ? widen(narrow<BFloat16>(x)) : dtype == DType::f16 ? widen(narrow<Half>(x)) : x;
}

/// A feature of a row: `at` among all states, `gate(k, count)` among rows of `count` gates.
struct Feature {
  std::int64_t at, row, column, features;
  __device__ Feature(std::int64_t i, std::int64_t features)
      : at(i),
        row(i <= 0x7fffffff && features <= 0x7fffffff
                ? static_cast<std::uint32_t>(i) / static_cast<std::uint32_t>(features)
                : i / features),
        column(i - row * features),
        features(features) {}
  __device__ std::int64_t gate(int k, int count) const { return (row * count + k) * features + column; }
};

template <class F>
__device__ void for_features(const CellCall& c, const F& body) {
  const std::int64_t n = c.rows * c.features, step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < n;
       i += step)
    body(Feature(i, c.features));
}

template <class Cell, class C>
__device__ CellState<C> load_state(const CellState<const void*>& s, const Feature& f, DType dtype) {
  return {load_as<C>(s.hidden, f.at, dtype), Cell::has_cell ? load_as<C>(s.cell, f.at, dtype) : C(0)};
}

template <class Cell, class C>
__device__ void step_feature(const CellStepCall& c, const Feature& f, const C* m) {
  C x[Cell::gates];
#pragma unroll
  for (int k = 0; k < Cell::gates; ++k) x[k] = load_as<C>(c.x, f.gate(k, Cell::gates), c.dtype);
  const auto step = Cell::step(x, m, load_state<Cell, C>(c.before, f, c.dtype));
  store_as(c.after.hidden, f.at, c.dtype, step.state.hidden);
  if constexpr (Cell::has_cell) store_as(c.after.cell, f.at, c.dtype, step.state.cell);
#pragma unroll
  for (int k = 0; k < Cell::kept; ++k) store_as(c.kept, f.gate(k, Cell::kept), c.dtype, step.kept[k]);
}

template <class Cell, class C>
__global__ void __launch_bounds__(threads_per_block) step_kernel(const __grid_constant__ CellStepCall c) {
  wait_for_earlier();
  for_features(c, [&](const Feature& f) {
    C m[Cell::gates];
#pragma unroll
    for (int k = 0; k < Cell::gates; ++k) m[k] = load_as<C>(c.m, f.gate(k, Cell::gates), c.dtype);
    step_feature<Cell, C>(c, f, m);
  });
}

/// What the steps after give to the state whose number is `at`.
template <class Cell, class C>
__device__ CellState<C> collected(const CellGradCall& c, std::int64_t at, C product) {
  CellState<C> sum{C(0), C(0)};
  if (c.last) return sum;
  if constexpr (Cell::passes_hidden) sum.hidden = static_cast<const C*>(c.sums.hidden)[at];
  if constexpr (Cell::has_cell) sum.cell = static_cast<const C*>(c.sums.cell)[at];
  sum.hidden += product;
  return sum;
}

template <class Cell, class C>
__device__ void grad_feature(const CellGradCall& c, const Feature& f, C product) {
  CellState<C> gy = collected<Cell, C>(c, f.at, product);
  if (c.gy.hidden != nullptr) gy.hidden += load_as<C>(c.gy.hidden, f.at, c.dtype);
  if constexpr (Cell::has_cell)
    if (c.gy.cell != nullptr) gy.cell += load_as<C>(c.gy.cell, f.at, c.dtype);
  C kept[4] = {};
#pragma unroll
  for (int k = 0; k < Cell::kept; ++k) kept[k] = load_as<C>(c.kept, f.gate(k, Cell::kept), c.dtype);
  const auto step = Cell::grad(gy, load_state<Cell, C>(c.after, f, c.dtype),
                               load_state<Cell, C>(c.before, f, c.dtype), kept);
#pragma unroll
  for (int k = 0; k < Cell::gates; ++k) {
    store_as(c.gx, f.gate(k, Cell::gates), c.dtype, step.x[k]);
    if constexpr (Cell::apart) store_as(c.gm, f.gate(k, Cell::gates), c.dtype, step.m[k]);
  }
  if constexpr (Cell::passes_hidden) static_cast<C*>(c.sums.hidden)[f.at] = step.state.hidden;
  if constexpr (Cell::has_cell) static_cast<C*>(c.sums.cell)[f.at] = step.state.cell;
}

template <class C>
__device__ C product_at(const CellGradCall& c, std::int64_t at) {
  return c.last ? C(0) : load_as<C>(c.product, at, c.dtype);
}

template <class Cell, class C>
__global__ void __launch_bounds__(threads_per_block) grad_kernel(const __grid_constant__ CellGradCall c) {
  wait_for_earlier();
  for_features(c, [&](const Feature& f) { grad_feature<Cell, C>(c, f, product_at<C>(c, f.at)); });
}

template <class Cell, class C>
__global__ void __launch_bounds__(threads_per_block)
    first_kernel(const __grid_constant__ CellGradCall c, const CellState<void*> first) {
  wait_for_earlier();
  for_features(c, [&](const Feature& f) {
    const CellState<C> sum = collected<Cell, C>(c, f.at, product_at<C>(c, f.at));
    store_as(first.hidden, f.at, c.dtype, sum.hidden);
    if constexpr (Cell::has_cell) store_as(first.cell, f.at, c.dtype, sum.cell);
  });
}

// ---- A step with its product in one kernel: a block has a tile of rows and features, a thread one of each.
// The weights are brought while the step before still runs, which does not write them.

constexpr int tile = 16, depth = 128;
static_assert(tile * tile == threads_per_block);

/// A stretch of a factor in shared memory, as floats; an odd row length keeps rows in different banks.
template <int Rows>
struct Stretch {
  float at[Rows][depth + 1];

  /// Rows of `from`, which `row_of(r)` gives by number, `ld` elements apart; zeros where it gives -1 and
  /// beyond `length`.
  template <class F>
  __device__ void load(const void* from, DType dtype, std::int64_t ld, int first, int length,
                       const F& row_of) {
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < Rows * depth; i += threads_per_block) {
      const int r = i / depth, k = i % depth;
      const std::int64_t row = row_of(r);
      at[r][k] = row >= 0 && first + k < length ? load_as<float>(from, row * ld + first + k, dtype) : 0.f;
    }
  }
};

/// m = W h' + b for the tile, rounded to the dtype as a product is, and the step.
template <class Cell>
__global__ void __launch_bounds__(threads_per_block)
    fused_step(const __grid_constant__ CellStepCall c, const FusedProduct p) {
  __shared__ Stretch<tile> state;
  __shared__ Stretch<tile * Cell::gates> weight;
  const int features = static_cast<int>(c.features), r = static_cast<int>(threadIdx.x) / tile,
            j = static_cast<int>(threadIdx.x) % tile;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * tile + r,
                     feature = static_cast<std::int64_t>(blockIdx.x) * tile + j;
  const auto weight_row = [&](int i) -> std::int64_t {
    const std::int64_t of = static_cast<std::int64_t>(blockIdx.x) * tile + i % tile;
    return of < features ? i / tile * features + of : -1;
  };
  const auto state_row = [&](int i) -> std::int64_t {
    const std::int64_t of = static_cast<std::int64_t>(blockIdx.y) * tile + i;
    return of < c.rows ? of : -1;
  };
  if (!p.first) weight.load(p.weight, c.dtype, features, 0, features, weight_row);
  wait_for_earlier();
  if (p.first) weight.load(p.weight, c.dtype, features, 0, features, weight_row);
  float m[Cell::gates] = {};
  for (int first = 0; first < features; first += depth) {
    if (first > 0) {
      __syncthreads();
      weight.load(p.weight, c.dtype, features, first, features, weight_row);
    }
    state.load(c.before.hidden, c.dtype, features, first, features, state_row);
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < depth; ++k)
#pragma unroll
      for (int g = 0; g < Cell::gates; ++g) m[g] += state.at[r][k] * weight.at[g * tile + j][k];
  }
  if (row >= c.rows || feature >= features) return;
#pragma unroll
  for (int g = 0; g < Cell::gates; ++g)
    m[g] = rounded(m[g] + load_as<float>(p.bias, g * features + feature, c.dtype), c.dtype);
  step_feature<Cell, float>(c, Feature(row * features + feature, features), m);
}

/// What the step after gave through W, and the step's gradient.
template <class Cell>
__global__ void __launch_bounds__(threads_per_block)
    fused_grad(const __grid_constant__ CellGradCall c, const FusedProduct p) {
  __shared__ Stretch<tile> given;
  __shared__ float weight[depth][tile];
  const int features = static_cast<int>(c.features), length = Cell::gates * features,
            r = static_cast<int>(threadIdx.x) / tile, j = static_cast<int>(threadIdx.x) % tile;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * tile + r,
                     feature = static_cast<std::int64_t>(blockIdx.x) * tile + j;
  const auto load_weight = [&](int first) {
#pragma unroll
    for (int k = r; k < depth; k += tile)
      weight[k][j] =
          first + k < length && feature < features
              ? load_as<float>(p.weight, static_cast<std::int64_t>(first + k) * features + feature, c.dtype)
              : 0.f;
  };
  if (!c.last && !p.first) load_weight(0);
  wait_for_earlier();
  if (!c.last && p.first) load_weight(0);
  float sum = 0;
  for (int first = 0; first < length && !c.last; first += depth) {
    if (first > 0) {
      __syncthreads();
      load_weight(first);
    }
    given.load(p.given, c.dtype, length, first, length, [&](int i) -> std::int64_t {
      const std::int64_t of = static_cast<std::int64_t>(blockIdx.y) * tile + i;
      return of < c.rows ? of : -1;
    });
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < depth; ++k) sum += given.at[r][k] * weight[k][j];
  }
  if (row < c.rows && feature < features)
    grad_feature<Cell, float>(c, Feature(row * features + feature, features), rounded(sum, c.dtype));
}

template <class F>
void visit_tiles(const CellCall& c, const F& launch) {
  const dim3 grid(static_cast<unsigned>(blocks_of(c.features, tile)),
                  static_cast<unsigned>(blocks_of(c.rows, tile)));
  ops::visit_cell(c.cell, [&]<class Cell>(Cell) { launch.template operator()<Cell>(grid); });
}

/// Calls `launch.operator()<Cell, C>(blocks)`; one kernel serves all floats that are computed in f32.
template <class F>
void visit(const CellCall& c, const F& launch) {
  const unsigned blocks = blocks_for(c.rows * c.features);
  ops::visit_cell(c.cell, [&]<class Cell>(Cell) {
    if (c.dtype == DType::f64)
      launch.template operator()<Cell, double>(blocks);
    else
      launch.template operator()<Cell, float>(blocks);
  });
}

}  // namespace

void launch_cell_step(const CellStepCall& c) {
  visit(c, [&]<class Cell, class C>(unsigned blocks) {
    launch_early(step_kernel<Cell, C>, blocks, threads_per_block, c.stream, c);
  });
}

void launch_cell_grad(const CellGradCall& c) {
  visit(c, [&]<class Cell, class C>(unsigned blocks) {
    launch_early(grad_kernel<Cell, C>, blocks, threads_per_block, c.stream, c);
  });
}

bool FusedProduct::fits(const CellCall& c, std::int64_t gates) {
  constexpr std::int64_t most = std::int64_t{1} << 26;  // multiplications; more are worth a library's kernel
  return c.dtype != DType::f64 && c.rows < (1 << 19) && c.rows * gates * c.features <= most / c.features;
}

void launch_fused_step(const CellStepCall& c, const FusedProduct& p) {
  visit_tiles(c, [&]<class Cell>(dim3 grid) {
    launch_early(fused_step<Cell>, grid, threads_per_block, c.stream, c, p);
  });
}

void launch_fused_grad(const CellGradCall& c, const FusedProduct& p) {
  visit_tiles(c, [&]<class Cell>(dim3 grid) {
    launch_early(fused_grad<Cell>, grid, threads_per_block, c.stream, c, p);
  });
}

void launch_cell_first(const CellGradCall& c, CellState<void*> first) {
  visit(c, [&]<class Cell, class C>(unsigned blocks) {
    launch_early(first_kernel<Cell, C>, blocks, threads_per_block, c.stream, c, first);
  });
}

}  // namespace sherd::cuda
