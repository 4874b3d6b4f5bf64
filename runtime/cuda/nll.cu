#include "runtime/cuda/nll.h"

#include <algorithm>
#include <limits>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/launch.cuh"

namespace sherd::cuda {
namespace {

constexpr std::int64_t rows_of_thread = 4, most_blocks = 1024;

/// Sums of losses and of the weights that counted.
struct Sums {
  double loss = 0, weight = 0;
  /// The whole block's, in its first thread.
  __device__ Sums of_block() const {
    __shared__ double of_warps[2][threads_per_block / warp_size];
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const double mine[] = {warp_sum(loss), warp_sum(weight)};
    if (threadIdx.x % warp_size == 0) of_warps[0][warp] = mine[0], of_warps[1][warp] = mine[1];
    __syncthreads();
    Sums all;
    for (int w = 0; w < threads_per_block / warp_size; ++w)
      all.loss += of_warps[0][w], all.weight += of_warps[1][w];
    return all;
  }
};

template <class T>
__device__ void finish(const NllCall& c, const Sums& sums, T* loss, compute_t<T>* total) {
  *total = static_cast<compute_t<T>>(sums.weight);
  if (loss) *loss = narrow<T>(static_cast<compute_t<T>>(c.mean ? sums.loss / sums.weight : sums.loss));
}

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    sum_rows(const NllCall c, double* partial, T* loss, T* each, compute_t<T>* total) {
  using C = compute_t<T>;
  wait_for_earlier();
  Sums sums;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; r < c.rows;
       r += step) {
    const std::int64_t t = c.targets[r];
    C of_row = 0;
    if (t < 0 || t >= c.classes) {
      if (t != c.ignore) {
        c.faults(FaultKind::nll_target, t, r, c.classes);
        of_row = std::numeric_limits<C>::quiet_NaN();
        sums.loss += of_row;
      }
    } else if (t != c.ignore) {
      const C counts = c.weight ? static_cast<const C*>(c.weight)[t] : C(1);
      of_row = -widen(static_cast<const T*>(c.scores)[r * c.classes + t]) * counts;
      sums.loss += of_row;
      sums.weight += counts;
    }
    if (each) each[r] = narrow<T>(of_row);
  }
  sums = sums.of_block();
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) return finish(c, sums, loss, total);
  partial[2 * blockIdx.x] = sums.loss;
  partial[2 * blockIdx.x + 1] = sums.weight;
}

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    join_blocks(const NllCall c, const double* partial, int blocks, T* loss, compute_t<T>* total) {
  wait_for_earlier();
  Sums sums;
  for (int i = static_cast<int>(threadIdx.x); i < blocks; i += threads_per_block)
    sums.loss += partial[2 * i], sums.weight += partial[2 * i + 1];
  sums = sums.of_block();
  if (threadIdx.x == 0) finish(c, sums, loss, total);
}

/// Every element of the gradient, zeros too, `V` at once.
template <int V, class T>
__global__ void __launch_bounds__(threads_per_block)
    write_gradient(const NllCall c, const T* gy, bool each, const compute_t<T>* total, T* gx) {
  using C = compute_t<T>;
  wait_for_earlier();
  const std::int64_t n = c.rows * c.classes,
                     step = static_cast<std::int64_t>(gridDim.x) * threads_per_block * V;
  const C divisor = c.mean && !each ? *total : C(1);
  for (std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x) * V; i < n;
       i += step) {
    const std::int64_t row = n <= 0x7fffffff  // division in 64 bits is slow
                                 ? static_cast<std::uint32_t>(i) / static_cast<std::uint32_t>(c.classes)
                                 : i / c.classes;
    const std::int64_t target = c.targets[row], place = row * c.classes + target - i;
    Packed<V, T> pack{};
    if (place >= 0 && place < V && target != c.ignore && target < c.classes) {
      const C scale = -widen(gy[each ? row : 0]) / divisor;
      const T value = narrow<T>(c.weight ? static_cast<const C*>(c.weight)[target] * scale : scale);
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (j == place) pack.at[j] = value;
    }
    store_pack(gx + i, pack);
  }
}

}  // namespace

std::int64_t NllCall::blocks() const {
  return std::clamp<std::int64_t>(blocks_of(rows, threads_per_block * rows_of_thread), 1, most_blocks);
}

void launch_nll(const NllCall& c, double* partial, void* loss, void* each, void* total) {
  for_floating(c.dtype, [&]<class T>() {
    const auto blocks = static_cast<unsigned>(c.blocks());
    auto* const weight = static_cast<compute_t<T>*>(total);
    launch_early(sum_rows<T>, blocks, threads_per_block, c.stream, c, partial, static_cast<T*>(loss),
                 static_cast<T*>(each), weight);
    if (blocks > 1)
      launch_early(join_blocks<T>, 1, threads_per_block, c.stream, c, partial, static_cast<int>(blocks),
                   static_cast<T*>(loss), weight);
  });
}

void launch_nll_grad(const NllCall& c, const void* gy, bool each, const void* total, void* out) {
  for_floating(c.dtype, [&]<class T>() {
    T* const gx = static_cast<T*>(out);
    const auto launch = [&]<int V>() {
      launch_early(write_gradient<V, T>, blocks_for(c.rows * c.classes / V), threads_per_block, c.stream, c,
                   static_cast<const T*>(gy), each, static_cast<const compute_t<T>*>(total), gx);
    };
    if (wide_rows<T>(c.classes, gx))
      launch.template operator()<wide_count<T>>();
    else
      launch.template operator()<1>();
  });
}

}  // namespace sherd::cuda
