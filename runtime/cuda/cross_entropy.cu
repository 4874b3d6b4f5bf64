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

/// Logsumexp and loss of each row in one pass over it. `L` is the loss's type, and decides the bits.
template <class T, class L, int Warps, int V>
__global__ void __launch_bounds__(RowOfThread<Warps>::block) row_losses(const CrossEntropyCall c) {
  using C = compute_t<T>;
  __shared__ C shared[2 * Warps];
  const RowOfThread<Warps> at;
  if (at.row >= c.rows) return;
  const T* logits = static_cast<const T*>(c.logits) + at.row * c.columns;
  LogSum<L> sum;
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
  if (c.form == RowLosses::each) static_cast<L*>(c.loss)[at.row] = static_cast<L>(loss);
}

constexpr int total_warps = 32;

/// The loss of all rows, and how many count. One block.
template <class L>
__global__ void __launch_bounds__(total_warps* warp_size) total_loss(const CrossEntropyCall c) {
  using C = compute_t<L>;
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
  if (c.form != RowLosses::each) *static_cast<L*>(c.loss) = static_cast<L>(static_cast<C>(loss));
}

template <class T, class L, int Warps, int V>
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
      factor = static_cast<C>(static_cast<const L*>(c.gy)[c.form == RowLosses::each ? at.row : 0]);
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
      const C p = exponential<L>(static_cast<C>(pack.at[j]) - shift);
      result.at[j] = static_cast<T>((i * V + j == target ? p - C(1) : p) * factor);
    }
    store_pack<V>(gx + i * V, result);
  }
}

/// Calls `f.operator()<T, L>()` with the types of logits and loss.
template <class Call, class F>
void for_logits_and_loss(const Call& c, F&& f) {
  for_floating(c.dtype, [&]<class T>() {
    if constexpr (sizeof(T) == 2)
      if (c.loss_dtype == DType::f32) return f.template operator()<T, float>();
    f.template operator()<T, T>();
  });
}

/// Whether rows of T can be read as many elements at a time as 16 bytes hold of `L`.
template <class T, class L, class... P>
bool packed_rows(std::int64_t columns, const P*... pointers) {
  constexpr std::uintptr_t bytes = wide_count<L> * sizeof(T);
  return columns % wide_count<L> == 0 && ((reinterpret_cast<std::uintptr_t>(pointers) % bytes == 0) && ...);
}

}  // namespace

void launch_cross_entropy(const CrossEntropyCall& c) {
  for_logits_and_loss(c, [&]<class T, class L>() {
    if (c.rows > 0)
      with_rows<L>(c.rows, c.columns, packed_rows<T, L>(c.columns, c.logits),
                   [&]<int Warps, int V>(unsigned blocks, unsigned threads) {
                     row_losses<T, L, Warps, V><<<blocks, threads, 0, c.stream>>>(c);
                   });
    total_loss<L><<<1, total_warps * warp_size, 0, c.stream>>>(c);
  });
}

void launch_cross_entropy_grad(const CrossEntropyGradCall& c) {
  for_logits_and_loss(c, [&]<class T, class L>() {
    with_rows<T>(c.rows, c.columns, packed_rows<T, T>(c.columns, c.logits, c.gx),
                 [&]<int Warps, int V>(unsigned blocks, unsigned threads) {
                   gradient<T, L, Warps, V><<<blocks, threads, 0, c.stream>>>(c);
                 });
  });
}

}  // namespace sherd::cuda
