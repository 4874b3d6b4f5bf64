#include "runtime/cuda/pooling.h"

#include "runtime/cuda/block.cuh"

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

// ---- channels side by side: a thread has `V` of them of a pixel or a window, and a block a line of those

/// Calls `body(image, i, j, channel)` for this thread's packs of images of `height` x `width`.
template <int V, class F>
__device__ void for_each_pack(const PoolCall& c, int height, int width, const F& body) {
  const int packs = c.channels / V, of_line = width * packs;
  const std::int64_t lines = c.planes / c.channels * height;
  for (std::int64_t line = blockIdx.x; line < lines; line += gridDim.x) {
    const std::int64_t image = line / height;
    for (int t = static_cast<int>(threadIdx.x); t < of_line; t += threads_per_block)
      body(image, static_cast<int>(line - image * height), t / packs, t % packs * V);
  }
}

/// Where the pack of a pixel or window lies in images of `height` x `width`.
__device__ std::int64_t pack_at(const PoolCall& c, std::int64_t image, int height, int width, int i, int j,
                                int channel) {
  return ((image * height + i) * width + j) * c.channels + channel;
}

template <int V>
__device__ Raw<V, std::int64_t> places_at(const PoolCall& c, std::int64_t at) {
  Raw<V, std::int64_t> all;
  if constexpr (V == 1) {
    all.at[0] = c.places[at];
  } else {
#pragma unroll
    for (int j = 0; j < V; j += 2) {
      const auto two = load_pack<2>(c.places + at + j);
      all.at[j] = two.at[0], all.at[j + 1] = two.at[1];
    }
  }
  return all;
}
template <int V>
__device__ void store_places(const PoolCall& c, std::int64_t at, const int (&places)[V]) {
  if constexpr (V == 1) {
    c.places[at] = places[0];
  } else {
#pragma unroll
    for (int j = 0; j < V; j += 2)
      store_pack(c.places + at + j, Packed<2, std::int64_t>{{places[j], places[j + 1]}});
  }
}

template <class T, int V>
__global__ void __launch_bounds__(threads_per_block) max_pool_last(const PoolCall c) {
  using C = compute_t<T>;
  for_each_pack<V>(c, c.down, c.across, [&](std::int64_t image, int i, int j, int channel) {
    const T* x = static_cast<const T*>(c.x);
    const PixelsOfWindow rows(c.down_rule, i, c.rows), columns(c.across_rule, j, c.columns);
    Packed<V, T> largest =
        load_pack<V>(x + pack_at(c, image, c.rows, c.columns, rows.begin, columns.begin, channel));
    int places[V];
#pragma unroll
    for (int& place : places) place = rows.begin * c.columns + columns.begin;
    for (int row = rows.begin; row < rows.end; ++row)
#pragma unroll 3
      for (int column = columns.begin; column < columns.end; ++column) {
        const auto pixels = load_pack<V>(x + pack_at(c, image, c.rows, c.columns, row, column, channel));
#pragma unroll
        for (int k = 0; k < V; ++k) {
          const C value = widen(pixels.at[k]), best = widen(largest.at[k]);
          const bool replaces = value > best || (value != value && best == best);
          largest.at[k] = replaces ? pixels.at[k] : largest.at[k];
          places[k] = replaces ? row * c.columns + column : places[k];
        }
      }
    const std::int64_t to = pack_at(c, image, c.down, c.across, i, j, channel);
    store_pack(static_cast<T*>(c.y) + to, largest);
    store_places<V>(c, to, places);
  });
}

template <class T, int V>
__global__ void __launch_bounds__(threads_per_block) max_pool_grad_last(const PoolCall c) {
  using C = compute_t<T>;
  for_each_pack<V>(c, c.rows, c.columns, [&](std::int64_t image, int row, int column, int channel) {
    const WindowsOfPixel down(c.down_rule, row, c.down), across(c.across_rule, column, c.across);
    const int pixel = row * c.columns + column;
    C sums[V] = {};
    for (int i = down.begin; i < down.end; ++i)
      for (int j = across.begin; j < across.end; ++j) {
        const std::int64_t from = pack_at(c, image, c.down, c.across, i, j, channel);
        const auto places = places_at<V>(c, from);
        C up[V];
        Raw<V, T>::load(static_cast<const T*>(c.x) + from).widen_to(up);
#pragma unroll
        for (int k = 0; k < V; ++k)
          if (places.at[k] == pixel) sums[k] += up[k];
      }
    Raw<V, T>::of(sums).store(static_cast<T*>(c.y) +
                              pack_at(c, image, c.rows, c.columns, row, column, channel));
  });
}

