#include "runtime/cuda/norm.h"

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/types.cuh"
#include "runtime/exact_squares.h"

namespace sherd::cuda {
namespace {

/// Calls `body(value)` for this thread's elements of its block's chunk; what it returns is stored when
/// `Store`.
template <class T, class F>
__device__ void for_chunk(const ValueList& list, const F& body) {
  const int low = list.of_chunk(blockIdx.x);
  T* data = static_cast<T*>(list.data[low]);
  const std::int64_t begin = (blockIdx.x - list.first_chunk[low]) * ValueList::chunk;
  const std::int64_t end = min(begin + ValueList::chunk, list.n[low]);
  constexpr int V = wide_count<T>;
  std::int64_t i = begin;
  if (reinterpret_cast<std::uintptr_t>(data) % 16 == 0) {
    for (i += static_cast<std::int64_t>(threadIdx.x) * V; i + V <= end; i += threads_per_block * V)
      body(data + i, load_pack<V>(data + i));
    i = begin + (end - begin) / V * V;
  }
  for (i += threadIdx.x; i < end; i += threads_per_block) body(data + i, load_pack<1>(data + i));
}

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    largest_magnitude(const __grid_constant__ ValueList list, double* largest) {
  using C = compute_t<T>;
  using Bits = typename math::detail::Format<C>::Int;
  // Magnitudes order like integers, NaN above all.
  Bits top = 0;
  for_chunk<T>(list, [&](T*, const auto& pack) {
    for (const T& value : pack.at) top = max(top, std::bit_cast<Bits>(std::fabs(widen(value))));
  });
  for (int step = warp_size / 2; step > 0; step /= 2) top = max(top, __shfl_xor_sync(whole_warp, top, step));
  if (threadIdx.x % warp_size != 0) return;
  auto value = static_cast<double>(std::bit_cast<C>(top));
  if (value != value) value = std::numeric_limits<double>::quiet_NaN();  // one of many bit patterns
  atomicMax(reinterpret_cast<unsigned long long*>(largest), std::bit_cast<unsigned long long>(value));
}

constexpr int per_lane = 32;  // elements of a piece that a lane holds; a bit of `add_piece` each
constexpr std::int64_t piece = per_lane * warp_size;

/// Elements [i, i + V) of `data`, those from `end` on as 0.
template <int V, class T>
__device__ Packed<V, T> load_until(const T* data, std::int64_t i, std::int64_t end, bool aligned) {
  if (aligned && i + V <= end) return load_pack<V>(data + i);
  Packed<V, T> pack{};
  for (int j = 0; j < V; ++j)
    if (i + j < end) pack.at[j] = data[i + j];
  return pack;
}

/// A warp's sum of the squares of [begin, end), a piece at most.
template <class T, class Add>
__device__ void add_piece(const T* data, std::int64_t begin, std::int64_t end, bool aligned, const Add& add) {
  using C = compute_t<T>;
  using Grid = SquaresGrid<mantissa_bits<T>>;
  constexpr int V = wide_count<T>;
  const int lane = static_cast<int>(threadIdx.x % warp_size);
  Packed<V, T> packs[per_lane / V];
#pragma unroll
  for (int k = 0; k < per_lane / V; ++k)
    packs[k] = load_until<V>(data, begin + (k * warp_size + lane) * V, end, aligned);
  unsigned top = 0;
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int k = 0; k < per_lane / V; ++k)
#pragma unroll
      for (int j = 0; j < V; ++j) body(std::fabs(widen(packs[k].at[j])));
  };
  each([&](C x) { top = max(top, std::bit_cast<unsigned>(x)); });
  for (int step = warp_size / 2; step > 0; step /= 2) top = max(top, __shfl_xor_sync(whole_warp, top, step));
  const C largest = std::bit_cast<C>(top);
  if (largest == 0) return;
  // One by one, and read again: unrolled, and of packs, it would be nearly all of the kernel's code.
  const auto add_some = [&](unsigned which) {
#pragma unroll 1
    for (; which != 0; which &= which - 1) {
      const int n = __ffs(static_cast<int>(which)) - 1;
      const std::int64_t i = begin + (n / V * warp_size + lane) * V + n % V;
      if (i < end) add_square(static_cast<double>(static_cast<C>(data[i])), add);
    }
  };
  if (!std::isfinite(largest)) {
    add_some(~0u);
    return;
  }
  const Grid grid = Grid::of(static_cast<double>(largest));
  const auto least = static_cast<C>(grid.least);
  double above = 0, below = 0;
  unsigned smaller = 0, bit = 1;
  each([&](C x) {
    if (x < least && x > 0) smaller |= bit;
    bit <<= 1;
    if (x < least) return;
    const double square = static_cast<double>(x) * static_cast<double>(x);
    const double on_grid = Grid::split ? (square + grid.splitter) - grid.splitter : square;
    above += on_grid;
    if (Grid::split) below += square - on_grid;
  });
  add_some(smaller);
  const long long high = warp_sum(static_cast<long long>(above * grid.to_high)),
                  low = Grid::split ? warp_sum(static_cast<long long>(below * grid.to_low)) : 0;
  if (lane == 0) grid.finish(high, low, add);
}

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    square_sums(const __grid_constant__ ValueList list, unsigned long long* limbs) {
  __shared__ unsigned long long sums[ExactSquares::limbs];
  for (int i = threadIdx.x; i < ExactSquares::limbs; i += threads_per_block) sums[i] = 0;
  __syncthreads();
  const auto add = [&](int limb, std::uint64_t value) {
    atomicAdd(sums + limb, static_cast<unsigned long long>(value));
  };
  for (std::int64_t chunk = blockIdx.x; chunk < list.first_chunk[list.count]; chunk += gridDim.x) {
    const int which = list.of_chunk(chunk);
    const T* data = static_cast<const T*>(list.data[which]);
    const std::int64_t begin = (chunk - list.first_chunk[which]) * ValueList::chunk;
    const std::int64_t end = min(begin + ValueList::chunk, list.n[which]);
    if constexpr (std::is_same_v<T, double>) {
      for (std::int64_t i = begin + threadIdx.x; i < end; i += threads_per_block) add_square(data[i], add);
    } else {
      const bool aligned = reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
      for (std::int64_t i = begin + threadIdx.x / warp_size * piece; i < end;
           i += threads_per_block / warp_size * piece)
        add_piece(data, i, min(i + piece, end), aligned, add);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ExactSquares::limbs; i += threads_per_block)
    if (sums[i] != 0) atomicAdd(limbs + i, sums[i]);
}

__global__ void norm_of_sums(const std::int64_t* limbs, double* norm) { *norm = root_of(limbs); }

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    clip_scale(const __grid_constant__ ValueList list, double limit, const double* norm) {
  const double factor = limit / (*norm + 1e-6);
  if (factor >= 1.0) return;  // NaN is for all
  for_chunk<T>(list, [&](T* at, auto pack) {
    for (T& value : pack.at)
      value = narrow<T>(static_cast<compute_t<T>>(static_cast<double>(widen(value)) * factor));
    store_pack(at, pack);
  });
}

template <class F>
void launch(const ValueList& list, F&& f) {
  if (const auto blocks = static_cast<unsigned>(list.first_chunk[list.count]); blocks > 0)
    for_floating(list.dtype, [&]<class T>() { f.template operator()<T>(blocks); });
}

}  // namespace

void launch_largest_magnitude(const ValueList& list, double* largest, cudaStream_t stream) {
  launch(list, [&]<class T>(unsigned blocks) {
    largest_magnitude<T><<<blocks, threads_per_block, 0, stream>>>(list, largest);
  });
}

void launch_square_sums(const ValueList& list, std::int64_t* limbs, cudaStream_t stream) {
  constexpr unsigned most_blocks = 1056;  // each adds its limbs once; 8 on each of 132 processors
  launch(list, [&]<class T>(unsigned blocks) {
    square_sums<T><<<std::min(blocks, most_blocks), threads_per_block, 0, stream>>>(
        list, reinterpret_cast<unsigned long long*>(limbs));
  });
}

void launch_norm_of_sums(const std::int64_t* limbs, double* norm, cudaStream_t stream) {
  norm_of_sums<<<1, 1, 0, stream>>>(limbs, norm);
}

void launch_clip_scale(const ValueList& list, double limit, const double* norm, cudaStream_t stream) {
  launch(list, [&]<class T>(unsigned blocks) {
    clip_scale<T><<<blocks, threads_per_block, 0, stream>>>(list, limit, norm);
  });
}

}  // namespace sherd::cuda
