#include "runtime/cuda/cross_entropy.h"

#include <algorithm>

#include "runtime/cuda/async_copy.cuh"
#include "runtime/cuda/rows.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

enum class Target { counted, ignored, bad };

__device__ Target target_kind(std::int64_t target, std::int64_t ignore_index, std::int64_t columns) {
  if (target == ignore_index) return Target::ignored;
  return target >= 0 && target < columns ? Target::counted : Target::bad;
}

/// The logarithm of a row's sum of e^(x - top): NaN where its largest value is infinite, as log_softmax has
/// it.
template <class C>
__device__ C log_below_top(C top, C total) {
  return std::isinf(top) ? std::numeric_limits<C>::quiet_NaN() : math::log(total);
}

/// Normalizers and loss of each row in one pass over it. `L` is the loss's type, and decides the bits.
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
  const C log = log_below_top(sum.top, sum.total);
  static_cast<C*>(c.normalizers)[at.row] = sum.top;
  static_cast<C*>(c.normalizers)[c.rows + at.row] = log;
  const std::int64_t target = c.targets[at.row];
  C loss = 0;
  switch (target_kind(target, c.ignore_index, c.columns)) {
    case Target::counted:
      loss = (sum.top - widen(logits[target])) + log;
      break;
    case Target::bad:
      loss = std::numeric_limits<C>::quiet_NaN();
      c.faults(FaultKind::cross_entropy_target, target, at.row, c.columns);
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
  const C top = static_cast<const C*>(c.normalizers)[at.row],
          log = static_cast<const C*>(c.normalizers)[c.rows + at.row];
  C factor = 0;
  switch (target_kind(target, c.ignore_index, c.columns)) {
    case Target::counted:
      factor = widen(static_cast<const L*>(c.gy)[c.form == RowLosses::each ? at.row : 0]);
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
      const C p = exponential<L>((widen(pack.at[j]) - top) - log);
      result.at[j] = narrow<T>((i * V + j == target ? p - C(1) : p) * factor);
    }
    store_pack<V>(gx + i * V, result);
  }
}

/// How many targets count. One block.
template <class C>
__global__ void __launch_bounds__(total_warps* warp_size) count_targets(const CrossEntropyCall c) {
  __shared__ double shared[total_warps];
  double count = 0;
  for (std::int64_t i = threadIdx.x; i < c.rows; i += total_warps * warp_size)
    count += c.targets[i] != c.ignore_index;
  count = group_sum<total_warps>(count, shared);
  if (threadIdx.x == 0) *static_cast<C*>(c.count) = static_cast<C>(count);
}

constexpr int over_warps = 16, over_threads = over_warps * warp_size;
constexpr float log2_of_e = 1.4426950408889634f;

/// e^(below - log), which is a share of a row's sum, where `below` is a logit less the row's largest one;
/// where results have 16 bits, in two instructions. Together the two would lose digits of large logits.
template <class T, class C>
__device__ C share_of(C below, C log, [[maybe_unused]] C log_of_two) {
  if constexpr (sizeof(T) == 2) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(std::fma(below, log2_of_e, -log_of_two)));
    return y;
  } else {
    return math::exp(below - log);
  }
}
template <class T, class C>
__device__ C exponential_of(C below) {
  return share_of<T>(below, C(0), C(0));
}

/// Adds the exponentials of a pack to a sum: its largest is looked at once.
template <class T, class C, int V>
__device__ void add_pack(LogSum<T>& sum, const C (&x)[V]) {
  C larger = sum.top;
#pragma unroll
  for (int j = 0; j < V; ++j) larger = std::fmax(larger, x[j]);  // which is not NaN
  const C by = LogSum<T>::shift(larger);
  if (larger != sum.top) {
    sum.total *= exponential_of<T>(sum.top - by);
    sum.top = larger;
  }
#pragma unroll
  for (int j = 0; j < V; ++j) sum.total += exponential_of<T>(x[j] - by);
}

