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

/// What rows are cut into, of which a block has memory for one.
constexpr std::int64_t longest_product = 4096;

/// A block a row of `n` or, the last of each `chunks`, of what is left of `n`: neighbouring elements are one
/// thread's, an odd number of them so that threads meet no bank of shared memory twice.
struct Chunks {
  std::int64_t rows, n, count;  // whole rows, their length, and how many pieces each is cut into
  __device__ std::int64_t begin(std::int64_t i) const { return i / count * n + i % count * longest_product; }
  __device__ int length(std::int64_t i) const {
    const std::int64_t left = n - i % count * longest_product;
    return static_cast<int>(left < longest_product ? left : longest_product);
  }
};

/// The product of each chunk.
template <class T>
__global__ void __launch_bounds__(threads_per_block)
    multiply_chunks(const Chunks c, const T* x, double* products) {
  __shared__ double of_warps[threads_per_block / warp_size];
  for (std::int64_t o = blockIdx.x; o < c.rows * c.count; o += gridDim.x) {
    const T* from = x + c.begin(o);
    const int n = c.length(o);
    double mine = 1;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < n; i += threads_per_block)
      mine *= static_cast<double>(widen(from[i]));
    const double before = product_before(mine, of_warps);
    if (threadIdx.x == threads_per_block - 1) products[o] = before * mine;
  }
}

/// The gradient of each chunk, whose product has the gradient gy.
template <class T, class G>
__global__ void __launch_bounds__(threads_per_block)
    product_grad(const Chunks c, const T* x, const G* gy, T* gx) {
  __shared__ double row[longest_product];
  __shared__ double of_warps[threads_per_block / warp_size];
  for (std::int64_t o = blockIdx.x; o < c.rows * c.count; o += gridDim.x) {
    const T* from = x + c.begin(o);
    T* to = gx + c.begin(o);
    const int n = c.length(o), each = (n + threads_per_block - 1) / threads_per_block | 1,
              begin = min(static_cast<int>(threadIdx.x) * each, n), end = min(begin + each, n);
    for (int i = static_cast<int>(threadIdx.x); i < n; i += threads_per_block)
      row[i] = static_cast<double>(widen(from[i]));
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
      const double value = static_cast<double>(widen(from[i]));
      row[i] *= before;
      before *= value;
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < n; i += threads_per_block)
      to[i] = narrow<T>(static_cast<compute_t<T>>(row[i]));
    __syncthreads();
  }
}

/// Of longer rows all but a chunk is a factor of the chunk's product: the gradient of the chunks' products.
template <class T, class G>
void grad_of_rows(std::int64_t rows, std::int64_t n, const T* x, const G* gy, T* gx, double* room,
                  cudaStream_t stream) {
  const Chunks c{rows, n, blocks_of(n, longest_product)};
  const unsigned grid = looping_grid_of(rows * c.count);
  if (c.count == 1) {
    product_grad<T, G><<<grid, threads_per_block, 0, stream>>>(c, x, gy, gx);
    return;
  }
  double *products = room, *outside = products + rows * c.count, *rest = outside + rows * c.count;
  multiply_chunks<T><<<grid, threads_per_block, 0, stream>>>(c, x, products);
  grad_of_rows<double, G>(rows, c.count, products, gy, outside, rest, stream);
  product_grad<T, double><<<grid, threads_per_block, 0, stream>>>(c, x, outside, gx);
}

}  // namespace

void launch_product(const ProductCall& c) {
  for_any(c.dtype, [&]<class T>() {
    using F = factor_t<T>;
    using To = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>;
    fold(c, Multiplying<T, T, To>{c.out}, Multiplying<T, T, F>{c.partial}, Multiplying<T, F, To>{c.out});
  });
}

std::int64_t product_grad_room(const ProductCall& c) {
  std::int64_t room = 0;
  for (std::int64_t n = c.reduce; n > longest_product; room += 2 * c.outer * n)
    n = blocks_of(n, longest_product);
  return room;
}

void launch_product_grad(const ProductCall& c, const void* gy, void* gx) {
  for_floating(c.dtype, [&]<class T>() {
    grad_of_rows(c.outer, c.reduce, static_cast<const T*>(c.x), static_cast<const T*>(gy),
                 static_cast<T*>(gx), static_cast<double*>(c.partial), c.stream);
  });
}

}  // namespace sherd::cuda
