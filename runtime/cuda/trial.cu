#include "runtime/cuda/trial.h"

#include "runtime/cuda/types.cuh"
#include "runtime/ops/relu.h"

namespace sherd::cuda {
namespace {

__device__ std::int64_t first_index() {
  return static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x;
}
__device__ std::int64_t all_threads() { return static_cast<std::int64_t>(gridDim.x) * threads_per_block; }

/// The indices through the finaliser of MurmurHash3 (Appleby, 2011). Bytes are 8-bit floats of either format
/// below 2, so never NaN.
template <class T>
__global__ void noise_kernel(T* out, std::int64_t n) {
  for (std::int64_t i = first_index(); i < n; i += all_threads()) {
    auto h = static_cast<std::uint32_t>(i);
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    h ^= h >> 16;
    if constexpr (std::is_integral_v<T>)
      out[i] = static_cast<T>(h & 0xbf);
    else
      out[i] = static_cast<T>(static_cast<compute_t<T>>(static_cast<std::int32_t>(h)) *
                              static_cast<compute_t<T>>(0x1p-31));
  }
}

template <class T>
__global__ void relu_kernel(T* numbers, std::int64_t n) {
  for (std::int64_t i = first_index(); i < n; i += all_threads())
    numbers[i] = narrow<T>(ops::Relu{}(widen(numbers[i])));
}

__global__ void compare_kernel(const std::uint16_t* a, const std::uint16_t* b, std::int64_t n, int* differ) {
  for (std::int64_t i = first_index(); i < n; i += all_threads())
    if (a[i] != b[i]) *differ = 1;
}

}  // namespace

void launch_noise(DType dtype, void* out, std::int64_t n, cudaStream_t stream) {
  constexpr DTypeSet dtypes = floating_dtypes | DTypeSet{1 << static_cast<int>(DType::u8)};
  with_element<dtypes>(dtype, [&]<class T>() {
    noise_kernel<<<blocks_for(n), threads_per_block, 0, stream>>>(static_cast<T*>(out), n);
  });
}

void launch_relu(DType dtype, void* numbers, std::int64_t n, cudaStream_t stream) {
  for_floating(dtype, [&]<class T>() {
    relu_kernel<<<blocks_for(n), threads_per_block, 0, stream>>>(static_cast<T*>(numbers), n);
  });
}

void launch_compare(const void* a, const void* b, std::size_t bytes, int* differ, cudaStream_t stream) {
  const auto n = static_cast<std::int64_t>(bytes / sizeof(std::uint16_t));
  compare_kernel<<<blocks_for(n), threads_per_block, 0, stream>>>(
      static_cast<const std::uint16_t*>(a), static_cast<const std::uint16_t*>(b), n, differ);
}

}  // namespace sherd::cuda
