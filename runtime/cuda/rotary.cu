#include "runtime/cuda/rotary.h"

#include <numbers>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/launch.cuh"

namespace sherd::cuda {
namespace {

/// A thread a pair and step.
template <class C>
__global__ void __launch_bounds__(threads_per_block) rotary_table(const RotaryTableCall c, double log_base) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x;
  if (at >= c.steps * c.half) return;
  const double pair = static_cast<double>(at % c.half), half = static_cast<double>(c.half);
  double rate = math::exp(pair * (-log_base / half));
  if (c.factor != 1) {
    const double measured =
        c.by_pair ? pair : c.original * math::pow(c.base, -pair / half) / (2 * std::numbers::pi);
    const double share = (measured - c.low) / (c.high - c.low);
    const double full_speed = share < 0 ? 0 : share > 1 ? 1 : share;
    rate = rate * (full_speed + (1 - full_speed) / c.factor);
  }
  const double angle = static_cast<double>(c.first + at / c.half) * rate;
  static_cast<C*>(c.cosines)[at] = static_cast<C>(math::cos(angle) * c.amplitude);
  static_cast<C*>(c.sines)[at] = static_cast<C>(math::sin(angle) * c.amplitude);
}

/// Elements that lie side by side, in the dtype that is computed in.
template <int V, class T>
__device__ void load_wide(const T* from, compute_t<T> (&to)[V]) {
  Raw<V, T>::load(from).widen_to(to);
}
template <int V, class C>
__device__ void load_table(const C* from, C (&to)[V]) {
  constexpr int wide = V < wide_count<C> ? V : wide_count<C>;
#pragma unroll
  for (int j = 0; j < V; j += wide) {
    const Packed<wide, C> pack = load_pack<wide>(from + j);
#pragma unroll
    for (int k = 0; k < wide; ++k) to[j + k] = pack.at[k];
  }
}

/// A thread V pairs: two runs of V features, each a half's, or one behind the other.
template <bool Neighbours, int V, class T>
__global__ void __launch_bounds__(threads_per_block) rotary(const RotaryCall c) {
  using C = compute_t<T>;
  using Index = std::uint32_t;  // division in 64 bits is slow
  wait_for_earlier();
  const Index packs = static_cast<Index>(c.half / V), between = static_cast<Index>(c.between),
              steps = static_cast<Index>(c.steps);
  const std::int64_t rows = c.batch * c.steps * c.between, all = rows * packs,
                     stride = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < all;
       i += stride) {
    const bool small = all <= 0xffffffff;
    const std::int64_t row = small ? static_cast<Index>(i) / packs : i / packs,
                       line = small ? static_cast<Index>(row) / between : row / between,
                       batch = small ? static_cast<Index>(line) / steps : line / steps;
    const std::int64_t pair = (i - row * packs) * V, step = line - batch * c.steps;
    const std::int64_t second = Neighbours ? V : c.half, begin = Neighbours ? 2 * pair : pair;
    const T* x = static_cast<const T*>(c.x) + batch * c.batch_stride + step * c.step_stride +
                 (row - line * c.between) * c.between_stride + begin;
    T* y = static_cast<T*>(c.y) + row * 2 * c.half + begin;
    C one[V], two[V], cosine[V], sine[V];
    load_wide<V>(x, one);
    load_wide<V>(x + second, two);
    load_table<V>(static_cast<const C*>(c.cosines) + step * c.half + pair, cosine);
    load_table<V>(static_cast<const C*>(c.sines) + step * c.half + pair, sine);
    const auto turn = [&](C& a, C& b, int j) {
      const C s = c.back ? -sine[j] : sine[j], turned = a * cosine[j] - b * s;
      b = a * s + b * cosine[j];
      a = turned;
    };
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if constexpr (!Neighbours)
        turn(one[j], two[j], j);
      else if constexpr (V == 1)
        turn(one[0], two[0], 0);
      else if (j < V / 2)
        turn(one[2 * j], one[2 * j + 1], j);
      else
        turn(two[2 * j - V], two[2 * j - V + 1], j);
    }
    Raw<V, T>::of(one).store(y);
    Raw<V, T>::of(two).store(y + second);
  }
}

}  // namespace

void launch_rotary_table(const RotaryTableCall& c) {
  const unsigned blocks = static_cast<unsigned>(blocks_of(c.steps * c.half, threads_per_block));
  if (c.dtype == DType::f64)
    rotary_table<double><<<blocks, threads_per_block, 0, c.stream>>>(c, math::log(c.base));
  else
    rotary_table<float><<<blocks, threads_per_block, 0, c.stream>>>(c, math::log(c.base));
}

void launch_rotary(const RotaryCall& c) {
  for_floating(c.dtype, [&]<class T>() {
    constexpr int V = wide_count<T>;
    const auto launch = [&]<int Pack>() {
      const int blocks = blocks_for(c.batch * c.steps * c.between * (c.half / Pack));
      if (c.neighbours)
        launch_early(rotary<true, Pack, T>, blocks, threads_per_block, c.stream, c);
      else
        launch_early(rotary<false, Pack, T>, blocks, threads_per_block, c.stream, c);
    };
    const bool wide = wide_rows<T>(c.half, static_cast<const T*>(c.x), static_cast<const T*>(c.y)) &&
                      c.batch_stride % V == 0 && c.step_stride % V == 0 && c.between_stride % V == 0;
    wide ? launch.template operator()<V>() : launch.template operator()<1>();
  });
}

}  // namespace sherd::cuda
