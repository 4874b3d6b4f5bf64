#include "runtime/cuda/pooling.h"

#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

/// Calls `body(plane, i, j)` for the elements (plane, i, j) of `height` x `width` that are this thread's.
/// A plane is a line of blocks, so only numbers within one are divided, in 32 bits; small ones share a block.
template <class F>
__device__ void for_each(const PoolCall& c, int height, int width, const F& body) {
  const auto area = static_cast<std::uint32_t>(height) * static_cast<std::uint32_t>(width);
  const std::uint32_t planes_of_block = area < threads_per_block ? threads_per_block / area : 1;
  const std::uint32_t threads = planes_of_block > 1 ? planes_of_block * area : threads_per_block;
  if (threadIdx.x >= threads) return;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * planes_of_block; first < c.planes;
       first += static_cast<std::int64_t>(gridDim.x) * planes_of_block) {
    if (planes_of_block > 1) {
      const std::uint32_t which = threadIdx.x / area, at = threadIdx.x % area;
      if (first + which < c.planes)
        body(first + which, static_cast<int>(at / static_cast<std::uint32_t>(width)),
             static_cast<int>(at % static_cast<std::uint32_t>(width)));
    } else {
      for (std::uint32_t at = blockIdx.y * threads + threadIdx.x; at < area; at += gridDim.y * threads)
        body(first, static_cast<int>(at / static_cast<std::uint32_t>(width)),
             static_cast<int>(at % static_cast<std::uint32_t>(width)));
    }
  }
}

/// Pixels [begin, end) of window `i`.
struct PixelsOfWindow {
  int begin, end;
  __device__ PixelsOfWindow(const PoolCall::Axis& axis, int i, int pixels)
      : begin(max(i * axis.stride - axis.padding, 0)),
        end(min(i * axis.stride - axis.padding + axis.kernel, pixels)) {}
};
/// Windows [begin, end) that see pixel `i`.
struct WindowsOfPixel {
  int begin, end;
  __device__ WindowsOfPixel(const PoolCall::Axis& axis, int i, int windows) {
    const int past =
        i + axis.padding - axis.kernel;  // windows that begin at or before it end before the pixel
    begin = past < 0 ? 0 : past / axis.stride + 1;
    end = min((i + axis.padding) / axis.stride + 1, windows);
  }
};

template <class T>
__global__ void __launch_bounds__(threads_per_block) max_pool(const PoolCall c) {
  using C = compute_t<T>;
  for_each(c, c.down, c.across, [&](std::int64_t plane, int i, int j) {
    const T* x = static_cast<const T*>(c.x) + plane * c.rows * c.columns;
    const PixelsOfWindow rows(c.down_rule, i, c.rows), columns(c.across_rule, j, c.columns);
    int place = rows.begin * c.columns + columns.begin;
    T largest = x[place];
    C best = widen(largest);
    for (int row = rows.begin; row < rows.end; ++row)
      for (int column = columns.begin; column < columns.end; ++column) {
        const int at = row * c.columns + column;
        const T pixel = x[at];
        const C value = widen(pixel);
        if (value > best || (value != value && best == best)) best = value, largest = pixel, place = at;
      }
    const std::int64_t to = (plane * c.down + i) * c.across + j;
    static_cast<T*>(c.y)[to] = largest;
    c.places[to] = place;
  });
}

template <class T>
__global__ void __launch_bounds__(threads_per_block) max_pool_grad(const PoolCall c) {
  using C = compute_t<T>;
  for_each(c, c.rows, c.columns, [&](std::int64_t plane, int row, int column) {
    const std::int64_t first = plane * c.down * c.across;
    const WindowsOfPixel down(c.down_rule, row, c.down), across(c.across_rule, column, c.across);
    const int pixel = row * c.columns + column;
    C sum = 0;
    for (int i = down.begin; i < down.end; ++i)
      for (int j = across.begin; j < across.end; ++j) {
        const std::int64_t at = first + i * c.across + j;
        if (c.places[at] == pixel) sum += widen(static_cast<const T*>(c.x)[at]);
      }
    static_cast<T*>(c.y)[plane * c.rows * c.columns + pixel] = narrow<T>(sum);
  });
}

template <class T>
__global__ void __launch_bounds__(threads_per_block) avg_pool(const PoolCall c) {
  using C = compute_t<T>;
  const C area = static_cast<C>(c.down_rule.kernel) * static_cast<C>(c.across_rule.kernel);
  for_each(c, c.down, c.across, [&](std::int64_t plane, int i, int j) {
    const T* x = static_cast<const T*>(c.x) + plane * c.rows * c.columns;
    const PixelsOfWindow rows(c.down_rule, i, c.rows), columns(c.across_rule, j, c.columns);
    C sum = 0;
    for (int row = rows.begin; row < rows.end; ++row)
      for (int column = columns.begin; column < columns.end; ++column)
        sum += widen(x[row * c.columns + column]);
    static_cast<T*>(c.y)[(plane * c.down + i) * c.across + j] = narrow<T>(sum / area);
  });
}

template <class T>
__global__ void __launch_bounds__(threads_per_block) avg_pool_grad(const PoolCall c) {
  using C = compute_t<T>;
  const C area = static_cast<C>(c.down_rule.kernel) * static_cast<C>(c.across_rule.kernel);
  for_each(c, c.rows, c.columns, [&](std::int64_t plane, int row, int column) {
    const T* gy = static_cast<const T*>(c.x) + plane * c.down * c.across;
    const WindowsOfPixel down(c.down_rule, row, c.down), across(c.across_rule, column, c.across);
    C sum = 0;
    for (int i = down.begin; i < down.end; ++i)
      for (int j = across.begin; j < across.end; ++j) sum += widen(gy[i * c.across + j]) / area;
    static_cast<T*>(c.y)[(plane * c.rows + row) * c.columns + column] = narrow<T>(sum);
  });
}

/// Calls `kernel.operator()<T>(grid)` for an output of planes of `area`.
template <class F>
void launch(const PoolCall& c, std::int64_t area, F&& kernel) {
  const std::int64_t planes_of_block = area < threads_per_block ? threads_per_block / area : 1;
  const std::int64_t down = blocks_of(area, threads_per_block);
  constexpr std::int64_t most_down = 64;
  const dim3 grid(looping_grid_of(blocks_of(c.planes, planes_of_block)),
                  static_cast<unsigned>(down < most_down ? down : most_down));
  for_floating(c.dtype, [&]<class T>() { kernel.template operator()<T>(grid); });
}

}  // namespace

void launch_max_pool(const PoolCall& c) {
  launch(c, std::int64_t{c.down} * c.across,
         [&]<class T>(dim3 grid) { max_pool<T><<<grid, threads_per_block, 0, c.stream>>>(c); });
}
void launch_max_pool_grad(const PoolCall& c) {
  launch(c, std::int64_t{c.rows} * c.columns,
         [&]<class T>(dim3 grid) { max_pool_grad<T><<<grid, threads_per_block, 0, c.stream>>>(c); });
}
void launch_avg_pool(const PoolCall& c) {
  launch(c, std::int64_t{c.down} * c.across,
         [&]<class T>(dim3 grid) { avg_pool<T><<<grid, threads_per_block, 0, c.stream>>>(c); });
}
void launch_avg_pool_grad(const PoolCall& c) {
  launch(c, std::int64_t{c.rows} * c.columns,
         [&]<class T>(dim3 grid) { avg_pool_grad<T><<<grid, threads_per_block, 0, c.stream>>>(c); });
}

}  // namespace sherd::cuda
