#include "runtime/cuda/recurrent.h"

#include "runtime/cuda/elementwise.cuh"

namespace sherd::cuda {
namespace {

using ops::CellState;

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
__global__ void __launch_bounds__(threads_per_block) step_kernel(const __grid_constant__ CellStepCall c) {
  wait_for_earlier();
  for_features(c, [&](const Feature& f) {
    C x[Cell::gates], m[Cell::gates];
#pragma unroll
    for (int k = 0; k < Cell::gates; ++k) {
      x[k] = load_as<C>(c.x, f.gate(k, Cell::gates), c.dtype);
      m[k] = load_as<C>(c.m, f.gate(k, Cell::gates), c.dtype);
    }
    const auto step = Cell::step(x, m, load_state<Cell, C>(c.before, f, c.dtype));
    store_as(c.after.hidden, f.at, c.dtype, step.state.hidden);
    if constexpr (Cell::has_cell) store_as(c.after.cell, f.at, c.dtype, step.state.cell);
#pragma unroll
    for (int k = 0; k < Cell::kept; ++k) store_as(c.kept, f.gate(k, Cell::kept), c.dtype, step.kept[k]);
  });
}

/// What the steps after give to the state whose number is `at`.
template <class Cell, class C>
__device__ CellState<C> collected(const CellGradCall& c, std::int64_t at) {
  CellState<C> sum{C(0), C(0)};
  if (c.last) return sum;
  if constexpr (Cell::passes_hidden) sum.hidden = static_cast<const C*>(c.sums.hidden)[at];
  if constexpr (Cell::has_cell) sum.cell = static_cast<const C*>(c.sums.cell)[at];
  sum.hidden += load_as<C>(c.product, at, c.dtype);
  return sum;
}

template <class Cell, class C>
__global__ void __launch_bounds__(threads_per_block) grad_kernel(const __grid_constant__ CellGradCall c) {
  wait_for_earlier();
  for_features(c, [&](const Feature& f) {
    CellState<C> gy = collected<Cell, C>(c, f.at);
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
  });
}

template <class Cell, class C>
__global__ void __launch_bounds__(threads_per_block)
    first_kernel(const __grid_constant__ CellGradCall c, const CellState<void*> first) {
  wait_for_earlier();
  for_features(c, [&](const Feature& f) {
    const CellState<C> sum = collected<Cell, C>(c, f.at);
    store_as(first.hidden, f.at, c.dtype, sum.hidden);
    if constexpr (Cell::has_cell) store_as(first.cell, f.at, c.dtype, sum.cell);
  });
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

void launch_cell_first(const CellGradCall& c, CellState<void*> first) {
  visit(c, [&]<class Cell, class C>(unsigned blocks) {
    launch_early(first_kernel<Cell, C>, blocks, threads_per_block, c.stream, c, first);
  });
}

}  // namespace sherd::cuda
