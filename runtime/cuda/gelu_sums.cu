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
constexpr std::int64_t least_rows_of_part = 256, most_parts = 65535;  // along a grid's second axis

constexpr float half_log2_of_e = 0.72134752044448170f;

/// The normal distribution function, and e^(-x^2/2), to 9e-6, relative: the one's tail is the other times a
/// polynomial in 1/(1 + 0.3075 |x|), fitted to the smallest relative error.
struct Normal {
  float cdf, bell;
  __device__ explicit Normal(float x) {
    float t;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(bell) : "f"(x * x * -half_log2_of_e));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(std::fma(std::fabs(x), 0.3075f, 1.f)));
    float p = -0.07594354f;
    for (const float c : {0.19235182f, 0.0046353266f, 0.13758928f, 0.11842041f, 0.12294489f})
      p = std::fma(p, t, c);
    const float tail = t * p * bell;
    cdf = x < 0 ? tail : 1 - tail;
  }
};

/// GELU of `x`, for results of 16 bits.
__device__ float gelu_of(float x) { return x * Normal(x).cdf; }

template <class T>
__device__ compute_t<T> gelu_gradient(compute_t<T> gy, compute_t<T> x) {
  if constexpr (sizeof(T) == 2) {
    const Normal normal(x);
    return gy * std::fma(x * 0.3989422804014327f, normal.bell, normal.cdf);
  } else {
    return ops::Gelu{}.grad_a(gy, x, compute_t<T>(0));
  }
}

template <class T>
__global__ void __launch_bounds__(threads_per_block) narrow_gelu(const T* x, T* y, std::int64_t n) {
  constexpr int V = wide_count<T>;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x,
                     step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  constexpr int ahead = 2;  // packs on their way at a time
  for (std::int64_t i = first; i < n / V; i += ahead * step) {
    Raw<V, T> packs[ahead];
#pragma unroll
    for (int a = 0; a < ahead; ++a)
      if (i + a * step < n / V) packs[a] = Raw<V, T>::load(x + (i + a * step) * V);
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
      if (i + a * step >= n / V) continue;
      float wide[V];
      packs[a].widen_to(wide);
#pragma unroll
      for (int j = 0; j < V; ++j) wide[j] = gelu_of(wide[j]);
      Raw<V, T>::of(wide).store(y + (i + a * step) * V);
    }
  }
  for (std::int64_t i = n / V * V + first; i < n; i += step) y[i] = narrow<T>(gelu_of(widen(x[i])));
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
    gradient(std::int64_t rows, std::int64_t rows_of_part, std::int64_t columns, const T* gy, const T* x,
             T* gx, compute_t<T>* partial) {
  using C = compute_t<T>;
  __shared__ C shared[tall][wide][V];
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x) * wide + threadIdx.x) * V;
  const std::int64_t begin = blockIdx.y * rows_of_part, end = min(begin + rows_of_part, rows);
  C sums[V] = {};
  if (column < columns) {
    struct Pair {
      Raw<V, T> upstream, value;
    };
    const auto load = [&](std::int64_t row) {
      const std::int64_t at = row * columns + column;
      return Pair{Raw<V, T>::load(gy + at), Raw<V, T>::load(x + at)};
    };
    const std::int64_t first = begin + threadIdx.y;
    Pair next{};
    if (first < end) next = load(first);
    for (std::int64_t row = first; row < end; row += tall) {
      const auto [upstream, value] = next;
      if (row + tall < end) next = load(row + tall);  // on its way while this one is computed
      const std::int64_t at = row * columns + column;
      C g[V], wide_x[V];
      upstream.widen_to(g);
      value.widen_to(wide_x);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        g[j] = gelu_gradient<T>(g[j], wide_x[j]);
        sums[j] += g[j];
      }
      Raw<V, T>::of(g).store(gx + at);
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

std::int64_t GeluSumsCall::rows_of_part() const {
  return std::max(least_rows_of_part, blocks_of(rows, most_parts));
}
std::int64_t GeluSumsCall::parts() const {
  return std::max<std::int64_t>(blocks_of(rows, rows_of_part()), 1);
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
      gradient<V, T>
          <<<grid, dim3(wide, tall), 0, c.stream>>>(c.rows, c.rows_of_part(), c.columns, gy, x, gx, partial);
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
