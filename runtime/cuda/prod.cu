#include <algorithm>
#include <type_traits>

#include "runtime/cuda/fold.cuh"

namespace sherd::cuda {
namespace {

/// A product of what is "added" to it.
template <class A>
struct Factor {
  A value = A(1);
  __device__ Factor& operator+=(const Factor& other) {
    value *= other.value;
    return *this;
  }
};

template <class T>
using factor_t = Factor<std::conditional_t<std::is_floating_point_v<compute_t<T>>, double, std::uint64_t>>;

/// Of elements, or of the products of pieces (`X`), whose own go to `To`.
template <class T, class X, class To>
struct Multiplying {
  static constexpr bool reads_first = false;
  using Element = X;
  using Run = factor_t<T>;
  using Total = factor_t<T>;
  void* out;

  __device__ Run term(compute_t<X> x, compute_t<X>) const {
    if constexpr (std::is_same_v<X, Run>)
      return x;
    else
      return {static_cast<decltype(Run::value)>(x)};
  }
  __device__ void store(std::int64_t i, const Total& total) const {
    if constexpr (std::is_same_v<To, Total>)
      static_cast<To*>(out)[i] = total;
    else if constexpr (std::is_same_v<To, std::int64_t>)
      static_cast<To*>(out)[i] = static_cast<To>(total.value);
    else
      static_cast<To*>(out)[i] = narrow<To>(static_cast<compute_t<To>>(total.value));
  }
};

// ---- The gradient of a row: each element's is gy times all that stands before it and behind it.

/// Exclusive products over a block in the order of its threads; `shared` has room for one number a warp.
__device__ double product_before(double mine, double* shared) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size,
            warp = static_cast<int>(threadIdx.x) / warp_size;
  double through = mine;
  for (int step = 1; step < warp_size; step *= 2) {
    const double before = __shfl_up_sync(whole_warp, through, step);
    if (lane >= step) through *= before;
  }
  if (lane == warp_size - 1) shared[warp] = through;
  double before = __shfl_up_sync(whole_warp, through, 1);
  if (lane == 0) before = 1;
  __syncthreads();
  for (int w = 0; w < warp; ++w) before *= shared[w];
  __syncthreads();
  return before;
}
__device__ double product_behind(double mine, double* shared) {
  constexpr int warps = threads_per_block / warp_size;
  const int lane = static_cast<int>(threadIdx.x) % warp_size,
            warp = static_cast<int>(threadIdx.x) / warp_size;
  double through = mine;
  for (int step = 1; step < warp_size; step *= 2) {
    const double behind = __shfl_down_sync(whole_warp, through, step);
    if (lane + step < warp_size) through *= behind;
  }
  if (lane == 0) shared[warp] = through;
  double behind = __shfl_down_sync(whole_warp, through, 1);
  if (lane == warp_size - 1) behind = 1;
  __syncthreads();
  for (int w = warps - 1; w > warp; --w) behind *= shared[w];
  __syncthreads();
  return behind;
}

/// A block a row: neighbouring elements are one thread's, an odd number of them so that threads meet no bank
/// of shared memory twice.
template <class T>
__global__ void __launch_bounds__(threads_per_block)
    product_grad(const ProductCall c, std::int64_t each, const T* gy, T* gx) {
  extern __shared__ double row[];
  __shared__ double of_warps[threads_per_block / warp_size];
  wait_for_earlier();
  const auto n = static_cast<int>(c.reduce), begin = static_cast<int>(threadIdx.x * each),
             end = min(begin + static_cast<int>(each), n);
  for (std::int64_t o = blockIdx.x; o < c.outer; o += gridDim.x) {
    const T* x = static_cast<const T*>(c.x) + o * c.reduce;
    for (int i = static_cast<int>(threadIdx.x); i < n; i += threads_per_block)
      row[i] = static_cast<double>(widen(x[i]));
    __syncthreads();
    double mine = 1;
    for (int i = begin; i < end; ++i) mine *= row[i];
    double before = product_before(mine, of_warps) * static_cast<double>(widen(gy[o])),
           behind = product_behind(mine, of_warps);
    // Behind each element first, in its place; then what is before it, from x again.
    for (int i = end - 1; i >= begin; --i) {
      const double value = row[i];
      row[i] = behind;
      behind *= value;
    }
    for (int i = begin; i < end; ++i) {
      const double value = static_cast<double>(widen(x[i]));
      row[i] *= before;
      before *= value;
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < n; i += threads_per_block)
      gx[o * c.reduce + i] = narrow<T>(static_cast<compute_t<T>>(row[i]));
    __syncthreads();
  }
}

}  // namespace

void launch_product(const ProductCall& c) {
  for_any(c.dtype, [&]<class T>() {
    using F = factor_t<T>;
    using To = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>;
    fold(c, Multiplying<T, T, To>{c.out}, Multiplying<T, T, F>{c.partial}, Multiplying<T, F, To>{c.out});
  });
}

std::int64_t longest_product_here() {
  const std::int64_t room = most_shared_memory() - (4 << 10);  // what a block needs besides
  return std::min(longest_product, room / static_cast<std::int64_t>(sizeof(double)));
}

void launch_product_grad(const ProductCall& c, const void* gy, void* gx) {
  const std::int64_t each = blocks_of(c.reduce, threads_per_block) | 1, most = longest_product_here();
  const auto bytes = static_cast<std::size_t>(c.reduce) * sizeof(double);
  for_floating(c.dtype, [&]<class T>() {
    cudaFuncSetAttribute(product_grad<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(most * static_cast<std::int64_t>(sizeof(double))));
    product_grad<T><<<looping_grid_of(c.outer), threads_per_block, bytes, c.stream>>>(
        c, each, static_cast<const T*>(gy), static_cast<T*>(gx));
  });
}

}  // namespace sherd::cuda
