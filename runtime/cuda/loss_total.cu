#include "runtime/cuda/loss_total.h"

#include <limits>

#include "runtime/cuda/block.cuh"
#include "runtime/functor.h"

namespace sherd::cuda {
namespace {

/// The sum over a block, in its first thread.
__device__ double block_sum(double x) {
  __shared__ double of_warps[threads_per_block / warp_size];
  x = warp_sum(x);
  if (threadIdx.x % warp_size == 0) of_warps[threadIdx.x / warp_size] = x;
  __syncthreads();
  x = of_warps[0];
  for (int w = 1; w < threads_per_block / warp_size; ++w) x += of_warps[w];
  return x;
}

/// Calls `body.operator()<V>(i)` for V elements from i on that are this thread's of [begin, end).
template <int width, class F>
__device__ void for_packs(std::int64_t begin, std::int64_t end, std::int64_t first, std::int64_t step,
                          bool wide, const F& body) {
  std::int64_t i = begin;
  if (wide) {
    for (i += width * first; i + width <= end; i += width * step) body.template operator()<width>(i);
    i = begin + (end - begin) / width * width;
  }
  for (i += first; i < end; i += step) body.template operator()<1>(i);
}

template <class T, class F>
__global__ void __launch_bounds__(threads_per_block)
    sum_chunks(const F f, const LossTotalCall c, bool wide, double* partial) {
  using C = compute_t<T>;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * LossTotalCall::chunk;
  double total = 0;
  for_packs<wide_count<T>>(begin, min(begin + LossTotalCall::chunk, c.n), threadIdx.x, threads_per_block,
                           wide, [&]<int V>(std::int64_t i) {
                             const Packed<V, T> x = load_pack<V>(static_cast<const T*>(c.x) + i),
                                                t = load_pack<V>(static_cast<const T*>(c.t) + i);
                             C sum = 0;
#pragma unroll
                             for (int j = 0; j < V; ++j) sum += f(widen(x.at[j]), widen(t.at[j]));
                             total += static_cast<double>(sum);
                           });
  total = block_sum(total);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    join_chunks(const double* partial, std::int64_t count, double by, T* out) {
  double total = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += threads_per_block) total += partial[i];
  total = block_sum(total);
  if (threadIdx.x == 0) *out = narrow<T>(static_cast<compute_t<T>>(total) / static_cast<compute_t<T>>(by));
}

template <int input, class F, class C>
__device__ C gradient_of(const F& f, C gy, C x, C t) {
  return sherd::detail::grad_of<input>(f, gy, x, t, std::numeric_limits<C>::quiet_NaN());
}

template <class T, class F>
__global__ void __launch_bounds__(threads_per_block)
    gradients(const F f, const LossTotalCall c, bool wide, const T* upstream, T* gx, T* gt) {
  using C = compute_t<T>;
  const C g = widen(*upstream), gy = c.mean ? g / static_cast<C>(c.n) : g;
  for_packs<wide_count<T>>(0, c.n, static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x,
                           static_cast<std::int64_t>(gridDim.x) * threads_per_block, wide,
                           [&]<int V>(std::int64_t i) {
                             const Packed<V, T> x = load_pack<V>(static_cast<const T*>(c.x) + i),
                                                t = load_pack<V>(static_cast<const T*>(c.t) + i);
                             Packed<V, T> y;
                             if (gx) {
#pragma unroll
                               for (int j = 0; j < V; ++j)
                                 y.at[j] = narrow<T>(gradient_of<0>(f, gy, widen(x.at[j]), widen(t.at[j])));
                               store_pack(gx + i, y);
                             }
                             if (gt) {
#pragma unroll
                               for (int j = 0; j < V; ++j)
                                 y.at[j] = narrow<T>(gradient_of<1>(f, gy, widen(x.at[j]), widen(t.at[j])));
                               store_pack(gt + i, y);
                             }
                           });
}

/// Calls `f.operator()<T>(functor, wide)`.
template <class F>
void visit(const LossTotalCall& c, const void* a, const void* b, const F& f) {
  for_floating(c.dtype, [&]<class T>() {
    const auto at = [](const void* data) { return static_cast<const T*>(data); };
    const bool wide = wide_rows<T>(wide_count<T>, at(c.x), at(c.t), at(a), at(b));
    c.kind.visit([&](const auto& functor) { f.template operator()<T>(functor, wide); });
  });
}

}  // namespace

void launch_loss_total(const LossTotalCall& c, double* partial, void* out) {
  visit(c, nullptr, nullptr, [&]<class T>(const auto& functor, bool wide) {
    if (c.n > 0)
      sum_chunks<T><<<grid_of(c.chunks()), threads_per_block, 0, c.stream>>>(functor, c, wide, partial);
    join_chunks<T><<<1, threads_per_block, 0, c.stream>>>(
        partial, c.chunks(), c.mean ? static_cast<double>(c.n) : 1, static_cast<T*>(out));
  });
}

void launch_loss_total_grad(const LossTotalCall& c, const void* gy, void* gx, void* gt) {
  visit(c, gx, gt, [&]<class T>(const auto& functor, bool wide) {
    gradients<T><<<blocks_for(c.n / wide_count<T>), threads_per_block, 0, c.stream>>>(
        functor, c, wide, static_cast<const T*>(gy), static_cast<T*>(gx), static_cast<T*>(gt));
  });
}

}  // namespace sherd::cuda
