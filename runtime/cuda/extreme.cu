#include "runtime/cuda/extreme.h"

#include <algorithm>
#include <limits>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/order.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

/// The best value alone: half the work of one with its place.
template <class T>
struct Value {
  using C = typename Candidate<T>::C;
  C value;

  __device__ static Value none(bool largest) {
    using Limits = std::numeric_limits<C>;
    if constexpr (std::is_floating_point_v<C>) return {largest ? -Limits::infinity() : Limits::infinity()};
    return {largest ? Limits::lowest() : Limits::max()};
  }
  __device__ void take(const Value& x, bool largest) {
    const bool better = largest ? x.value > value : x.value < value;
    if constexpr (std::is_floating_point_v<C>)
      value =
          (better || x.value != x.value) ? x.value : value;  // a NaN here is better than nothing that follows
    else
      value = better ? x.value : value;
  }
  __device__ static Value of(T x, std::int64_t) { return {static_cast<C>(widen(x))}; }
  __device__ Value from_lane(int step) const {
    return {static_cast<C>(__shfl_down_sync(whole_warp, value, step))};
  }
};

template <class T>
struct Place : Candidate<T> {
  using C = typename Candidate<T>::C;

  __device__ static Place none(bool) { return {}; }
  __device__ void take(const Place& x, bool largest) {
    if (x.before(*this, largest)) *this = x;
  }
  __device__ static Place of(T x, std::int64_t place) { return {{static_cast<C>(widen(x)), place}}; }
  __device__ Place from_lane(int step) const {
    return {{static_cast<C>(__shfl_down_sync(whole_warp, this->value, step)),
             __shfl_down_sync(whole_warp, static_cast<long long>(this->place), step)}};
  }
};

template <class T>
__device__ void write(const ExtremeCall& c, std::int64_t result, std::int64_t, const Value<T>& best) {
  static_cast<T*>(c.values)[result] = narrow<T>(best.value);
}
template <class T>
__device__ void write(const ExtremeCall& c, std::int64_t result, std::int64_t offset, const Place<T>& best) {
  if (c.values) static_cast<T*>(c.values)[result] = static_cast<const T*>(c.x)[offset + best.place * c.inner];
  c.places[result] = best.place;
}

/// Along contiguous elements: `lanes` threads (a warp or the block) a piece, 16 bytes at once where `wide`.
template <class T, class Best>
__global__ void __launch_bounds__(threads_per_block)
    along_rows(const ExtremeCall c, std::int64_t length, int lanes, bool wide) {
  constexpr int V = wide_count<T>;
  __shared__ alignas(16) unsigned char memory[threads_per_block / warp_size * sizeof(Best)];
  auto* shared = reinterpret_cast<Best*>(memory);
  const T* x = static_cast<const T*>(c.x);
  const std::int64_t begin = blockIdx.y * length, end = min(begin + length, c.reduce);
  const int lane = static_cast<int>(threadIdx.x) % lanes, groups = threads_per_block / lanes;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * groups; first < c.outer;
       first += static_cast<std::int64_t>(gridDim.x) * groups) {
    const std::int64_t o = first + static_cast<int>(threadIdx.x) / lanes;
    const T* row = x + o * c.reduce;
    Best best = Best::none(c.largest);
    if (o < c.outer && wide) {
      constexpr int ahead = 4;  // packs on their way at a time
      const auto take = [&](const Packed<V, T>& pack, std::int64_t i) {
#pragma unroll
        for (int j = 0; j < V; ++j) best.take(Best::of(pack.at[j], i + j), c.largest);
      };
      const std::int64_t step = lanes * V;
      std::int64_t i = begin + lane * V;
      for (; i + (ahead - 1) * step < end; i += ahead * step) {
        Packed<V, T> packs[ahead];
#pragma unroll
        for (int a = 0; a < ahead; ++a) packs[a] = load_pack<V>(row + i + a * step);
#pragma unroll
        for (int a = 0; a < ahead; ++a) take(packs[a], i + a * step);
      }
      for (; i < end; i += step) take(load_pack<V>(row + i), i);
    } else if (o < c.outer) {
      for (std::int64_t i = begin + lane * V; i < end; i += lanes * V)
        for (std::int64_t j = i; j < min(i + V, end); ++j) best.take(Best::of(row[j], j), c.largest);
    }
    for (int step = warp_size / 2; step > 0; step /= 2) best.take(best.from_lane(step), c.largest);
    if (lanes > warp_size) {
      __syncthreads();  // what was shared before has been read
      if (threadIdx.x % warp_size == 0) shared[threadIdx.x / warp_size] = best;
      __syncthreads();
      if (lane == 0)
        for (int w = 1; w < threads_per_block / warp_size; ++w) best.take(shared[w], c.largest);
    }
    if (lane != 0 || o >= c.outer) continue;
    if (c.partial)
      static_cast<Best*>(c.partial)[blockIdx.y * c.outer + o] = best;
    else
      write(c, o, o * c.reduce, best);
  }
}

