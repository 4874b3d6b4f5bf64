#include "runtime/cuda/recurrence.h"

#include <type_traits>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/rows.cuh"
#include "runtime/ops/arithmetic.h"

namespace sherd::cuda {
namespace {

constexpr int per_thread = 8;  // neighbouring elements, which a thread takes one after another

/// What h is computed in, as on the CPU: what is kept of a running sum or product of floats is its f64 value.
template <class T>
using running_t = std::conditional_t<std::is_integral_v<T>, std::int64_t, double>;

/// What a stretch does to the h before it. One after another is associative.
template <class C, bool factors>
struct Stretch {
  C sum = 0, factor = 1;

  __device__ Stretch then(const Stretch& next) const {
    if constexpr (factors) return {next.of(sum), ops::Mul{}(next.factor, factor)};
    return {next.of(sum), C(1)};
  }
  __device__ C of(C h) const {
    if constexpr (factors) return ops::Add{}(ops::Mul{}(factor, h), sum);
    return ops::Add{}(h, sum);
  }
  __device__ Stretch lane_before(int step) const {
    if constexpr (factors)
      return {__shfl_up_sync(whole_warp, sum, step), __shfl_up_sync(whole_warp, factor, step)};
    return {__shfl_up_sync(whole_warp, sum, step), C(1)};
  }
};

/// Elements [i, i + per_thread) of a row in the order of the recurrence, those from `columns` on as `rest`.
template <class T, class C>
__device__ void load_in_order(const T* row, std::int64_t i, std::int64_t columns, bool reverse, bool wide,
                              C rest, C (&x)[per_thread]) {
  if (wide && i + per_thread <= columns) {
    constexpr int V = wide_count<T> < per_thread ? wide_count<T> : per_thread;
    const T* from = row + (reverse ? columns - per_thread - i : i);
#pragma unroll
    for (int k = 0; k < per_thread; k += V) {
      const Packed<V, T> pack = load_pack<V>(from + k);
#pragma unroll
      for (int j = 0; j < V; ++j)
        x[reverse ? per_thread - 1 - k - j : k + j] = static_cast<C>(widen(pack.at[j]));
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < per_thread; ++j)
    x[j] = i + j < columns ? static_cast<C>(widen(row[reverse ? columns - 1 - i - j : i + j])) : rest;
}

/// The stretch of all threads before this one, and that of all `Warps` in `whole`.
template <int Warps, class S>
__device__ S stretch_before(S mine, S& whole, S* shared) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size,
            warp = static_cast<int>(threadIdx.x) / warp_size % Warps;
  S through = mine;
  for (int step = 1; step < warp_size; step *= 2) {
    const S before = through.lane_before(step);
    if (lane >= step) through = before.then(through);
  }
  S before = through.lane_before(1);
  if (lane == 0) before = {};
  whole = {__shfl_sync(whole_warp, through.sum, warp_size - 1),
           __shfl_sync(whole_warp, through.factor, warp_size - 1)};
  if constexpr (Warps > 1) {
    __syncthreads();  // what was shared before has been read
    if (lane == 0) shared[warp] = whole;
    __syncthreads();
    S earlier{};
    whole = {};
    for (int w = 0; w < Warps; ++w) {
      if (w == warp) earlier = whole;
      whole = whole.then(shared[w]);
    }
    before = earlier.then(before);
  }
  return before;
}

enum class Pass {
  whole,     // a row from h = 0
  totals,    // what each stretch does
  stretches  // each stretch, from the h that those before it give
};

template <class C>
__device__ bool finite(C x) {
  return x - x == 0;
}
template <int Warps>
__device__ bool any_of_group(bool mine) {
  if constexpr (Warps == 1) return __any_sync(whole_warp, mine);
  return __syncthreads_or(mine);
}

/// Elements [i, end) of a row from the h before them, in one thread, where a product of factors is not
/// finite: times an h of 0 it would be NaN, which the recurrence itself need not be. Gives every thread the
/// last h.
template <class T, int Warps, class C>
__device__ C one_by_one(const RecurrenceCall& c, std::int64_t row, std::int64_t i, std::int64_t end, int lane,
                        C h, C* carried) {
  if (lane == 0)
    for (; i < end; ++i) {
      const std::int64_t at = row * c.columns + (c.reverse ? c.columns - 1 - i : i);
      const C a = static_cast<C>(widen(static_cast<const T*>(c.a)[at])),
              b = c.b != nullptr ? static_cast<C>(widen(static_cast<const T*>(c.b)[at]))
                  : i == 0       ? a
                                 : C(0);
      h = i == 0 ? b : a * h + b;
      static_cast<T*>(c.h)[at] = narrow<T>(static_cast<compute_t<T>>(h));
    }
  if constexpr (Warps == 1) return __shfl_sync(whole_warp, h, 0);
  if (lane == 0) *carried = h;
  __syncthreads();
  return *carried;
}

/// A row, or a stretch of one, for `Warps` warps.
template <class T, bool factors, int Warps, Pass pass>
__global__ void __launch_bounds__(RowOfThread<Warps>::block)
    recur(const RecurrenceCall c, std::int64_t stretches, std::int64_t length, bool wide) {
  using C = running_t<T>;
  using S = Stretch<C, factors>;
  __shared__ C carried;
  __shared__ alignas(16) unsigned char memory[Warps * sizeof(S)];
  const RowOfThread<Warps> at;
  if (at.row >= c.rows * stretches) return;  // whole groups
  const std::int64_t row = at.row / stretches, which = at.row % stretches;
  const std::int64_t begin = which * length, end = min(begin + length, c.columns);
  const T *b = static_cast<const T*>(c.b) + row * c.columns,
          *a = static_cast<const T*>(c.a) + row * c.columns;
  C h = 0;
  if constexpr (pass == Pass::stretches)
    for (std::int64_t k = 0; k < which; ++k) h = static_cast<const S*>(c.partial)[row * stretches + k].of(h);
  S all{};
  for (std::int64_t first = begin; first < end; first += Warps * warp_size * per_thread) {
    const std::int64_t i = first + at.lane * per_thread;
    C x[per_thread] = {}, f[per_thread];
    if (!factors || c.b != nullptr) load_in_order(b, i, c.columns, c.reverse, wide, C(0), x);
    if constexpr (factors) {
      load_in_order(a, i, c.columns, c.reverse, wide, C(1), f);
      if (c.b == nullptr && i == 0) x[0] = f[0];
      if (i == 0) f[0] = 1;  // nothing is before it, which an infinite factor would make NaN
    }
    S mine{};
#pragma unroll
    for (int j = 0; j < per_thread; ++j)
      if (i + j < end) mine = mine.then({x[j], factors ? f[j] : C(1)});
    S whole;
    const S before = stretch_before<Warps>(mine, whole, reinterpret_cast<S*>(memory));
    if constexpr (factors) {
      if (any_of_group<Warps>(!finite(mine.factor) || !finite(before.factor) || !finite(whole.factor))) {
        h = one_by_one<T, Warps>(c, row, first, min(first + Warps * warp_size * per_thread, end), at.lane, h,
                                 &carried);
        continue;
      }
    }
    if constexpr (pass == Pass::totals) {
      all = all.then(whole);
    } else {
      C value = before.of(h);
      T* to = static_cast<T*>(c.h) + row * c.columns;
#pragma unroll
      for (int j = 0; j < per_thread; ++j) {
        value = S{x[j], factors ? f[j] : C(1)}.of(value);
        x[j] = value;
      }
      if (wide && i + per_thread <= end) {
        constexpr int V = wide_count<T> < per_thread ? wide_count<T> : per_thread;
        T* from = to + (c.reverse ? c.columns - per_thread - i : i);
#pragma unroll
        for (int k = 0; k < per_thread; k += V) {
          Packed<V, T> pack;
#pragma unroll
          for (int j = 0; j < V; ++j)
            pack.at[j] = narrow<T>(static_cast<compute_t<T>>(x[c.reverse ? per_thread - 1 - k - j : k + j]));
          store_pack(from + k, pack);
        }
      } else {
#pragma unroll
        for (int j = 0; j < per_thread; ++j)
          if (i + j < end)
            to[c.reverse ? c.columns - 1 - i - j : i + j] = narrow<T>(static_cast<compute_t<T>>(x[j]));
      }
      h = whole.of(h);
    }
  }
  if constexpr (pass == Pass::totals)
    if (at.lane == 0) static_cast<S*>(c.partial)[at.row] = all;
}

template <class T, bool factors>
void launch_typed(const RecurrenceCall& c) {
  static_assert(sizeof(Stretch<running_t<T>, factors>) <= RecurrenceCall::bytes_of_stretch);
  const std::int64_t stretches = c.stretches();
  const auto at = [](const void* data) { return static_cast<const T*>(data); };
  const bool wide = c.columns % per_thread == 0 && wide_rows<T>(c.columns, at(c.b), at(c.a), at(c.h));
  if (stretches > 1 &&
      !factors) {  // factors of a stretch multiplied may leave the numbers that h stays within
    constexpr int tile = 8 * warp_size * per_thread;
    const std::int64_t length = blocks_of(blocks_of(c.columns, stretches), tile) * tile;
    const std::int64_t count = blocks_of(c.columns, length);
    const unsigned grid = grid_of(c.rows * count);
    recur<T, factors, 8, Pass::totals><<<grid, RowOfThread<8>::block, 0, c.stream>>>(c, count, length, wide);
    recur<T, factors, 8, Pass::stretches>
        <<<grid, RowOfThread<8>::block, 0, c.stream>>>(c, count, length, wide);
  } else if (c.columns <= most_columns_of_warp) {
    using Row = RowOfThread<1>;
    recur<T, factors, 1, Pass::whole>
        <<<grid_of(blocks_of(c.rows, Row::groups)), Row::block, 0, c.stream>>>(c, 1, c.columns, wide);
  } else {
    recur<T, factors, 8, Pass::whole>
        <<<grid_of(c.rows), RowOfThread<8>::block, 0, c.stream>>>(c, 1, c.columns, wide);
  }
}

}  // namespace

std::int64_t RecurrenceCall::stretches() const {
  constexpr std::int64_t blocks = 1024, least = 1 << 14;  // enough for the largest GPU; worth a block
  const std::int64_t wanted = blocks_of(blocks, rows), room = columns / least;
  return wanted < room ? wanted : room > 1 ? room : 1;
}

void launch_recurrence(const RecurrenceCall& c) {
  constexpr DTypeSet taken = floating_dtypes | DTypeSet{1 << static_cast<int>(DType::i64)};
  with_element<taken>(c.dtype,
                      [&]<class T>() { c.a ? launch_typed<T, true>(c) : launch_typed<T, false>(c); });
}

}  // namespace sherd::cuda
