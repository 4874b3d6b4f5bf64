#include "runtime/cuda/pooling.h"

#include <type_traits>

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

/// Pixels [begin, end) of window `i`, which are counted from `first`, padding included.
struct PixelsOfWindow {
  int first, begin, end;
  __device__ PixelsOfWindow(const PoolCall::Axis& axis, int i, int pixels)
      : first(i * axis.stride - axis.padding), begin(max(first, 0)), end(min(first + axis.kernel, pixels)) {}
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

/// Whether a pixel takes the place of the largest so far: NaN is largest of all, and the first one stays.
template <class C>
__device__ bool is_larger(C value, C best) {
  return value > best || (value != value && best == best);
}

/// What a thread counts the pixels of windows in, for numbers that are kept as N.
template <class N>
using count_t = std::conditional_t<sizeof(N) == 1, int, std::int64_t>;
/// The number in its window of the pixel that lies so far below and right of where the window begins.
template <class N>
__device__ count_t<N> number_at(const PoolCall& c, int below, int right) {
  return count_t<N>{below} * c.across_rule.kernel + right;
}
/// The same of window (i, j) and a pixel that it sees.
template <class N>
__device__ count_t<N> number_in(const PoolCall& c, int i, int j, int row, int column) {
  return number_at<N>(c, row + c.down_rule.padding - i * c.down_rule.stride,
                      column + c.across_rule.padding - j * c.across_rule.stride);
}

template <class T, class N>
__global__ void __launch_bounds__(threads_per_block) max_pool(const PoolCall c) {
  using C = compute_t<T>;
  for_each(c, c.down, c.across, [&](std::int64_t plane, int i, int j) {
    const T* x = static_cast<const T*>(c.x) + plane * c.rows * c.columns;
    const PixelsOfWindow rows(c.down_rule, i, c.rows), columns(c.across_rule, j, c.columns);
    auto number = number_at<N>(c, rows.begin - rows.first, columns.begin - columns.first);
    T largest = x[rows.begin * c.columns + columns.begin];
    C best = widen(largest);
    for (int row = rows.begin; row < rows.end; ++row)
      for (int column = columns.begin; column < columns.end; ++column) {
        const T pixel = x[row * c.columns + column];
        const C value = widen(pixel);
        if (is_larger(value, best))
          best = value, largest = pixel, number = number_at<N>(c, row - rows.first, column - columns.first);
      }
    const std::int64_t to = (plane * c.down + i) * c.across + j;
    static_cast<T*>(c.y)[to] = largest;
    static_cast<N*>(c.numbers)[to] = static_cast<N>(number);
  });
}

template <class T, class N>
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
        if (static_cast<const N*>(c.numbers)[at] == number_in<N>(c, i, j, row, column))
          sum += widen(static_cast<const T*>(c.x)[at]);
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

/// Calls `body(image, i, j, channel)` for this thread's packs of images of `height` x `width`. Numbers are
/// divided once a thread, not for each pack.
template <int V, class F>
__device__ void for_each_pack(const PoolCall& c, int height, int width, const F& body) {
  const int packs = c.channels / V, first = static_cast<int>(threadIdx.x);
  const int column = first / packs, pack = first - column * packs;
  const int columns = threads_per_block / packs, others = threads_per_block - columns * packs;
  const std::int64_t lines = c.planes / c.channels * height;
  for (std::int64_t line = blockIdx.x; line < lines; line += gridDim.x) {
    const std::int64_t image = line / height;
    for (int j = column, p = pack; j < width;) {
      body(image, static_cast<int>(line - image * height), j, p * V);
      j += columns, p += others;
      if (p >= packs) p -= packs, ++j;
    }
  }
}

/// Where the pack of a pixel or window lies in images of `height` x `width`.
__device__ std::int64_t pack_at(const PoolCall& c, std::int64_t image, int height, int width, int i, int j,
                                int channel) {
  return ((image * height + i) * width + j) * c.channels + channel;
}

/// Numbers that lie side by side, with as many bytes at once as a thread loads.
template <class N, int V>
struct Numbers {
  static constexpr int at_once = sizeof(N) == 1 || V == 1 ? V : 2;
  Packed<at_once, N> packs[V / at_once];