/// Across rows: a thread a column of a piece.
template <class T, class Best>
__global__ void __launch_bounds__(threads_per_block) along_columns(const ExtremeCall c, std::int64_t length) {
  const T* x = static_cast<const T*>(c.x);
  const std::int64_t begin = blockIdx.y * length, end = min(begin + length, c.reduce);
  const std::int64_t results = c.outer * c.inner,
                     step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; r < results;
       r += step) {
    const std::int64_t offset = r / c.inner * c.reduce * c.inner + r % c.inner;
    const auto element = [&](std::int64_t i) { return x[offset + i * c.inner]; };
    Best best = Best::none(c.largest);
    constexpr int ahead = 8;  // elements on their way at a time
    std::int64_t i = begin;
    for (; i + ahead <= end; i += ahead) {
      T loaded[ahead];
#pragma unroll
      for (int a = 0; a < ahead; ++a) loaded[a] = element(i + a);
#pragma unroll
      for (int a = 0; a < ahead; ++a) best.take(Best::of(loaded[a], i + a), c.largest);
    }
    for (; i < end; ++i) best.take(Best::of(element(i), i), c.largest);
    if (c.partial)
      static_cast<Best*>(c.partial)[blockIdx.y * results + r] = best;
    else
      write(c, r, offset, best);
  }
}

/// A warp a result, whose lanes share its pieces.
template <class T, class Best>
__global__ void __launch_bounds__(threads_per_block) join_pieces(const ExtremeCall c, std::int64_t pieces) {
  constexpr int groups = threads_per_block / warp_size;
  const std::int64_t results = c.outer * c.inner, step = static_cast<std::int64_t>(gridDim.x) * groups;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * groups + threadIdx.x / warp_size; r < results;
       r += step) {
    Best best = Best::none(c.largest);
#pragma unroll 4
    for (std::int64_t p = lane; p < pieces; p += warp_size)
      best.take(static_cast<const Best*>(c.partial)[p * results + r], c.largest);
    for (int half = warp_size / 2; half > 0; half /= 2) best.take(best.from_lane(half), c.largest);
    if (lane == 0) write(c, r, r / c.inner * c.reduce * c.inner + r % c.inner, best);
  }
}

template <class T, class Best>
void launch_best(const ExtremeCall& c) {
  static_assert(sizeof(Best) <= 16);
  constexpr int short_row = 1024;  // a warp's
  const std::int64_t pieces = c.pieces(), length = blocks_of(blocks_of(c.reduce, pieces), 16) * 16;
  const auto down = static_cast<unsigned>(pieces);
  if (c.inner == 1) {
    const int lanes = c.reduce <= short_row ? warp_size : threads_per_block;
    along_rows<T, Best><<<dim3(blocks_for(c.outer * lanes), down), threads_per_block, 0, c.stream>>>(
        c, length, lanes, wide_rows<T>(c.reduce, static_cast<const T*>(c.x)));
  } else {
    along_columns<T, Best>
        <<<dim3(blocks_for(c.outer * c.inner), down), threads_per_block, 0, c.stream>>>(c, length);
  }
  if (pieces > 1)
    join_pieces<T, Best>
        <<<blocks_for(c.outer * c.inner * warp_size), threads_per_block, 0, c.stream>>>(c, pieces);
}

}  // namespace

std::int64_t ExtremeCall::pieces() const {
  // Threads that keep the largest GPU busy; pieces are no shorter than what is worth a thread or a block.
  constexpr std::int64_t threads = 1 << 18, least_column = 16, least_row = 4096;
  const std::int64_t threads_of_result = inner == 1 ? threads_per_block : 1;
  constexpr std::int64_t most = 1024;  // pieces of a result that one warp joins
  const std::int64_t wanted = std::min(blocks_of(threads, outer * inner * threads_of_result), most),
                     room = reduce / (inner == 1 ? least_row : least_column);
  return wanted < room ? wanted : room > 1 ? room : 1;
}

void launch_extreme(const ExtremeCall& c) {
  for_any(c.dtype, [&]<class T>() { c.places ? launch_best<T, Place<T>>(c) : launch_best<T, Value<T>>(c); });
}

}  // namespace sherd::cuda