/// Loss of a row, and its gradient over its logits, which the block keeps in its own memory in between.
template <class T, class L, int V>
__global__ void __launch_bounds__(over_threads, 2) losses_and_gradients(const CrossEntropyCall c) {
  using C = compute_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ C shared[2 * over_warps];
  T* kept = reinterpret_cast<T*>(memory);
  const std::int64_t row = blockIdx.x;
  const int packs = static_cast<int>(c.columns / V);
  T* logits = static_cast<T*>(c.logits) + row * c.columns;
  LogSum<T> sum;
  constexpr int ahead = 4;  // packs on their way at a time
  for (int i = static_cast<int>(threadIdx.x); i < packs; i += ahead * over_threads) {
    Packed<V, T> held[ahead];
#pragma unroll
    for (int a = 0; a < ahead; ++a)
      if (i + a * over_threads < packs) held[a] = load_pack<V>(logits + (i + a * over_threads) * V);
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
      if (i + a * over_threads >= packs) continue;
      store_pack<V>(kept + (i + a * over_threads) * V, held[a]);
      C wide[V];
#pragma unroll
      for (int j = 0; j < V; ++j) wide[j] = widen(held[a].at[j]);
      add_pack(sum, wide);
    }
  }
  sum.template merge_group<over_warps>(shared);  // waits for the block, so `kept` is whole
  const C top = sum.top, log = log_below_top(top, sum.total), log_of_two = log * C(log2_of_e);
  const std::int64_t target = c.targets[row];
  const Target kind = target_kind(target, c.ignore_index, c.columns);
  C factor = c.form == RowLosses::mean ? C(1) / *static_cast<const C*>(c.count) : C(1);
  if (kind == Target::bad) factor = std::numeric_limits<C>::quiet_NaN();
  if (threadIdx.x == 0) {
    C loss = kind == Target::ignored ? C(0) : std::numeric_limits<C>::quiet_NaN();
    if (kind == Target::counted) loss = (top - widen(kept[target])) + log;
    if (kind == Target::bad) c.faults(FaultKind::cross_entropy_target, target, row, c.columns);
    static_cast<C*>(c.row_loss)[row] = loss;
  }
  const int chosen = kind == Target::counted ? static_cast<int>(target / V) : -1;
  for (int i = static_cast<int>(threadIdx.x); i < packs; i += over_threads) {
    Packed<V, T> pack{};
    if (kind != Target::ignored) {
      const Packed<V, T> logit = load_pack<V>(kept + i * V);
#pragma unroll
      for (int j = 0; j < V; ++j)
        pack.at[j] = narrow<T>(share_of<T>(widen(logit.at[j]) - top, log, log_of_two) * factor);
      if (i == chosen)
#pragma unroll
        for (int j = 0; j < V; ++j)
          if (i * V + j == target)
            pack.at[j] = narrow<T>((share_of<T>(widen(logit.at[j]) - top, log, log_of_two) - C(1)) * factor);
    }
    store_pack<V>(logits + i * V, pack);
  }
}

constexpr int turn_warps = 32, turn_threads = turn_warps * warp_size;

/// The sum of a block's exponentials, in every thread; two exponentials a thread. `shared` is free again
/// after the next barrier but one.
template <class T, class C>
__device__ LogSum<T> sum_of_block(LogSum<T> sum, C (&shared)[2][turn_warps]) {
  const auto merge = [](C& top, C& total) {
    C largest = top;
    for (int step = warp_size / 2; step > 0; step /= 2)
      largest = std::fmax(largest, __shfl_xor_sync(whole_warp, largest, step));
    const C by = LogSum<T>::shift(largest);
    total = warp_sum(total * exponential_of<T>(top - by));
    top = largest;
  };
  merge(sum.top, sum.total);
  const int warp = static_cast<int>(threadIdx.x) / warp_size,
            lane = static_cast<int>(threadIdx.x) % warp_size;
  if (lane == 0) {
    shared[0][warp] = sum.top;
    shared[1][warp] = sum.total;
  }
  __syncthreads();
  sum = {shared[0][lane], shared[1][lane]};
  merge(sum.top, sum.total);
  return sum;
}