  __device__ N& operator[](int k) { return packs[k / at_once].at[k % at_once]; }
  __device__ static Numbers load(const PoolCall& c, std::int64_t at) {
    Numbers all;
#pragma unroll
    for (int k = 0; k < V; k += at_once)
      all.packs[k / at_once] = load_pack<at_once>(static_cast<const N*>(c.numbers) + at + k);
    return all;
  }
  __device__ void store(const PoolCall& c, std::int64_t at) const {
#pragma unroll
    for (int k = 0; k < V; k += at_once) store_pack(static_cast<N*>(c.numbers) + at + k, packs[k / at_once]);
  }
};

/// Of windows that are tiles: their pixels are loaded at once.
template <class T, class N, int V, int side>
__global__ void __launch_bounds__(threads_per_block) max_pool_of_tiles(const PoolCall c) {
  using C = compute_t<T>;
  for_each_pack<V>(c, c.down, c.across, [&](std::int64_t image, int i, int j, int channel) {
    const T* const x =
        static_cast<const T*>(c.x) + pack_at(c, image, c.rows, c.columns, i * side, j * side, channel);
    Packed<V, T> pixels[side * side];
#pragma unroll
    for (int k = 0; k < side * side; ++k)
      pixels[k] = load_pack<V>(x + (std::int64_t{k / side} * c.columns + k % side) * c.channels);
    Packed<V, T> largest = pixels[0];
    Numbers<N, V> numbers{};
#pragma unroll
    for (int k = 1; k < side * side; ++k)
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const C value = widen(pixels[k].at[v]), best = widen(largest.at[v]);
        const bool replaces = is_larger(value, best);
        largest.at[v] = replaces ? pixels[k].at[v] : largest.at[v];
        numbers[v] = replaces ? static_cast<N>(k) : numbers[v];
      }
    const std::int64_t to = pack_at(c, image, c.down, c.across, i, j, channel);
    store_pack(static_cast<T*>(c.y) + to, largest);
    numbers.store(c, to);
  });
}
/// A thread has a window's pixels, of which one has its gradient; a pixel beyond the last window has none.
template <class T, class N, int V, int side>
__global__ void __launch_bounds__(threads_per_block) max_pool_grad_of_tiles(const PoolCall c) {
  using C = compute_t<T>;
  const int down = blocks_of(c.rows, side), across = blocks_of(c.columns, side);
  for_each_pack<V>(c, down, across, [&](std::int64_t image, int i, int j, int channel) {
    const bool seen = i < c.down && j < c.across;
    Numbers<N, V> numbers{};
    C up[V] = {};
    if (seen) {
      const std::int64_t from = pack_at(c, image, c.down, c.across, i, j, channel);
      numbers = Numbers<N, V>::load(c, from);
      Raw<V, T>::load(static_cast<const T*>(c.x) + from).widen_to(up);
    }
#pragma unroll
    for (int k = 0; k < side * side; ++k) {
      const int row = i * side + k / side, column = j * side + k % side;
      if (row >= c.rows || column >= c.columns) continue;
      C own[V];
#pragma unroll
      for (int v = 0; v < V; ++v) own[v] = seen && numbers[v] == k ? C(0) + up[v] : C(0);
      Raw<V, T>::of(own).store(static_cast<T*>(c.y) +
                               pack_at(c, image, c.rows, c.columns, row, column, channel));
    }
  });
}

template <class T, class N, int V>
__global__ void __launch_bounds__(threads_per_block) max_pool_last(const PoolCall c) {
  using C = compute_t<T>;
  for_each_pack<V>(c, c.down, c.across, [&](std::int64_t image, int i, int j, int channel) {
    const T* x = static_cast<const T*>(c.x);
    const PixelsOfWindow rows(c.down_rule, i, c.rows), columns(c.across_rule, j, c.columns);
    Packed<V, T> largest =
        load_pack<V>(x + pack_at(c, image, c.rows, c.columns, rows.begin, columns.begin, channel));
    count_t<N> numbers[V];
#pragma unroll
    for (auto& number : numbers)
      number = number_at<N>(c, rows.begin - rows.first, columns.begin - columns.first);
    for (int row = rows.begin; row < rows.end; ++row)
#pragma unroll 3
      for (int column = columns.begin; column < columns.end; ++column) {
        const auto pixels = load_pack<V>(x + pack_at(c, image, c.rows, c.columns, row, column, channel));
        const auto number = number_at<N>(c, row - rows.first, column - columns.first);
#pragma unroll
        for (int k = 0; k < V; ++k) {
          const C value = widen(pixels.at[k]), best = widen(largest.at[k]);
          const bool replaces = is_larger(value, best);
          largest.at[k] = replaces ? pixels.at[k] : largest.at[k];
          numbers[k] = replaces ? number : numbers[k];
        }
      }
    const std::int64_t to = pack_at(c, image, c.down, c.across, i, j, channel);
    store_pack(static_cast<T*>(c.y) + to, largest);
    Numbers<N, V> kept;
#pragma unroll
    for (int k = 0; k < V; ++k) kept[k] = static_cast<N>(numbers[k]);
    kept.store(c, to);
  });
}

