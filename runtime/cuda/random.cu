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

struct UniformFill {
  UniformRange range;
  float* out;
  std::int64_t n;
  __device__ void operator()(std::int64_t i, PhiloxWords words) const {
    for (int j = 0; j < 4 && i + j < n; ++j) out[i + j] = range(uniform_from(words[j]));
  }
};

struct NormalFill {
  float mean, deviation;
  float* out;
  std::int64_t n;
  __device__ void operator()(std::int64_t i, PhiloxWords words) const {
    for (int j = 0; j < 4 && i + j < n; j += 2) {
      const NormalPair pair = normal_from(words[j], words[j + 1]);
      out[i + j] = std::fma(pair.first, deviation, mean);
      if (i + j + 1 < n) out[i + j + 1] = std::fma(pair.second, deviation, mean);
    }
  }
};

struct IntegerFill {
  std::int64_t low;
  std::uint64_t range;
  std::int64_t* out;
  std::int64_t n;
  __device__ void operator()(std::int64_t i, PhiloxWords words) const {
    for (int j = 0; j < 4 && i + j < n; ++j)
      out[i + j] = low + static_cast<std::int64_t>(below_from(words[j], range));
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
    for (int j = 0; j < 4 && i + j < n; ++j) {
      const C kept = static_cast<C>(x[i + j]) * scale;
      out[i + j] = static_cast<T>(words[j] < threshold ? C(0) : kept);
    }
  }
};

template <class T>
void dropout(DeviceKey at, std::uint32_t threshold, double scale, const void* x, void* out, std::int64_t n,
             cudaStream_t stream) {
  launch_for_words(at, n, stream,
                   Dropped<T>{threshold, static_cast<compute_t<T>>(scale), static_cast<const T*>(x),
                              static_cast<T*>(out), n});
}

__global__ void set_key(RandomKey value, RandomKey* to) { *to = value; }

}  // namespace

void launch_set_key(RandomKey value, RandomKey* to, cudaStream_t stream) {
  set_key<<<1, 1, 0, stream>>>(value, to);
}
void launch_uniform(DeviceKey at, UniformRange range, float* out, std::int64_t n, cudaStream_t stream) {
  launch_for_words(at, n, stream, UniformFill{range, out, n});
}
void launch_normal(DeviceKey at, float mean, float deviation, float* out, std::int64_t n,
                   cudaStream_t stream) {
  launch_for_words(at, n, stream, NormalFill{mean, deviation, out, n});
}
void launch_integers(DeviceKey at, std::int64_t low, std::uint64_t range, std::int64_t* out, std::int64_t n,
                     cudaStream_t stream) {
  launch_for_words(at, n, stream, IntegerFill{low, range, out, n});
}
void launch_dropout(DType dtype, DeviceKey at, std::uint32_t threshold, double scale, const void* x,
                    void* out, std::int64_t n, cudaStream_t stream) {
  for_floating(dtype, [&]<class T>() { dropout<T>(at, threshold, scale, x, out, n, stream); });
}

}  // namespace sherd::cuda