/// The same for long rows: a block a multiprocessor, which takes one row after another and has the next one
/// on its way. Each thread computes what it brought into shared memory itself.
template <class T, int V>
__global__ void __launch_bounds__(turn_threads, 1) losses_and_gradients_in_turn(const CrossEntropyCall c) {
  using C = compute_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ C shared[2][2][turn_warps];
  const int packs = static_cast<int>(c.columns / V);
  T* kept = reinterpret_cast<T*>(memory);
  const auto fetch = [&](std::int64_t row, int half, int i) {
    if (row < c.rows)
      copy_async(kept + (half * packs + i) * V, static_cast<const T*>(c.logits) + row * c.columns + i * V);
  };
  const auto first = static_cast<std::int64_t>(blockIdx.x), step = static_cast<std::int64_t>(gridDim.x);
  for (int i = static_cast<int>(threadIdx.x); i < packs; i += turn_threads) fetch(first, 0, i);
  close_copies();
  const C each = c.form == RowLosses::mean ? C(1) / *static_cast<const C*>(c.count) : C(1);
  std::int64_t next_target = first < c.rows ? c.targets[first] : 0;
  int half = 0;
  for (std::int64_t row = first; row < c.rows; row += step, half ^= 1) {
    const std::int64_t target = next_target;
    if (row + step < c.rows) next_target = c.targets[row + step];
    wait_copies<0>();
    LogSum<T> sum;
    // Rows come while sums are taken, and go while gradients are made: blocks keep step with one another.
    for (int i = static_cast<int>(threadIdx.x); i < packs; i += turn_threads) {
      fetch(row + step, half ^ 1, i);
      C x[V];
      Raw<V, T>::load(kept + (half * packs + i) * V).widen_to(x);
      add_pack(sum, x);
    }
    close_copies();
    sum = sum_of_block(sum, shared[half]);
    const C top = sum.top, log = log_below_top(top, sum.total), log_of_two = log * C(log2_of_e);
    const Target kind = target_kind(target, c.ignore_index, c.columns);
    const C factor = kind == Target::bad ? std::numeric_limits<C>::quiet_NaN() : each;
    const int chosen = kind == Target::counted ? static_cast<int>(target / V) : -1;
    if (threadIdx.x == 0 && kind != Target::counted) {
      if (kind == Target::bad) c.faults(FaultKind::cross_entropy_target, target, row, c.columns);
      static_cast<C*>(c.row_loss)[row] = kind == Target::bad ? std::numeric_limits<C>::quiet_NaN() : C(0);
    }
    T* logits = static_cast<T*>(c.logits) + row * c.columns;
    for (int i = static_cast<int>(threadIdx.x); i < packs; i += turn_threads) {
      C x[V] = {};
      if (kind != Target::ignored) {
        Raw<V, T>::load(kept + (half * packs + i) * V).widen_to(x);
        if (i == chosen)
          static_cast<C*>(c.row_loss)[row] =
              (top - widen(kept[half * packs * V + static_cast<int>(target)])) + log;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const C share = share_of<T>(x[j] - top, log, log_of_two);
          x[j] = share * factor;
          if (i == chosen && i * V + j == target) x[j] = (share - C(1)) * factor;
        }
      }
      Raw<V, T>::of(x).store(logits + i * V);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    scale_unless_one(T* x, const void* factor, bool wide_factor, std::int64_t n) {
  using C = compute_t<T>;
  const C by = wide_factor ? static_cast<C>(*static_cast<const float*>(factor))
                           : widen(*static_cast<const T*>(factor));
  if (by == C(1)) return;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < n;
       i += static_cast<std::int64_t>(gridDim.x) * threads_per_block)
    x[i] = narrow<T>(widen(x[i]) * by);
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

std::int64_t most_shared_bytes() { return most_shared_memory() - (1 << 10); }

/// The bound belongs to the process, so it is the same in all calls: one of this call's size would refuse the
/// launch of another thread that asked for more.
template <class K>
void allow_most_shared(K* kernel) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(most_shared_bytes()));
}

std::int64_t bytes_of_row(const CrossEntropyCall& c) { return c.columns * size_of(c.dtype); }
constexpr std::int64_t most_bytes_of_row = 112 << 10;  // so that two blocks share a multiprocessor of Hopper

constexpr std::int64_t least_bytes_in_turn = 24 << 10;  // so that each thread has packs of a row

bool in_turn(const CrossEntropyCall& c) {
  return bytes_of_row(c) >= least_bytes_in_turn && 2 * bytes_of_row(c) <= most_shared_bytes();
}

template <class T>
void launch_in_turn(const CrossEntropyCall& c) {
  constexpr auto kernel = losses_and_gradients_in_turn<T, wide_count<T>>;
  allow_most_shared(kernel);
  const std::int64_t blocks =
      std::min<std::int64_t>(c.rows, attribute_of_device(cudaDevAttrMultiProcessorCount));
  kernel<<<static_cast<unsigned>(blocks), turn_threads, static_cast<unsigned>(2 * bytes_of_row(c)),
           c.stream>>>(c);
}

}  // namespace

bool one_pass(const CrossEntropyCall& c) {
  constexpr std::int64_t least_bytes = 4 << 10;  // of shorter rows most of a block would have nothing
  return bytes_of_row(c) >= least_bytes &&
         bytes_of_row(c) <= std::min(most_bytes_of_row, most_shared_bytes());
}

void launch_cross_entropy_over(const CrossEntropyCall& c) {
  for_logits_and_loss(c, [&]<class T, class L>() {
    const unsigned rows = grid_of(c.rows);
    count_targets<compute_t<T>><<<1, total_warps * warp_size, 0, c.stream>>>(c);
    const auto launch = [&]<int V>() {
      constexpr auto kernel = losses_and_gradients<T, L, V>;
      const auto bytes = static_cast<unsigned>(bytes_of_row(c));
      allow_most_shared(kernel);
      kernel<<<rows, over_threads, bytes, c.stream>>>(c);
    };
    if (c.rows > 0) {
      const bool wide = wide_rows<T>(c.columns, static_cast<const T*>(c.logits));
      if (wide && in_turn(c))
        launch_in_turn<T>(c);
      else if (wide)
        launch.template operator()<wide_count<T>>();
      else
        launch.template operator()<1>();
    }
    total_loss<L><<<1, total_warps * warp_size, 0, c.stream>>>(c);
  });
}

void launch_scale_unless_one(DType dtype, DType factor_dtype, void* x, const void* factor, std::int64_t n,
                             cudaStream_t stream) {
  for_floating(dtype, [&]<class T>() {
    scale_unless_one<<<blocks_for(n), threads_per_block, 0, stream>>>(static_cast<T*>(x), factor,
                                                                      factor_dtype != dtype, n);
  });
}

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
