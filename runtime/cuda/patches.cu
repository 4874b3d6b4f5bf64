#include "runtime/cuda/patches.h"

#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(threads_per_block) gather_windows(const PatchesCall c, std::int64_t n) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  const std::int64_t row = c.channels * c.kernel[0] * c.kernel[1];
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < n;
       i += step) {
    const std::int64_t window = i / row, place = i - window * row;
    const std::int64_t across = window % c.count[1], down = window / c.count[1] % c.count[0],
                       image = window / c.count[1] / c.count[0];
    const std::int64_t dx = place % c.kernel[1], dy = place / c.kernel[1] % c.kernel[0],
                       channel = place / c.kernel[1] / c.kernel[0];
    const std::int64_t y = down * c.stride - c.padding + dy, x = across * c.stride - c.padding + dx;
    const bool inside = y >= 0 && y < c.size[0] && x >= 0 && x < c.size[1];
    static_cast<T*>(c.to)[i] =
        inside
            ? static_cast<const T*>(c.from)[((image * c.channels + channel) * c.size[0] + y) * c.size[1] + x]
            : static_cast<T>(compute_t<T>(0));
  }
}

/// The first window along an axis that sees a pixel at `at`, padding counted.
__device__ std::int64_t first_window(std::int64_t at, std::int64_t kernel, std::int64_t stride) {
  const std::int64_t first = (at - kernel + stride) / stride;
  return first < 0 ? 0 : first;
}

template <class T>
__global__ void __launch_bounds__(threads_per_block) sum_windows(const PatchesCall c, std::int64_t n) {
  using C = compute_t<T>;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  const std::int64_t row = c.channels * c.kernel[0] * c.kernel[1];
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < n;
       i += step) {
    const std::int64_t x = i % c.size[1] + c.padding, y = i / c.size[1] % c.size[0] + c.padding,
                       channel = i / c.size[1] / c.size[0] % c.channels,
                       image = i / c.size[1] / c.size[0] / c.channels;
    C total = 0;
    for (std::int64_t down = first_window(y, c.kernel[0], c.stride);
         down < c.count[0] && down * c.stride <= y; ++down)
      for (std::int64_t across = first_window(x, c.kernel[1], c.stride);
           across < c.count[1] && across * c.stride <= x; ++across) {
        const std::int64_t window = (image * c.count[0] + down) * c.count[1] + across;
        const std::int64_t place =
            (channel * c.kernel[0] + y - down * c.stride) * c.kernel[1] + x - across * c.stride;
        total += widen(static_cast<const T*>(c.from)[window * row + place]);
      }
    static_cast<T*>(c.to)[i] = narrow<T>(total);
  }
}

}  // namespace

void launch_patches(const PatchesCall& c) {
  const std::int64_t n = c.batch * c.count[0] * c.count[1] * c.channels * c.kernel[0] * c.kernel[1];
  for_floating(c.dtype, [&]<class T>() {
    gather_windows<T><<<blocks_for(n), threads_per_block, 0, c.stream>>>(c, n);
  });
}

void launch_patches_grad(const PatchesCall& c) {
  const std::int64_t n = c.batch * c.channels * c.size[0] * c.size[1];
  for_floating(c.dtype,
               [&]<class T>() { sum_windows<T><<<blocks_for(n), threads_per_block, 0, c.stream>>>(c, n); });
}

}  // namespace sherd::cuda
