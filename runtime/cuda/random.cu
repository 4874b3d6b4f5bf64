#include "runtime/cuda/block.cuh"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/types.cuh"
#include "runtime/random.h"

namespace sherd::cuda {
namespace {

/// Calls `body(element, words)` once for each four elements of [0, n).
template <class F>
__global__ void __launch_bounds__(threads_per_block) for_words(DeviceKey at, std::int64_t n, F body) {
  const RandomKey key = at.read();
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; 4 * i < n;
       i += stride)
    body(4 * i, philox(key.seed, key.offset + static_cast<std::uint64_t>(i)));
}

template <class F>
void launch_for_words(DeviceKey at, std::int64_t n, cudaStream_t stream, F body) {
  for_words<<<blocks_for((n + 3) / 4), threads_per_block, 0, stream>>>(at, n, body);
}

/// Whether the four elements from `i` on are all there, and can be moved at once.
template <class T>
__device__ bool at_once(const T* data, std::int64_t i, std::int64_t n) {
  return i + 4 <= n && reinterpret_cast<std::uintptr_t>(data) % sizeof(Packed<4, T>) == 0;
}
template <class T>
__device__ void store_four(T* out, std::int64_t i, std::int64_t n, const Packed<4, T>& four) {
  if (at_once(out, i, n))
    store_pack(out + i, four);
  else
    for (int j = 0; j < 4 && i + j < n; ++j) out[i + j] = four.at[j];
}

template <class T>
struct UniformFill {
  UniformRange range;
  T* out;
  std::int64_t n;
  __device__ void operator()(std::int64_t i, PhiloxWords words) const {
    Packed<4, T> four;
#pragma unroll
    for (int j = 0; j < 4; ++j) four.at[j] = narrow<T>(range(uniform_from(words[j])));
    store_four(out, i, n, four);
  }
};

struct UniformFill64 {
  DeviceKey key;
  UniformRangeOf<double> range;
  double* out;
  std::int64_t n;
  __device__ void operator()(std::int64_t i, PhiloxWords words) const {
    const RandomKey at = key.read();
    const PhiloxWords more = philox(at.seed, at.offset + static_cast<std::uint64_t>(i / 4), stream_of_more);
    Packed<4, double> four;
#pragma unroll
    for (int j = 0; j < 4; ++j) four.at[j] = range(uniform_from(words[j], more[j]));
    store_four(out, i, n, four);
  }
};

template <class T>
struct NormalFill {
  float mean, deviation;
  T* out;
  std::int64_t n;
  __device__ void operator()(std::int64_t i, PhiloxWords words) const {
    Packed<4, T> four;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const NormalPair pair = normal_from(words[j], words[j + 1]);
      four.at[j] = narrow<T>(std::fma(pair.first, deviation, mean));
      four.at[j + 1] = narrow<T>(std::fma(pair.second, deviation, mean));
    }
    store_four(out, i, n, four);
  }
};

/// Of four integers a thread has 32 bytes. Neighbouring threads swap halves, so that what both store at once
/// lies side by side.
__global__ void __launch_bounds__(threads_per_block)
    fill_integers(DeviceKey at, std::int64_t low, std::uint64_t range, std::int64_t* out, std::int64_t n) {
  const RandomKey key = at.read();
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  const bool odd = threadIdx.x % 2 != 0, aligned = reinterpret_cast<std::uintptr_t>(out) % 16 == 0;
  const auto put = [&](std::int64_t i, std::uint32_t first, std::uint32_t second) {
    const auto drawn = [&](std::uint32_t word) {
      return low + static_cast<std::int64_t>(below_from(word, range));
    };
    const Packed<2, std::int64_t> two{{drawn(first), drawn(second)}};
    if (aligned && i + 2 <= n)
      store_pack(out + i, two);
    else
      for (int j = 0; j < 2 && i + j < n; ++j) out[i + j] = two.at[j];
  };
  // Whole warps, as they swap.
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x;
       4 * (i - threadIdx.x % warp_size) < n; i += stride) {
    const PhiloxWords words = philox(key.seed, key.offset + static_cast<std::uint64_t>(i));
    const std::uint32_t kept[] = {odd ? words[2] : words[0], odd ? words[3] : words[1]},
                        given[] = {odd ? words[0] : words[2], odd ? words[1] : words[3]};
    const std::uint32_t taken[] = {__shfl_xor_sync(whole_warp, given[0], 1),
                                   __shfl_xor_sync(whole_warp, given[1], 1)};
    const std::int64_t to = odd ? 4 * i - 2 : 4 * i;  // the half of the even one's four
    put(to, odd ? taken[0] : kept[0], odd ? taken[1] : kept[1]);
    put(to + 4, odd ? kept[0] : taken[0], odd ? kept[1] : taken[1]);
  }
}