template <class T, class N, int V>
__global__ void __launch_bounds__(threads_per_block) max_pool_grad_last(const PoolCall c) {
  using C = compute_t<T>;
  for_each_pack<V>(c, c.rows, c.columns, [&](std::int64_t image, int row, int column, int channel) {
    const WindowsOfPixel down(c.down_rule, row, c.down), across(c.across_rule, column, c.across);
    C sums[V] = {};
    for (int i = down.begin; i < down.end; ++i)
      for (int j = across.begin; j < across.end; ++j) {
        const std::int64_t from = pack_at(c, image, c.down, c.across, i, j, channel);
        auto numbers = Numbers<N, V>::load(c, from);
        const auto own = number_in<N>(c, i, j, row, column);
        C up[V];
        Raw<V, T>::load(static_cast<const T*>(c.x) + from).widen_to(up);
#pragma unroll
        for (int k = 0; k < V; ++k)
          if (numbers[k] == own) sums[k] += up[k];
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

/// Whether windows are tiles of that side, in packs.
template <int side>
bool has_tiles_of(const PoolCall& c) {
  const auto is = [](const PoolCall::Axis& a) {
    return a.kernel == side && a.stride == side && a.padding == 0;
  };
  bool packs = false;
  for_floating(c.dtype, [&]<class T>() {
    const auto data = [](const void* p) { return static_cast<const T*>(p); };
    packs = wide_rows<T>(c.channels, data(c.x), data(c.y), data(c.numbers));
  });
  // A last window that sees less than a tile, in ceil mode, is none.
  return c.channels > 0 && is(c.down_rule) && is(c.across_rule) && packs && c.down * side <= c.rows &&
         c.across * side <= c.columns;
}
/// Calls `kernel.operator()<T, V>(grid)` for lines of tiles, in packs.
template <class F>
void launch_tiles(const PoolCall& c, int lines, F&& kernel) {
  const dim3 grid(looping_grid_of(c.planes / c.channels * lines));
  for_floating(c.dtype, [&]<class T>() { kernel.template operator()<T, wide_count<T>>(grid); });
}

/// Calls `body.operator()<N>()`.
template <class F>
void with_numbers(const PoolCall& c, F&& body) {
  c.few_numbers ? body.template operator()<std::uint8_t>() : body.template operator()<std::int64_t>();
}

/// Calls `kernel.operator()<T, V>(grid)` for an output of images of `height` rows.
template <class F>
void launch_last(const PoolCall& c, int height, F&& kernel) {
  const dim3 grid(looping_grid_of(c.planes / c.channels * height));
  for_floating(c.dtype, [&]<class T>() {
    constexpr int V = wide_count<T>;
    const auto data = [](const void* p) { return static_cast<const T*>(p); };
    if (wide_rows<T>(c.channels, data(c.x), data(c.y), data(c.numbers)))
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
  if (has_tiles_of<2>(c))
    return launch_tiles(c, c.down, [&]<class T, int V>(dim3 grid) {
      max_pool_of_tiles<T, std::uint8_t, V, 2><<<grid, threads_per_block, 0, c.stream>>>(c);
    });
  with_numbers(c, [&]<class N>() {
    if (c.channels > 0)
      return launch_last(c, c.down, [&]<class T, int V>(dim3 grid) {
        max_pool_last<T, N, V><<<grid, threads_per_block, 0, c.stream>>>(c);
      });
    launch(c, std::int64_t{c.down} * c.across,
           [&]<class T>(dim3 grid) { max_pool<T, N><<<grid, threads_per_block, 0, c.stream>>>(c); });
  });
}
void launch_max_pool_grad(const PoolCall& c) {
  if (has_tiles_of<2>(c))
    return launch_tiles(c, blocks_of(c.rows, 2), [&]<class T, int V>(dim3 grid) {
      max_pool_grad_of_tiles<T, std::uint8_t, V, 2><<<grid, threads_per_block, 0, c.stream>>>(c);
    });
  with_numbers(c, [&]<class N>() {
    if (c.channels > 0)
      return launch_last(c, c.rows, [&]<class T, int V>(dim3 grid) {
        max_pool_grad_last<T, N, V><<<grid, threads_per_block, 0, c.stream>>>(c);
      });
    launch(c, std::int64_t{c.rows} * c.columns,
           [&]<class T>(dim3 grid) { max_pool_grad<T, N><<<grid, threads_per_block, 0, c.stream>>>(c); });
  });
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
