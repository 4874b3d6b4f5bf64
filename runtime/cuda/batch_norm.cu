#include "runtime/cuda/batch_norm.h"

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

constexpr int block = 256;

/// A block's threads lie over 32 channels side by side, as neighbouring elements belong to neighbouring
/// channels.
struct Tile {
  static constexpr int across = 32, along = block / across;
  const BatchNormCall& c;
  int x = static_cast<int>(threadIdx.x) % across, y = static_cast<int>(threadIdx.x) / across;
  std::int64_t channel = static_cast<std::int64_t>(blockIdx.x) * across + x;

  __device__ explicit Tile(const BatchNormCall& call) : c(call) {}
  __device__ bool inside() const { return channel < c.channels; }
  /// Calls `body(offset)` for this thread's elements of its channel.
  template <class F>
  __device__ void for_each(const F& body) const {
    if (!inside()) return;
    for (std::int64_t i = y; i < c.batch; i += along) body(i * c.channels + channel);
  }
  /// The sum of the channel's threads, in each of them.
  __device__ double sum(double mine, double (&shared)[block]) const {
    __syncthreads();
    shared[threadIdx.x] = mine;
    for (int half = along / 2; half > 0; half /= 2) {
      __syncthreads();
      if (y < half) shared[threadIdx.x] += shared[threadIdx.x + half * across];
    }
    __syncthreads();
    return shared[x];
  }
};

template <class T>
__global__ void __launch_bounds__(block) statistics(const BatchNormCall c) {
  using C = compute_t<T>;
  __shared__ double shared[block];
  const Tile tile(c);
  const T* x = static_cast<const T*>(c.x);
  const auto elements = static_cast<double>(c.batch);
  double total = 0, squares = 0;
  tile.for_each([&](std::int64_t i) { total += static_cast<double>(static_cast<C>(x[i])); });
  const C mean = static_cast<C>(tile.sum(total, shared) / elements);
  tile.for_each([&](std::int64_t i) {
    const C d = widen(x[i]) - mean;
    squares += static_cast<double>(d * d);
  });
  const C variance = static_cast<C>(tile.sum(squares, shared) / elements);
  if (tile.y != 0 || !tile.inside()) return;
  static_cast<C*>(c.mean)[tile.channel] = mean;
  static_cast<C*>(c.variance)[tile.channel] = variance;
}

/// 1 / deviation of a channel.
template <class T, class C = compute_t<T>>
__device__ C rstd_of(const BatchNormCall& c, std::int64_t channel) {
  return C(1) / std::sqrt(static_cast<const C*>(c.variance)[channel] + static_cast<C>(c.eps));
}
/// That times the weight.
template <class T, class C = compute_t<T>>
__device__ C factor_of(const BatchNormCall& c, std::int64_t channel) {
  return rstd_of<T>(c, channel) * (c.weight ? static_cast<const C*>(c.weight)[channel] : C(1));
}

template <class T>
__global__ void __launch_bounds__(block) normalise(const BatchNormCall c, std::int64_t n) {
  using C = compute_t<T>;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * block + threadIdx.x; i < n; i += step) {
    const std::int64_t channel = i % c.channels;
    const C d = widen(static_cast<const T*>(c.x)[i]) - static_cast<const C*>(c.mean)[channel];
    const C shift = c.bias ? static_cast<const C*>(c.bias)[channel] : C(0);
    static_cast<T*>(c.y)[i] = narrow<T>(std::fma(d, factor_of<T>(c, channel), shift));
  }
}

template <class T>
__global__ void __launch_bounds__(block) gradient(const BatchNormGradCall g) {
  using C = compute_t<T>;
  __shared__ double shared[block];
  const BatchNormCall& c = g.forward;
  const Tile tile(c);
  const T *x = static_cast<const T*>(c.x), *gy = static_cast<const T*>(g.gy);
  const std::int64_t channel = tile.inside() ? tile.channel : 0;
  const C mean = static_cast<const C*>(c.mean)[channel];
  double ones = 0, along = 0;
  tile.for_each([&](std::int64_t i) {
    const C upstream = widen(gy[i]);
    ones += static_cast<double>(upstream);
    along += static_cast<double>(upstream * (static_cast<C>(x[i]) - mean));
  });
  ones = tile.sum(ones, shared);
  along = tile.sum(along, shared);
  const auto elements = static_cast<double>(c.batch);
  const auto rstd = static_cast<double>(rstd_of<T>(c, channel));
  if (tile.y == 0 && tile.inside()) {
    static_cast<C*>(g.gbias)[channel] = static_cast<C>(ones);
    static_cast<C*>(g.gweight)[channel] = static_cast<C>(along * rstd);
  }
  const C back = g.through_statistics ? static_cast<C>(-along * rstd * rstd / elements) : C(0);
  const C shift = g.through_statistics ? static_cast<C>(ones / elements) : C(0);
  const C factor = factor_of<T>(c, channel);
  tile.for_each([&](std::int64_t i) {
    const C d = widen(x[i]) - mean;
    static_cast<T*>(g.gx)[i] = narrow<T>(std::fma(d, back, widen(gy[i]) - shift) * factor);
  });
}

unsigned blocks_of_tiles(const BatchNormCall& c) { return grid_of(blocks_of(c.channels, Tile::across)); }

}  // namespace

void launch_channel_statistics(const BatchNormCall& c) {
  for_floating(c.dtype, [&]<class T>() { statistics<T><<<blocks_of_tiles(c), block, 0, c.stream>>>(c); });
}

void launch_batch_norm(const BatchNormCall& c) {
  const std::int64_t n = c.batch * c.channels;
  for_floating(c.dtype, [&]<class T>() { normalise<T><<<blocks_for(n), block, 0, c.stream>>>(c, n); });
}

void launch_batch_norm_grad(const BatchNormGradCall& g) {
  const BatchNormCall& c = g.forward;
  for_floating(c.dtype, [&]<class T>() { gradient<T><<<blocks_of_tiles(c), block, 0, c.stream>>>(g); });
}

}  // namespace sherd::cuda
