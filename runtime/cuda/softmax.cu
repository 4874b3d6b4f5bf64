#include "runtime/cuda/softmax.h"

#include "runtime/cuda/rows.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

/// A row that a warp holds in registers, `Packs` packs of 16 bytes a lane; it covers the rows that a warp
/// gets.
template <class T>
struct RegisterRow {
  using C = compute_t<T>;
  static constexpr int V = wide_count<T>, Packs = most_columns_of_warp / (warp_size * V);
  int lane = static_cast<int>(threadIdx.x) % warp_size, count;
  __device__ explicit RegisterRow(std::int64_t columns) : count(static_cast<int>(columns) / V) {}

  template <class F>
  __device__ void each_pack(const F& f) const {
#pragma unroll
    for (int p = 0; p < Packs; ++p)
      if (p * warp_size + lane < count) f(p, (p * warp_size + lane) * V);
  }
  /// All loads are on their way before the first is used. What lies beyond the row is `beyond`.
  __device__ void load(const T* row, C (&x)[Packs][V], C beyond) const {
    Raw<V, T> packs[Packs];
    each_pack([&](int p, int at) { packs[p] = Raw<V, T>::load(row + at); });
#pragma unroll
    for (int p = 0; p < Packs; ++p)
#pragma unroll
      for (int j = 0; j < V; ++j) x[p][j] = beyond;
    each_pack([&](int p, int) { packs[p].widen_to(x[p]); });
  }
};

template <class T, bool log>
__global__ void __launch_bounds__(RowOfThread<1>::block)
    forward_held(const T* x, T* y, std::int64_t rows, std::int64_t columns) {
  using C = compute_t<T>;
  using Row = RegisterRow<T>;
  const RowOfThread<1> at;
  if (at.row >= rows) return;
  const Row held(columns);
  C value[Row::Packs][Row::V], top = lowest<C>(), total = 0;
  held.load(x + at.row * columns, value, lowest<C>());
  const auto each = [&](const auto& f) {
#pragma unroll
    for (int p = 0; p < Row::Packs; ++p)
#pragma unroll
      for (int j = 0; j < Row::V; ++j) f(value[p][j]);
  };
  each([&](C v) { top = v > top ? v : top; });
  for (int step = warp_size / 2; step > 0; step /= 2) {
    const C other = __shfl_xor_sync(whole_warp, top, step);
    top = other > top ? other : top;
  }
  const C by = LogSum<T>::shift(top);
  each([&](C& v) {
    const C e = exponential<T>(v - by);
    total += e;
    if constexpr (!log) v = e;
  });
  total = warp_sum(total);
  const C factor = C(1) / total, log_total = log ? math::log(total) : C(0);
  held.each_pack([&](int p, int i) {
#pragma unroll
    for (int j = 0; j < Row::V; ++j) value[p][j] = log ? value[p][j] - top - log_total : value[p][j] * factor;
    Raw<Row::V, T>::of(value[p]).store(y + at.row * columns + i);
  });
}

template <class T, bool log>
__global__ void __launch_bounds__(RowOfThread<1>::block)
    backward_held(const T* y, const T* gy, T* gx, std::int64_t rows, std::int64_t columns) {
  using C = compute_t<T>;
  using Row = RegisterRow<T>;
  const RowOfThread<1> at;
  if (at.row >= rows) return;
  const Row held(columns);
  C out[Row::Packs][Row::V], grad[Row::Packs][Row::V], total = 0;
  held.load(y + at.row * columns, out, C(0));
  held.load(gy + at.row * columns, grad, C(0));
#pragma unroll
  for (int p = 0; p < Row::Packs; ++p)
#pragma unroll
    for (int j = 0; j < Row::V; ++j) total += log ? grad[p][j] : out[p][j] * grad[p][j];
  total = warp_sum(total);
  held.each_pack([&](int p, int i) {
#pragma unroll
    for (int j = 0; j < Row::V; ++j)
      out[p][j] = log ? grad[p][j] - exponential<T>(out[p][j]) * total : out[p][j] * (grad[p][j] - total);
    Raw<Row::V, T>::of(out[p]).store(gx + at.row * columns + i);
  });
}

/// Rows of any width at any address: one pass for the largest element and the sum, one for the results.
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
      const C over = widen(pack.at[j]) - sum.top;
      result.at[j] = narrow<T>(log ? over - log_total : exponential<T>(over) * factor);
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
      for (int j = 0; j < V; ++j) total += widen(g.at[j]);
    } else {
      const Packed<V, T> p = load_pack<V>(out + i * V);
#pragma unroll
      for (int j = 0; j < V; ++j) total += widen(p.at[j]) * widen(g.at[j]);
    }
  }
  total = group_sum<Warps>(total, shared);
  for (std::int64_t i = at.lane; i < columns / V; i += at.threads) {
    const Packed<V, T> p = load_pack<V>(out + i * V), g = load_pack<V>(grad + i * V);
    Packed<V, T> result;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const C value = widen(p.at[j]), upstream = widen(g.at[j]);
      result.at[j] = narrow<T>(log ? upstream - exponential<T>(value) * total : value * (upstream - total));
    }
    store_pack<V>(gx + at.row * columns + i * V, result);
  }
}

template <class T, int Warps, int V>
__global__ void __launch_bounds__(RowOfThread<Warps>::block)
    log_sums(const T* x, compute_t<T>* y, std::int64_t rows, std::int64_t columns) {
  using C = compute_t<T>;
  __shared__ C shared[2 * Warps];
  const RowOfThread<Warps> at;
  if (at.row >= rows) return;
  const T* from = x + at.row * columns;
  LogSum<C> sum;  // the result is wider than 16 bits
#pragma unroll 2
  for (std::int64_t i = at.lane; i < columns / V; i += at.threads) {
    C wide[V];
    Raw<V, T>::load(from + i * V).widen_to(wide);
    sum.add(wide);
  }
  sum.template merge_group<Warps>(shared);
  if (at.lane != 0) return;
  C total = math::log(sum.total) + LogSum<C>::shift(sum.top);
  if (sum.top == std::numeric_limits<C>::infinity()) {  // which has no difference to itself
    total = sum.top;
    for (std::int64_t i = 0; i < columns; ++i)
      total = widen(from[i]) == widen(from[i]) ? total : widen(from[i]);
  }
  y[at.row] = total;
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
                     if constexpr (Warps == 1 && V > 1)
                       forward_held<T, log><<<blocks, threads, 0, c.stream>>>(x, y, c.rows, c.columns);
                     else
                       forward<T, Warps, V, log><<<blocks, threads, 0, c.stream>>>(x, y, c.rows, c.columns);
                   });
                 });
  });
}

void launch_logsumexp(const LogSumExpCall& c) {
  for_floating(c.dtype, [&]<class T>() {
    const auto* x = static_cast<const T*>(c.x);
    with_rows<T>(c.rows, c.columns, wide_rows<T>(c.columns, x),
                 [&]<int Warps, int V>(unsigned blocks, unsigned threads) {
                   log_sums<T, Warps, V><<<blocks, threads, 0, c.stream>>>(x, static_cast<compute_t<T>*>(c.y),
                                                                           c.rows, c.columns);
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
                     if constexpr (Warps == 1 && V > 1)
                       backward_held<T, log><<<blocks, threads, 0, c.stream>>>(y, gy, gx, c.rows, c.columns);
                     else
                       backward<T, Warps, V, log>
                           <<<blocks, threads, 0, c.stream>>>(y, gy, gx, c.rows, c.columns);
                   });
                 });
  });
}

}  // namespace sherd::cuda
