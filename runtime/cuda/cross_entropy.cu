#include "runtime/cuda/cross_entropy.h"

#include "runtime/cuda/rows.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

enum class Target { counted, ignored, bad };

__device__ Target target_kind(std::int64_t target, std::int64_t ignore_index, std::int64_t columns) {
  if (target == ignore_index) return Target::ignored;
  return target >= 0 && target < columns ? Target::counted : Target::bad;
}

/// Logsumexp and loss of each row in one pass over it.
template <class T, int Warps, int V>
__global__ void __launch_bounds__(RowOfThread<Warps>::block) row_losses(const CrossEntropyCall c) {
  using C = compute_t<T>;
  __shared__ C shared[2 * Warps];
  const RowOfThread<Warps> at;
  if (at.row >= c.rows) return;
  const T* logits = static_cast<const T*>(c.logits) + at.row * c.columns;
  LogSum<T> sum;
  for (std::int64_t i = at.lane; i < c.columns / V; i += at.threads) {
    C wide[V];
    widen_all(load_pack<V>(logits + i * V).at, wide);
    sum.add(wide);
  }
  sum.template merge_group<Warps>(shared);
  if (at.lane != 0) return;
  // NaN for a row whose largest value is infinite, as log_softmax has it.
  const C result = std::isinf(sum.top) ? std::numeric_limits<C>::quiet_NaN() : sum.top + math::log(sum.total);
  static_cast<C*>(c.logsumexp)[at.row] = result;
  const std::int64_t target = c.targets[at.row];
  C loss = 0;
  switch (target_kind(target, c.ignore_index, c.columns)) {
    case Target::counted:
      loss = result - static_cast<C>(logits[target]);
      break;
    case Target::bad:
      loss = std::numeric_limits<C>::quiet_NaN();
      c.faults(FaultKind::cross_entropy_target, static_cast<double>(target), at.row, c.columns);
      break;
    case Target::ignored:
      break;
  }
  static_cast<C*>(c.row_loss)[at.row] = loss;
  if (c.form == RowLosses::each) static_cast<T*>(c.loss)[at.row] = static_cast<T>(loss);
}

constexpr int total_warps = 32;

/// The loss of all rows, and how many count. One block.
template <class T>
__global__ void __launch_bounds__(total_warps* warp_size) total_loss(const CrossEntropyCall c) {
  using C = compute_t<T>;
  __shared__ double shared[total_warps];
  double loss = 0, count = 0;
  for (std::int64_t i = threadIdx.x; i < c.rows; i += total_warps * warp_size) {
    loss += static_cast<double>(static_cast<const C*>(c.row_loss)[i]);
    count += c.targets[i] != c.ignore_index;
  }
  loss = group_sum<total_warps>(loss, shared);
  count = group_sum<total_warps>(count, shared);
  if (threadIdx.x != 0) return;
  *static_cast<C*>(c.count) = static_cast<C>(count);
  if (c.form == RowLosses::mean) loss /= count;
  if (c.form != RowLosses::each) *static_cast<T*>(c.loss) = static_cast<T>(static_cast<C>(loss));
}

template <class T, int Warps, int V>
__global__ void __launch_bounds__(RowOfThread<Warps>::block) gradient(const CrossEntropyGradCall c) {
  using C = compute_t<T>;
  const RowOfThread<Warps> at;
  if (at.row >= c.rows) return;
  const T* logits = static_cast<const T*>(c.logits) + at.row * c.columns;
  T* gx = static_cast<T*>(c.gx) + at.row * c.columns;
  const std::int64_t target = c.targets[at.row];
  const C shift = static_cast<const C*>(c.logsumexp)[at.row];
  C factor = 0;
  switch (target_kind(target, c.ignore_index, c.columns)) {
    case Target::counted:
      factor = static_cast<C>(static_cast<const T*>(c.gy)[c.form == RowLosses::each ? at.row : 0]);
      if (c.form == RowLosses::mean) factor /= *static_cast<const C*>(c.count);
      break;
    case Target::bad:
      factor = std::numeric_limits<C>::quiet_NaN();
      break;
    case Target::ignored: {
      const T zero = static_cast<T>(C(0));
      for (std::int64_t j = at.lane; j < c.columns; j += at.threads) gx[j] = zero;
      return;
    }
  }
  for (std::int64_t i = at.lane; i < c.columns / V; i += at.threads) {
    const Packed<V, T> pack = load_pack<V>(logits + i * V);
    Packed<V, T> result;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const C p = exponential<T>(static_cast<C>(pack.at[j]) - shift);
      result.at[j] = static_cast<T>((i * V + j == target ? p - C(1) : p) * factor);
    }
    store_pack<V>(gx + i * V, result);
  }
}

}  // namespace

void launch_cross_entropy(const CrossEntropyCall& c) {
  for_floating(c.dtype, [&]<class T>() {
    if (c.rows > 0)
      with_rows<T>(c.rows, c.columns, wide_rows<T>(c.columns, static_cast<const T*>(c.logits)),
                   [&]<int Warps, int V>(unsigned blocks, unsigned threads) {
                     row_losses<T, Warps, V><<<blocks, threads, 0, c.stream>>>(c);
                   });
    total_loss<T><<<1, total_warps * warp_size, 0, c.stream>>>(c);
  });
}

void launch_cross_entropy_grad(const CrossEntropyGradCall& c) {
  for_floating(c.dtype, [&]<class T>() {
    with_rows<T>(c.rows, c.columns,
                 wide_rows<T>(c.columns, static_cast<const T*>(c.logits), static_cast<T*>(c.gx)),
                 [&]<int Warps, int V>(unsigned blocks, unsigned threads) {
                   gradient<T, Warps, V><<<blocks, threads, 0, c.stream>>>(c);
                 });
  });
}

}  // namespace sherd::cuda
