#include "runtime/cuda/gelu_sums.h"

#include <algorithm>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/types.cuh"
#include "runtime/ops/gelu.h"

namespace sherd::cuda {
namespace {

// Threads side by side take neighbouring packs of columns; `tall` of them share a pack and take every
// `tall`th row.
constexpr int wide = 32, tall = 8;
constexpr std::int64_t rows_of_part = 256;

__device__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
constexpr float log2_of_e = 1.4426950408889634f;

/// The normal distribution function: erfc by a polynomial in its exponent (Press et al., Numerical Recipes),
/// 1.2e-7 off, relative.
__device__ float narrow_cdf(float x) {
  const float z = std::fabs(x) * 0.70710678118654752f, t = __fdividef(1.f, std::fma(z, 0.5f, 1.f));
  float p = 0.17087277f;
  for (const float c : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f,
                        0.37409196f, 1.00002368f, -1.26551223f})
    p = std::fma(p, t, c);
  const float tail = 0.5f * t * power_of_two(std::fma(-z, z, p) * log2_of_e);
  return x < 0 ? tail : 1 - tail;
}

template <class T>
__device__ T gelu_of(T x) {
  const float wide = widen(x);
  return narrow<T>(wide * narrow_cdf(wide));
}

template <class T>
__device__ T gelu_gradient(T gy, T x) {
  const auto wide = widen(x);
  if constexpr (sizeof(T) == 2) {
    const float bell = 0.3989422804014327f * power_of_two(-0.5f * log2_of_e * wide * wide);
    return narrow<T>(widen(gy) * std::fma(wide, bell, narrow_cdf(wide)));
  } else {
    return narrow<T>(ops::Gelu{}.grad_a(widen(gy), wide, compute_t<T>(0)));
  }
}

template <class T>
__global__ void __launch_bounds__(threads_per_block) narrow_gelu(const T* x, T* y, std::int64_t n) {
  constexpr int V = wide_count<T>;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x,
                     step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = first; i < n / V; i += step) {
    Packed<V, T> pack = load_pack<V>(x + i * V);
#pragma unroll
    for (int j = 0; j < V; ++j) pack.at[j] = gelu_of(pack.at[j]);
    store_pack<V>(y + i * V, pack);
  }
  for (std::int64_t i = n / V * V + first; i < n; i += step) y[i] = gelu_of(x[i]);
}

/// Adds up `mine` over the threads of a column, in a tree; the sum is the first one's.
template <int V, class C>
__device__ void add_down(C (&shared)[tall][wide][V], C (&mine)[V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) shared[threadIdx.y][threadIdx.x][j] = mine[j];
  for (unsigned half = tall / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half)
#pragma unroll
      for (int j = 0; j < V; ++j)
        shared[threadIdx.y][threadIdx.x][j] += shared[threadIdx.y + half][threadIdx.x][j];
  }
#pragma unroll
  for (int j = 0; j < V; ++j) mine[j] = shared[threadIdx.y][threadIdx.x][j];
}

template <int V, class T>
__global__ void __launch_bounds__(wide* tall)
    gradient(std::int64_t rows, std::int64_t columns, const T* gy, const T* x, T* gx, compute_t<T>* partial) {
  using C = compute_t<T>;
  __shared__ C shared[tall][wide][V];
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x) * wide + threadIdx.x) * V;
  const std::int64_t begin = blockIdx.y * rows_of_part, end = min(begin + rows_of_part, rows);
  C sums[V] = {};
  if (column < columns) {
    struct Pair {
      Packed<V, T> upstream, value;
    };
    const auto load = [&](std::int64_t row) {
      const std::int64_t at = row * columns + column;
      return Pair{load_pack<V>(gy + at), load_pack<V>(x + at)};
    };
    const std::int64_t first = begin + threadIdx.y;
    Pair next{};
    if (first < end) next = load(first);
    for (std::int64_t row = first; row < end; row += tall) {
      const auto [upstream, value] = next;
      if (row + tall < end) next = load(row + tall);  // on its way while this one is computed
      const std::int64_t at = row * columns + column;
      Packed<V, T> result;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        result.at[j] = gelu_gradient(upstream.at[j], value.at[j]);
        sums[j] += widen(result.at[j]);
      }
      store_pack<V>(gx + at, result);
    }
  }
  add_down<V>(shared, sums);
  if (threadIdx.y == 0 && column < columns)
#pragma unroll
    for (int j = 0; j < V; ++j) partial[blockIdx.y * columns + column + j] = sums[j];
}

template <class T>
__global__ void __launch_bounds__(wide* tall)
    sum_parts(const compute_t<T>* partial, std::int64_t parts, std::int64_t columns, T* sums) {
  using C = compute_t<T>;
  __shared__ C shared[tall][wide][1];
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * wide + threadIdx.x;
  C total[1] = {};
  if (column < columns)
    for (std::int64_t part = threadIdx.y; part < parts; part += tall)
      total[0] += partial[part * columns + column];
  add_down<1>(shared, total);
  if (threadIdx.y == 0 && column < columns) sums[column] = narrow<T>(total[0]);
}

unsigned blocks_across(std::int64_t columns) { return static_cast<unsigned>((columns + wide - 1) / wide); }

}  // namespace

std::int64_t GeluSumsCall::parts() const {
  return std::max<std::int64_t>((rows + rows_of_part - 1) / rows_of_part, 1);
}

void launch_narrow_gelu(DType dtype, const void* x, void* y, std::int64_t n, cudaStream_t stream) {
  const auto launch = [&]<class T>() {
    narrow_gelu<T><<<blocks_for(n / wide_count<T>), threads_per_block, 0, stream>>>(static_cast<const T*>(x),
                                                                                    static_cast<T*>(y), n);
  };
  dtype == DType::bf16 ? launch.template operator()<BFloat16>() : launch.template operator()<Half>();
}

void launch_gelu_sums(const GeluSumsCall& c) {
  for_floating(c.dtype, [&]<class T>() {
    const T *gy = static_cast<const T*>(c.gy), *x = static_cast<const T*>(c.x);
    T* gx = static_cast<T*>(c.gx);
    auto* partial = static_cast<compute_t<T>*>(c.partial);
    const auto launch = [&]<int V>() {
      const dim3 grid(blocks_across(c.columns / V), static_cast<unsigned>(c.parts()));
      gradient<V, T><<<grid, dim3(wide, tall), 0, c.stream>>>(c.rows, c.columns, gy, x, gx, partial);
    };
    if (wide_rows<T>(c.columns, gy, x, static_cast<const T*>(gx)))
      launch.template operator()<wide_count<T>>();
    else
      launch.template operator()<1>();
    sum_parts<T><<<blocks_across(c.columns), dim3(wide, tall), 0, c.stream>>>(partial, c.parts(), c.columns,
                                                                              static_cast<T*>(c.sums));
  });
}

}  // namespace sherd::cuda
