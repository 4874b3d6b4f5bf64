#include "runtime/cuda/norm.h"

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

/// Calls `body(value)` for this thread's elements of its block's chunk; what it returns is stored when
/// `Store`.
template <class T, class F>
__device__ void for_chunk(const ValueList& list, const F& body) {
  int low = 0, high = list.count;  // the last stretch that begins at or before this chunk
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (list.first_chunk[middle] <= blockIdx.x ? low : high) = middle;
  }
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
    for (const T& value : pack.at) top = max(top, std::bit_cast<Bits>(std::fabs(static_cast<C>(value))));
  });
  for (int step = warp_size / 2; step > 0; step /= 2) top = max(top, __shfl_xor_sync(whole_warp, top, step));
  if (threadIdx.x % warp_size != 0) return;
  auto value = static_cast<double>(std::bit_cast<C>(top));
  if (value != value) value = std::numeric_limits<double>::quiet_NaN();  // one of many bit patterns
  atomicMax(reinterpret_cast<unsigned long long*>(largest), std::bit_cast<unsigned long long>(value));
}

__device__ int square_exponent(double largest) { return largest > 0 ? std::ilogb(largest) + 1 : 0; }

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    square_sums(const __grid_constant__ ValueList list, const double* largest, std::int64_t* sums) {
  if (!std::isfinite(*largest)) return;
  const int exponent = square_exponent(*largest);
  const double down1 = std::ldexp(1.0, -exponent / 2), down2 = std::ldexp(1.0, -exponent - (-exponent / 2));
  long long high = 0, low = 0;
  for_chunk<T>(list, [&](T*, const auto& pack) {
    for (const T& value : pack.at) {
      const double x = static_cast<double>(static_cast<compute_t<T>>(value)) * down1 * down2;
      const auto square = static_cast<long long>(x * x * 0x1p60);
      high += square >> 30;
      low += square & ((1ll << 30) - 1);
    }
  });
  high = warp_sum(high);
  low = warp_sum(low);
  if (threadIdx.x % warp_size != 0) return;
  auto* to = reinterpret_cast<unsigned long long*>(sums);
  atomicAdd(to, static_cast<unsigned long long>(high));
  atomicAdd(to + 1, static_cast<unsigned long long>(low));
}

__global__ void norm_of_sums(const std::int64_t* sums, const double* largest, double* norm) {
  if (!std::isfinite(*largest)) {
    *norm = *largest;
    return;
  }
  const double square =
      std::fma(static_cast<double>(sums[0]), 0x1p-30, static_cast<double>(sums[1]) * 0x1p-60);
  *norm = std::ldexp(std::sqrt(square), square_exponent(*largest));
}

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    clip_scale(const __grid_constant__ ValueList list, double limit, const double* norm) {
  const double factor = limit / (*norm + 1e-6);
  if (factor >= 1.0) return;  // NaN is for all
  for_chunk<T>(list, [&](T* at, auto pack) {
    for (T& value : pack.at)
      value = static_cast<T>(
          static_cast<compute_t<T>>(static_cast<double>(static_cast<compute_t<T>>(value)) * factor));
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

void launch_square_sums(const ValueList& list, const double* largest, std::int64_t* sums,
                        cudaStream_t stream) {
  launch(list, [&]<class T>(unsigned blocks) {
    square_sums<T><<<blocks, threads_per_block, 0, stream>>>(list, largest, sums);
  });
}

void launch_norm_of_sums(const std::int64_t* sums, const double* largest, double* norm, cudaStream_t stream) {
  norm_of_sums<<<1, 1, 0, stream>>>(sums, largest, norm);
}

void launch_clip_scale(const ValueList& list, double limit, const double* norm, cudaStream_t stream) {
  launch(list, [&]<class T>(unsigned blocks) {
    clip_scale<T><<<blocks, threads_per_block, 0, stream>>>(list, limit, norm);
  });
}

}  // namespace sherd::cuda
