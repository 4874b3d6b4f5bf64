#include "runtime/cuda/softmax.h"

#include "runtime/cuda/rows.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

/// One pass for the largest element and the sum, one for the results.
template <class T, int Warps, int V, bool log>
__global__ void __launch_bounds__(RowOfThread<Warps>::block)
    forward(const T* x, T* y, std::int64_t rows, std::int64_t columns) {
  using C = compute_t<T>;
  __shared__ C shared[2 * Warps];
  const RowOfThread<Warps> at;
  if (at.row >= rows) return;
  const T* from = x + at.row * columns;
  T* to = y + at.row * columns;
  LogSum<T> sum;
  for (std::int64_t i = at.lane; i < columns / V; i += at.threads) {
    C wide[V];
    widen_all(load_pack<V>(from + i * V).at, wide);
    sum.add(wide);
  }
  sum.template merge_group<Warps>(shared);
  const C factor = C(1) / sum.total, log_total = log ? math::log(sum.total) : C(0);
  for (std::int64_t i = at.lane; i < columns / V; i += at.threads) {
    const Packed<V, T> pack = load_pack<V>(from + i * V);
    Packed<V, T> result;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const C over = static_cast<C>(pack.at[j]) - sum.top;
      result.at[j] = static_cast<T>(log ? over - log_total : exponential<T>(over) * factor);
    }
    store_pack<V>(to + i * V, result);
  }
}

template <class T, int Warps, int V, bool log>
__global__ void __launch_bounds__(RowOfThread<Warps>::block)
    backward(const T* y, const T* gy, T* gx, std::int64_t rows, std::int64_t columns) {
  using C = compute_t<T>;
  __shared__ C shared[Warps];
  const RowOfThread<Warps> at;
  if (at.row >= rows) return;
  const T *out = y + at.row * columns, *grad = gy + at.row * columns;
  C total = 0;
  for (std::int64_t i = at.lane; i < columns / V; i += at.threads) {
    const Packed<V, T> g = load_pack<V>(grad + i * V);
    if constexpr (log) {
#pragma unroll
      for (int j = 0; j < V; ++j) total += static_cast<C>(g.at[j]);
    } else {
      const Packed<V, T> p = load_pack<V>(out + i * V);
#pragma unroll
      for (int j = 0; j < V; ++j) total += static_cast<C>(p.at[j]) * static_cast<C>(g.at[j]);
    }
  }
  total = group_sum<Warps>(total, shared);
  for (std::int64_t i = at.lane; i < columns / V; i += at.threads) {
    const Packed<V, T> p = load_pack<V>(out + i * V), g = load_pack<V>(grad + i * V);
    Packed<V, T> result;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const C value = static_cast<C>(p.at[j]), upstream = static_cast<C>(g.at[j]);
      result.at[j] =
          static_cast<T>(log ? upstream - exponential<T>(value) * total : value * (upstream - total));
    }
    store_pack<V>(gx + at.row * columns + i * V, result);
  }
}

template <class F>
void with_log(bool log, F&& f) {
  log ? f.template operator()<true>() : f.template operator()<false>();
}

}  // namespace

void launch_softmax(const SoftmaxCall& c) {
  for_floating(c.dtype, [&]<class T>() {
    const auto* x = static_cast<const T*>(c.x);
    auto* y = static_cast<T*>(c.y);
    with_rows<T>(c.rows, c.columns, wide_rows<T>(c.columns, x, y),
                 [&]<int Warps, int V>(unsigned blocks, unsigned threads) {
                   with_log(c.log, [&]<bool log>() {
                     forward<T, Warps, V, log><<<blocks, threads, 0, c.stream>>>(x, y, c.rows, c.columns);
                   });
                 });
  });
}

void launch_softmax_grad(const SoftmaxGradCall& c) {
  for_floating(c.dtype, [&]<class T>() {
    const auto *y = static_cast<const T*>(c.y), *gy = static_cast<const T*>(c.gy);
    auto* gx = static_cast<T*>(c.gx);
    with_rows<T>(c.rows, c.columns, wide_rows<T>(c.columns, y, gy, gx),
                 [&]<int Warps, int V>(unsigned blocks, unsigned threads) {
                   with_log(c.log, [&]<bool log>() {
                     backward<T, Warps, V, log>
                         <<<blocks, threads, 0, c.stream>>>(y, gy, gx, c.rows, c.columns);
                   });
                 });
  });
}

}  // namespace sherd::cuda
