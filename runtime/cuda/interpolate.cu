#include "runtime/cuda/interpolate.h"

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/launch.cuh"

namespace sherd::cuda {
namespace {

using ops::PixelPair;
using ops::ResampledAxis;

/// The pixel whose number is `i` in images of `rows` x `columns`.
struct Pixel {
  std::int64_t plane, row, column;
  __device__ Pixel(std::int64_t i, std::int64_t rows, std::int64_t columns, bool small) {
    const std::int64_t line = small ? static_cast<std::uint32_t>(i) / static_cast<std::uint32_t>(columns)
                                    : i / columns;  // division in 64 bits is slow
    column = i - line * columns;
    plane = small ? static_cast<std::uint32_t>(line) / static_cast<std::uint32_t>(rows) : line / rows;
    row = line - plane * rows;
  }
};

/// Calls `body(i, pixel)` for packs of `V` neighbouring pixels of a row.
template <int V, class F>
__device__ void for_pixels(std::int64_t planes, std::int64_t rows, std::int64_t columns, const F& body) {
  const std::int64_t n = planes * rows * columns,
                     step = static_cast<std::int64_t>(gridDim.x) * threads_per_block * V;
  const bool small = n <= 0x7fffffff;
  for (std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x) * V; i < n;
       i += step)
    body(i, Pixel(i, rows, columns, small));
}

template <int V, class Bits>
__global__ void __launch_bounds__(threads_per_block)
    nearest(const __grid_constant__ InterpolateCall c, float down, float across) {
  wait_for_earlier();
  for_pixels<V>(c.planes, c.down.to, c.across.to, [&](std::int64_t i, const Pixel& at) {
    const Bits* row = static_cast<const Bits*>(c.from) +
                      (at.plane * c.down.from + c.down.pair(at.row, down).first) * c.across.from;
    Packed<V, Bits> pack;
#pragma unroll
    for (int j = 0; j < V; ++j) pack.at[j] = row[c.across.pair(at.column + j, across).first];
    store_pack(static_cast<Bits*>(c.to) + i, pack);
  });
}

template <int V, class T, class C>
__global__ void __launch_bounds__(threads_per_block)
    between(const __grid_constant__ InterpolateCall c, C down, C across) {
  wait_for_earlier();
  for_pixels<V>(c.planes, c.down.to, c.across.to, [&](std::int64_t i, const Pixel& at) {
    const T* plane = static_cast<const T*>(c.from) + at.plane * c.down.from * c.across.from;
    const PixelPair<C> r = c.down.pair(at.row, down);
    const T *first = plane + r.first * c.across.from, *second = plane + r.second * c.across.from;
    // Down and then across, in the order of the CPU.
    const auto column = [&](std::int64_t k) {
      return c.down.stays() ? widen(first[k])
                            : widen(first[k]) * (C(1) - r.share) + widen(second[k]) * r.share;
    };
    Packed<V, T> pack;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (c.across.stays()) {
        pack.at[j] = narrow<T>(column(at.column + j));
      } else {
        const PixelPair<C> k = c.across.pair(at.column + j, across);
        pack.at[j] = narrow<T>(column(k.first) * (C(1) - k.share) + column(k.second) * k.share);
      }
    }
    store_pack(static_cast<T*>(c.to) + i, pack);
  });
}

/// Which results a pixel is a part of: [begin, end).
template <class P>
struct ResultsOf {
  std::int64_t begin, end;
  __device__ ResultsOf(const ResampledAxis& axis, std::int64_t pixel, P step)
      : begin(axis.stays() ? pixel : axis.first_after(axis.lines ? pixel - 1 : pixel, step)),
        end(axis.stays() ? pixel + 1 : axis.first_after(pixel + 1, step)) {}
};

template <class C, class P>
__device__ C weight_of(const ResampledAxis& axis, std::int64_t result, std::int64_t pixel, P step) {
  return axis.stays() || !axis.lines ? C(1) : C(ResampledAxis::weight(axis.pair(result, step), pixel));
}

/// Each pixel gathers its results, row by row: no two threads add to one. `P`: in which pixels are found.
template <class T, class P>
__global__ void __launch_bounds__(threads_per_block)
    gradient(const __grid_constant__ InterpolateCall c, P down, P across) {
  using C = compute_t<T>;
  wait_for_earlier();
  for_pixels<1>(c.planes, c.down.from, c.across.from, [&](std::int64_t i, const Pixel& at) {
    const ResultsOf<P> rows(c.down, at.row, down), columns(c.across, at.column, across);
    C total = 0;
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      const T* row = static_cast<const T*>(c.from) + (at.plane * c.down.to + r) * c.across.to;
      C sum = 0;
      for (std::int64_t k = columns.begin; k < columns.end; ++k)
        sum += widen(row[k]) * weight_of<C>(c.across, k, at.column, across);
      total += sum * weight_of<C>(c.down, r, at.row, down);
    }
    static_cast<T*>(c.to)[i] = narrow<T>(total);
  });
}

/// Calls `launch.operator()<V>(blocks)` with as many results at once as rows and memory have room for.
template <class T, class F>
void by_packs(const InterpolateCall& c, const F& launch) {
  constexpr int V = 4;
  const std::int64_t n = c.planes * c.down.to * c.across.to;
  if (c.across.to % V == 0 && reinterpret_cast<std::uintptr_t>(c.to) % (V * sizeof(T)) == 0)
    launch.template operator()<V>(blocks_for(n / V));
  else
    launch.template operator()<1>(blocks_for(n));
}

template <class Bits>
void launch_nearest(const InterpolateCall& c) {
  by_packs<Bits>(c, [&]<int V>(unsigned blocks) {
    launch_early(nearest<V, Bits>, blocks, threads_per_block, c.stream, c, c.down.step<float>(),
                 c.across.step<float>());
  });
}

}  // namespace

void launch_interpolate(const InterpolateCall& c) {
  if (c.down.lines)
    return for_floating(c.dtype, [&]<class T>() {
      using C = compute_t<T>;
      by_packs<T>(c, [&]<int V>(unsigned blocks) {
        launch_early(between<V, T, C>, blocks, threads_per_block, c.stream, c, c.down.step<C>(),
                     c.across.step<C>());
      });
    });
  switch (size_of(c.dtype)) {
    case 1:
      return launch_nearest<std::uint8_t>(c);
    case 2:
      return launch_nearest<std::uint16_t>(c);
    case 4:
      return launch_nearest<std::uint32_t>(c);
    default:
      return launch_nearest<std::uint64_t>(c);
  }
}

void launch_interpolate_grad(const InterpolateCall& c) {
  const unsigned blocks = blocks_for(c.planes * c.down.from * c.across.from);
  for_floating(c.dtype, [&]<class T>() {
    const auto launch = [&]<class P>() {
      launch_early(gradient<T, P>, blocks, threads_per_block, c.stream, c, c.down.step<P>(),
                   c.across.step<P>());
    };
    if (std::is_same_v<T, double> && c.down.lines)
      launch.template operator()<compute_t<T>>();
    else
      launch.template operator()<float>();
  });
}

}  // namespace sherd::cuda
