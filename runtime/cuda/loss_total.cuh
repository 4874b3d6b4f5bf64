// The kernels of a loss that is an elementwise op: its sum over all elements and the gradients of that, in
// one pass each, written once for all losses. An application compiles them for a loss of its own.
#pragma once

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/elementwise.cuh"
#include "runtime/cuda/loss_total.h"

namespace sherd::cuda {
namespace detail {

/// The sum over a block, in its first thread.
inline __device__ double block_sum(double x) {
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

template <class T, class Loss>
__global__ void __launch_bounds__(threads_per_block)
    sum_chunks(const Loss loss, const LossCall c, bool wide, double* partial) {
  using C = compute_t<T>;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * LossCall::chunk;
  double total = 0;
  for_packs<wide_count<T>>(begin, min(begin + LossCall::chunk, c.n), threadIdx.x, threads_per_block, wide,
                           [&]<int V>(std::int64_t i) {
                             const Packed<V, T> x = load_pack<V>(static_cast<const T*>(c.x) + i),
                                                t = load_pack<V>(static_cast<const T*>(c.t) + i);
                             C sum = 0;
#pragma unroll
                             for (int j = 0; j < V; ++j) sum += loss(widen(x.at[j]), widen(t.at[j]));
                             total += static_cast<double>(sum);
                           });
  total = block_sum(total);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

template <int input, class T, int V, class Loss, class C = compute_t<T>>
__device__ void store_gradients(const Loss& loss, C gy, const Packed<V, T>& x, const Packed<V, T>& t, T* to) {
  Packed<V, T> y;
#pragma unroll
  for (int j = 0; j < V; ++j)
    y.at[j] = narrow<T>(sherd::detail::gradient_of_loss<input>(loss, gy, widen(x.at[j]), widen(t.at[j])));
  store_pack(to, y);
}

template <class T, class Loss>
__global__ void __launch_bounds__(threads_per_block)
    loss_gradients(const Loss loss, const LossCall c, bool wide, const T* upstream, T* gx, T* gt) {
  using C = compute_t<T>;
  const C g = widen(*upstream), gy = c.mean ? g / static_cast<C>(c.n) : g;
  for_packs<wide_count<T>>(0, c.n, static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x,
                           static_cast<std::int64_t>(gridDim.x) * threads_per_block, wide,
                           [&]<int V>(std::int64_t i) {
                             const Packed<V, T> x = load_pack<V>(static_cast<const T*>(c.x) + i),
                                                t = load_pack<V>(static_cast<const T*>(c.t) + i);
                             if (gx) store_gradients<0, T, V>(loss, gy, x, t, gx + i);
                             if (gt) store_gradients<1, T, V>(loss, gy, x, t, gt + i);
                           });
}

/// Calls `f.operator()<T>(wide)` for the dtypes that the loss takes; others were refused before.
template <class Loss, class F>
void with_loss_dtype(const LossCall& c, const void* a, const void* b, const F& f) {
  constexpr DTypeSet dtypes{static_cast<std::uint16_t>(Loss::dtypes.mask & floating_dtypes.mask)};
  with_element<dtypes>(c.dtype, [&]<class T>() {
    const auto at = [](const void* data) { return static_cast<const T*>(data); };
    f.template operator()<T>(wide_rows<T>(wide_count<T>, at(c.x), at(c.t), at(a), at(b)));
  });
}

template <class Loss>
cudaError_t launch_loss(const void* erased, const LossCall& c, double* partial) {
  const Loss& loss = *static_cast<const Loss*>(erased);
  with_loss_dtype<Loss>(c, nullptr, nullptr, [&]<class T>(bool wide) {
    sum_chunks<T><<<grid_of(c.chunks()), threads_per_block, 0, c.stream>>>(loss, c, wide, partial);
  });
  return cudaGetLastError();
}

template <class Loss>
cudaError_t launch_loss_grad(const void* erased, const LossCall& c, const void* gy, void* gx, void* gt) {
  const Loss& loss = *static_cast<const Loss*>(erased);
  with_loss_dtype<Loss>(c, gx, gt, [&]<class T>(bool wide) {
    loss_gradients<T><<<blocks_for(c.n / wide_count<T>), threads_per_block, 0, c.stream>>>(
        loss, c, wide, static_cast<const T*>(gy), static_cast<T*>(gx), static_cast<T*>(gt));
  });
  return cudaGetLastError();
}

template <class Loss>
void loss_total(const void* erased, Inputs in, Outputs out) {
  const auto& op = *static_cast<const ops::LossTotal<Loss>*>(erased);
  run_loss_total(op.name, op.mean, in, out, &op.loss, launch_loss<Loss>);
}
template <class Loss>
void loss_total_grad(const void* erased, Inputs in, Outputs out) {
  const auto& op = *static_cast<const ops::LossTotalGrad<Loss>*>(erased);
  run_loss_total_grad(op.name, op.forward.mean, op.needs, in, out, &op.forward.loss, launch_loss_grad<Loss>);
}

/// The mean and sum, without the elementwise op.
template <ElementwiseLoss Loss>
void add_loss_total() {
  kernel_row<ops::LossTotal<Loss>>().set(DeviceType::cuda, loss_total<Loss>);
  kernel_row<ops::LossTotalGrad<Loss>>().set(DeviceType::cuda, loss_total_grad<Loss>);
}

}  // namespace detail

/// Adds the kernels of a loss: those above and those of the elementwise op. An application calls it once for
/// a loss of its own, from a file that nvcc compiles.
template <ElementwiseLoss Loss>
void add_loss() {
  add_elementwise<Loss>();
  add_gradient<Loss, 0>();
  add_gradient<Loss, 1>();
  detail::add_loss_total<Loss>();
}

}  // namespace sherd::cuda