/// The four elements from `i` on, those from `n` on as 0.
template <class T>
__device__ Packed<4, T> load_four(const T* x, std::int64_t i, std::int64_t n) {
  if (at_once(x, i, n)) return load_pack<4>(x + i);
  Packed<4, T> four{};
  for (int j = 0; j < 4 && i + j < n; ++j) four.at[j] = x[i + j];
  return four;
}

template <class T>
struct BernoulliFill {
  UniformRange range;
  const T* p;
  T* out;
  std::int64_t n;
  __device__ void operator()(std::int64_t i, PhiloxWords words) const {
    Packed<4, T> four = load_four(p, i, n);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      four.at[j] = narrow<T>(range(uniform_from(words[j])) < widen(four.at[j]) ? 1.f : 0.f);
    store_four(out, i, n, four);
  }
};

template <class T>
struct Dropped {
  std::uint32_t threshold;
  compute_t<T> scale;
  const T* x;
  T* out;
  std::int64_t n;
  __device__ void operator()(std::int64_t i, PhiloxWords words) const {
    using C = compute_t<T>;
    Packed<4, T> four = load_four(x, i, n);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      four.at[j] = narrow<T>(words[j] < threshold ? C(0) : widen(four.at[j]) * scale);
    store_four(out, i, n, four);
  }
};

template <class T>
void dropout(DeviceKey at, std::uint32_t threshold, double scale, const void* x, void* out, std::int64_t n,
             cudaStream_t stream) {
  launch_for_words(at, n, stream,
                   Dropped<T>{threshold, static_cast<compute_t<T>>(scale), static_cast<const T*>(x),
                              static_cast<T*>(out), n});
}

template <class F>
void for_small_floats(DType dtype, const F& f) {
  for_floating(dtype, [&]<class T>() {
    if constexpr (std::is_same_v<compute_t<T>, float>) f.template operator()<T>();
  });
}

__global__ void set_key(RandomKey value, RandomKey* to) { *to = value; }

}  // namespace

void launch_set_key(RandomKey value, RandomKey* to, cudaStream_t stream) {
  set_key<<<1, 1, 0, stream>>>(value, to);
}
void launch_uniform(DeviceKey at, UniformRange range, DType dtype, void* out, std::int64_t n,
                    cudaStream_t stream) {
  for_small_floats(dtype, [&]<class T>() {
    launch_for_words(at, n, stream, UniformFill<T>{range, static_cast<T*>(out), n});
  });
}
void launch_uniform(DeviceKey at, UniformRangeOf<double> range, double* out, std::int64_t n,
                    cudaStream_t stream) {
  launch_for_words(at, n, stream, UniformFill64{at, range, out, n});
}
void launch_normal(DeviceKey at, float mean, float deviation, DType dtype, void* out, std::int64_t n,
                   cudaStream_t stream) {
  for_small_floats(dtype, [&]<class T>() {
    launch_for_words(at, n, stream, NormalFill<T>{mean, deviation, static_cast<T*>(out), n});
  });
}
void launch_integers(DeviceKey at, std::int64_t low, std::uint64_t range, std::int64_t* out, std::int64_t n,
                     cudaStream_t stream) {
  fill_integers<<<blocks_for((n + 3) / 4), threads_per_block, 0, stream>>>(at, low, range, out, n);
}
void launch_bernoulli(DType dtype, DeviceKey at, UniformRange range, const void* p, void* out, std::int64_t n,
                      cudaStream_t stream) {
  for_small_floats(dtype, [&]<class T>() {
    launch_for_words(at, n, stream,
                     BernoulliFill<T>{range, static_cast<const T*>(p), static_cast<T*>(out), n});
  });
}
void launch_dropout(DType dtype, DeviceKey at, std::uint32_t threshold, double scale, const void* x,
                    void* out, std::int64_t n, cudaStream_t stream) {
  for_floating(dtype, [&]<class T>() { dropout<T>(at, threshold, scale, x, out, n, stream); });
}

}  // namespace sherd::cuda