template <class T, int V>
__global__ void __launch_bounds__(threads_per_block) avg_pool_last(const PoolCall c) {
  using C = compute_t<T>;
  const C area = static_cast<C>(c.down_rule.kernel) * static_cast<C>(c.across_rule.kernel);
  for_each_pack<V>(c, c.down, c.across, [&](std::int64_t image, int i, int j, int channel) {
    const PixelsOfWindow rows(c.down_rule, i, c.rows), columns(c.across_rule, j, c.columns);
    C sums[V] = {};
    for (int row = rows.begin; row < rows.end; ++row)
#pragma unroll 4
      for (int column = columns.begin; column < columns.end; ++column) {
        C value[V];
        Raw<V, T>::load(static_cast<const T*>(c.x) +
                        pack_at(c, image, c.rows, c.columns, row, column, channel))
            .widen_to(value);
#pragma unroll
        for (int k = 0; k < V; ++k) sums[k] += value[k];
      }
#pragma unroll
    for (C& sum : sums) sum /= area;
    Raw<V, T>::of(sums).store(static_cast<T*>(c.y) + pack_at(c, image, c.down, c.across, i, j, channel));
  });
}

template <class T, int V>
__global__ void __launch_bounds__(threads_per_block) avg_pool_grad_last(const PoolCall c) {
  using C = compute_t<T>;
  const C area = static_cast<C>(c.down_rule.kernel) * static_cast<C>(c.across_rule.kernel);
  for_each_pack<V>(c, c.rows, c.columns, [&](std::int64_t image, int row, int column, int channel) {
    const WindowsOfPixel down(c.down_rule, row, c.down), across(c.across_rule, column, c.across);
    C sums[V] = {};
    for (int i = down.begin; i < down.end; ++i)
      for (int j = across.begin; j < across.end; ++j) {
        C up[V];
        Raw<V, T>::load(static_cast<const T*>(c.x) + pack_at(c, image, c.down, c.across, i, j, channel))
            .widen_to(up);
#pragma unroll
        for (int k = 0; k < V; ++k) sums[k] += up[k] / area;
      }
    Raw<V, T>::of(sums).store(static_cast<T*>(c.y) +
                              pack_at(c, image, c.rows, c.columns, row, column, channel));
  });
}

/// Calls `kernel.operator()<T, V>(grid)` for an output of images of `height` rows.
template <class F>
void launch_last(const PoolCall& c, int height, F&& kernel) {
  const dim3 grid(looping_grid_of(c.planes / c.channels * height));
  for_floating(c.dtype, [&]<class T>() {
    constexpr int V = wide_count<T>;
    const auto data = [](const void* p) { return static_cast<const T*>(p); };
    if (wide_rows<T>(c.channels, data(c.x), data(c.y), data(c.places)))
      kernel.template operator()<T, V>(grid);
    else
      kernel.template operator()<T, 1>(grid);
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
  if (c.channels > 0)
    return launch_last(c, c.down, [&]<class T, int V>(dim3 grid) {
      max_pool_last<T, V><<<grid, threads_per_block, 0, c.stream>>>(c);
    });
  launch(c, std::int64_t{c.down} * c.across,
         [&]<class T>(dim3 grid) { max_pool<T><<<grid, threads_per_block, 0, c.stream>>>(c); });
}
void launch_max_pool_grad(const PoolCall& c) {
  if (c.channels > 0)
    return launch_last(c, c.rows, [&]<class T, int V>(dim3 grid) {
      max_pool_grad_last<T, V><<<grid, threads_per_block, 0, c.stream>>>(c);
    });
  launch(c, std::int64_t{c.rows} * c.columns,
         [&]<class T>(dim3 grid) { max_pool_grad<T><<<grid, threads_per_block, 0, c.stream>>>(c); });
}
void launch_avg_pool(const PoolCall& c) {
  if (c.channels > 0)
    return launch_last(c, c.down, [&]<class T, int V>(dim3 grid) {
      avg_pool_last<T, V><<<grid, threads_per_block, 0, c.stream>>>(c);
    });
  launch(c, std::int64_t{c.down} * c.across,
         [&]<class T>(dim3 grid) { avg_pool<T><<<grid, threads_per_block, 0, c.stream>>>(c); });
}
void launch_avg_pool_grad(const PoolCall& c) {
  if (c.channels > 0)
    return launch_last(c, c.rows, [&]<class T, int V>(dim3 grid) {
      avg_pool_grad_last<T, V><<<grid, threads_per_block, 0, c.stream>>>(c);
    });
  launch(c, std::int64_t{c.rows} * c.columns,
         [&]<class T>(dim3 grid) { avg_pool_grad<T><<<grid, threads_per_block, 0, c.stream>>>(c); });
}

}  // namespace sherd::cuda
