#include "runtime/cuda/layer_norm.h"

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

constexpr int block = 128;  // threads; a row belongs to one warp of it or to all four

template <class T>
struct Rows {
  using C = compute_t<T>;
  std::int64_t rows, columns;
  const T *x, *weight, *bias;
  C eps;
  T* y;
  C *mean, *rstd;
};

template <class T>
struct GradRows {
  using C = compute_t<T>;
  std::int64_t rows, columns;
  const T *gy, *x, *weight;
  const C *mean, *rstd;
  const T* more;
  T* gx;
  C* partial;
};

/// A row in registers: `Packs` packs of 16 bytes for each thread of the `Warps` that share it.
template <int Warps, int Packs>
struct Held {
  static constexpr int threads = Warps * warp_size, groups = block / threads;
  int lane = static_cast<int>(threadIdx.x) % threads, group = static_cast<int>(threadIdx.x) / threads;
  __device__ int pack(int p) const { return p * threads + lane; }
};

template <class T, int Warps, int Packs>
__global__ void __launch_bounds__(block) forward_held(const Rows<T> r) {
  using C = compute_t<T>;
  constexpr int V = wide_count<T>;
  using Row = Held<Warps, Packs>;
  __shared__ C shared[Warps];
  const Row held;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * Row::groups + held.group;
  if (row >= r.rows) return;  // a whole group at once
  const int count = static_cast<int>(r.columns) / V;
  const T* from = r.x + row * r.columns;
  Packed<V, T> x[Packs];
  C total = 0;
#pragma unroll
  for (int p = 0; p < Packs; ++p)
    if (held.pack(p) < count) x[p] = load_pack<V>(from + held.pack(p) * V);
#pragma unroll
  for (int p = 0; p < Packs; ++p)
    if (held.pack(p) < count)
#pragma unroll
      for (int j = 0; j < V; ++j) total += static_cast<C>(x[p].at[j]);
  const C n = static_cast<C>(r.columns);
  C mean = r.mean ? group_sum<Warps>(total, shared) / n : C(0);
  const auto each = [&](const auto& f) {
#pragma unroll
    for (int p = 0; p < Packs; ++p)
      if (held.pack(p) < count)
#pragma unroll
        for (int j = 0; j < V; ++j) f(static_cast<C>(x[p].at[j]) - mean);
  };
  const auto variance_of = [&] {
    C squares = 0;
    each([&](C d) { squares = std::fma(d, d, squares); });
    return group_sum<Warps>(squares, shared) / n;
  };
  C variance = variance_of();
  if (variance < mean * mean * static_cast<C>(math::nearly_constant)) {
    C deviations = 0;
    each([&](C d) { deviations += d; });
    mean += group_sum<Warps>(deviations, shared) / n;
    variance = variance_of();
  }
  const C rstd = C(1) / std::sqrt(variance + r.eps);
  if (held.lane == 0) {
    if (r.mean) r.mean[row] = mean;
    r.rstd[row] = rstd;
  }
#pragma unroll
  for (int p = 0; p < Packs; ++p) {
    if (held.pack(p) >= count) continue;
    const int at = held.pack(p) * V;
    Packed<V, T> weight, bias, y;
    if (r.weight) weight = load_pack<V>(r.weight + at);
    if (r.bias) bias = load_pack<V>(r.bias + at);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const C normal = (static_cast<C>(x[p].at[j]) - mean) * rstd;
      const C shift = r.bias ? static_cast<C>(bias.at[j]) : C(0);
      y.at[j] = narrow<T>(r.weight ? std::fma(normal, static_cast<C>(weight.at[j]), shift) : normal + shift);
    }
    store_pack<V>(r.y + row * r.columns + at, y);
  }
}

/// Rows of any width at any address: a block each, read three times.
template <class T>
__global__ void __launch_bounds__(block) forward_any(const Rows<T> r) {
  using C = compute_t<T>;
  constexpr int warps = block / warp_size;
  __shared__ C shared[warps];
  const std::int64_t row = blockIdx.x;
  const T* x = r.x + row * r.columns;
  const C n = static_cast<C>(r.columns);
  C mean = 0;
  const auto average = [&](const auto& of) {
    C total = 0;
    for (std::int64_t j = threadIdx.x; j < r.columns; j += block) total += of(static_cast<C>(x[j]) - mean);
    return group_sum<warps>(total, shared) / n;
  };
  const auto itself = [](C d) { return d; };
  const auto squared = [](C d) { return d * d; };
  if (r.mean) mean = average(itself);
  C variance = average(squared);
  if (variance < mean * mean * static_cast<C>(math::nearly_constant)) {
    mean += average(itself);
    variance = average(squared);
  }
  const C rstd = C(1) / std::sqrt(variance + r.eps);
  if (threadIdx.x == 0) {
    if (r.mean) r.mean[row] = mean;
    r.rstd[row] = rstd;
  }
  for (std::int64_t j = threadIdx.x; j < r.columns; j += block) {
    const C normal = (static_cast<C>(x[j]) - mean) * rstd;
    const C shift = r.bias ? static_cast<C>(r.bias[j]) : C(0);
    r.y[row * r.columns + j] =
        narrow<T>(r.weight ? std::fma(normal, static_cast<C>(r.weight[j]), shift) : normal + shift);
  }
}

/// Each group takes every `parts`th row and keeps its share of the column sums in registers.
template <class T, int Warps, int Packs>
__global__ void __launch_bounds__(block) backward_held(const GradRows<T> r, std::int64_t parts) {
  using C = compute_t<T>;
  constexpr int V = wide_count<T>;
  using Row = Held<Warps, Packs>;
  __shared__ C shared[Warps];
  const Row held;
  const std::int64_t part = static_cast<std::int64_t>(blockIdx.x) * Row::groups + held.group;
  const int count = static_cast<int>(r.columns) / V;
  const C n = static_cast<C>(r.columns);
  C gweight[Packs][V] = {}, gbias[Packs][V] = {};
  for (std::int64_t row = part; row < r.rows; row += parts) {
    const C mean = r.mean ? r.mean[row] : C(0), rstd = r.rstd[row];
    Packed<V, T> x[Packs], gy[Packs];
#pragma unroll
    for (int p = 0; p < Packs; ++p)
      if (held.pack(p) < count) {
        x[p] = load_pack<V>(r.x + row * r.columns + held.pack(p) * V);
        gy[p] = load_pack<V>(r.gy + row * r.columns + held.pack(p) * V);
      }
    C ones = 0, along = 0;
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
      if (held.pack(p) >= count) continue;
      Packed<V, T> weight;
      if (r.weight) weight = load_pack<V>(r.weight + held.pack(p) * V);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const C normal = (static_cast<C>(x[p].at[j]) - mean) * rstd, g = static_cast<C>(gy[p].at[j]);
        gweight[p][j] = std::fma(g, normal, gweight[p][j]);
        gbias[p][j] += g;
        const C scaled = r.weight ? g * static_cast<C>(weight.at[j]) : g;
        ones += scaled;
        along = std::fma(scaled, normal, along);
      }
    }
    ones = r.mean ? group_sum<Warps>(ones, shared) / n : C(0);
    along = group_sum<Warps>(along, shared) / n;
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
      if (held.pack(p) >= count) continue;
      Packed<V, T> weight, more, gx;
      if (r.weight) weight = load_pack<V>(r.weight + held.pack(p) * V);
      if (r.more) more = load_pack<V>(r.more + row * r.columns + held.pack(p) * V);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const C normal = (static_cast<C>(x[p].at[j]) - mean) * rstd, g = static_cast<C>(gy[p].at[j]);
        const C scaled = r.weight ? g * static_cast<C>(weight.at[j]) : g;
        const C own = (std::fma(normal, -along, scaled) - ones) * rstd;
        gx.at[j] = narrow<T>(r.more ? own + static_cast<C>(more.at[j]) : own);
      }
      store_pack<V>(r.gx + row * r.columns + held.pack(p) * V, gx);
    }
  }
  C* out = r.partial + part * 2 * r.columns;
#pragma unroll
  for (int p = 0; p < Packs; ++p) {
    if (held.pack(p) >= count) continue;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      out[held.pack(p) * V + j] = gweight[p][j];
      out[r.columns + held.pack(p) * V + j] = gbias[p][j];
    }
  }
}

template <class T>
__global__ void __launch_bounds__(block) backward_rows_any(const GradRows<T> r) {
  using C = compute_t<T>;
  constexpr int warps = block / warp_size;
  __shared__ C shared[warps];
  const std::int64_t row = blockIdx.x;
  const T *x = r.x + row * r.columns, *gy = r.gy + row * r.columns;
  const C mean = r.mean ? r.mean[row] : C(0), rstd = r.rstd[row], n = static_cast<C>(r.columns);
  const auto scaled = [&](std::int64_t j) {
    return r.weight ? static_cast<C>(gy[j]) * static_cast<C>(r.weight[j]) : static_cast<C>(gy[j]);
  };
  C ones = 0, along = 0;
  for (std::int64_t j = threadIdx.x; j < r.columns; j += block) {
    ones += scaled(j);
    along = std::fma(scaled(j), (static_cast<C>(x[j]) - mean) * rstd, along);
  }
  ones = r.mean ? group_sum<warps>(ones, shared) / n : C(0);
  along = group_sum<warps>(along, shared) / n;
  for (std::int64_t j = threadIdx.x; j < r.columns; j += block) {
    const C normal = (static_cast<C>(x[j]) - mean) * rstd;
    const C own = (std::fma(normal, -along, scaled(j)) - ones) * rstd;
    const std::int64_t at = row * r.columns + j;
    r.gx[at] = narrow<T>(r.more ? own + static_cast<C>(r.more[at]) : own);
  }
}

constexpr int tile_columns = 32, tile_rows = 32;

/// Column sums of every `gridDim.y`th row.
template <class T>
__global__ void __launch_bounds__(block) backward_columns_any(const GradRows<T> r) {
  using C = compute_t<T>;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * block + threadIdx.x;
  if (column >= r.columns) return;
  C gweight = 0, gbias = 0;
  for (std::int64_t row = blockIdx.y; row < r.rows; row += gridDim.y) {
    const C g = static_cast<C>(r.gy[row * r.columns + column]);
    const C mean = r.mean ? r.mean[row] : C(0);
    const C normal = (static_cast<C>(r.x[row * r.columns + column]) - mean) * r.rstd[row];
    gweight = std::fma(g, normal, gweight);
    gbias += g;
  }
  r.partial[blockIdx.y * 2 * r.columns + column] = gweight;
  r.partial[(blockIdx.y * 2 + 1) * r.columns + column] = gbias;
}

/// Sums the parts: `tile_rows` threads a column, then a tree. Without `gbias` its columns are left out.
template <class T>
__global__ void __launch_bounds__(tile_columns* tile_rows)
    sum_parts(const compute_t<T>* partial, std::int64_t parts, std::int64_t columns, T* gweight, T* gbias) {
  using C = compute_t<T>;
  __shared__ C sums[tile_rows][tile_columns];
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * tile_columns + threadIdx.x;
  const std::int64_t wanted = gbias ? 2 * columns : columns;
  C total = 0;
  if (column < wanted)
    for (std::int64_t part = threadIdx.y; part < parts; part += tile_rows)
      total += partial[part * 2 * columns + column];
  sums[threadIdx.y][threadIdx.x] = total;
  for (unsigned half = tile_rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
  }
  if (threadIdx.y != 0 || column >= wanted) return;
  (column < columns ? gweight : gbias - columns)[column] = narrow<T>(sums[0][threadIdx.x]);
}

/// How a row of `columns` is held in registers, as a number of (warps, packs); 0: it is not.
template <class T>
int form_of(bool wide, std::int64_t columns) {
  const std::int64_t packs = columns / wide_count<T>;
  return !wide ? 0 : packs <= 32 ? 1 : packs <= 96 ? 2 : packs <= 256 ? 3 : packs <= 512 ? 4 : 0;
}

/// Calls `f.operator()<warps, packs>()` for a form that is not 0.
template <class F>
void with_form(int form, F&& f) {
  switch (form) {
    case 1:
      return f.template operator()<1, 1>();
    case 2:
      return f.template operator()<1, 3>();
    case 3:
      return f.template operator()<4, 2>();
    default:
      return f.template operator()<4, 4>();
  }
}

template <class T>
void forward(const LayerNormCall& c) {
  using C = compute_t<T>;
  const Rows<T> r{c.rows,
                  c.columns,
                  static_cast<const T*>(c.x),
                  static_cast<const T*>(c.weight),
                  static_cast<const T*>(c.bias),
                  static_cast<C>(c.eps),
                  static_cast<T*>(c.y),
                  static_cast<C*>(c.mean),
                  static_cast<C*>(c.rstd)};
  const int form = form_of<T>(wide_rows<T>(c.columns, r.x, r.weight, r.bias, r.y), c.columns);
  if (form == 0) {
    forward_any<T><<<static_cast<unsigned>(c.rows), block, 0, c.stream>>>(r);
    return;
  }
  with_form(form, [&]<int Warps, int Packs>() {
    constexpr std::int64_t groups = Held<Warps, Packs>::groups;
    const auto blocks = static_cast<unsigned>((c.rows + groups - 1) / groups);
    forward_held<T, Warps, Packs><<<blocks, block, 0, c.stream>>>(r);
  });
}

template <class T>
int grad_form(const LayerNormGradCall& c) {
  return form_of<T>(wide_rows<T>(c.columns, static_cast<const T*>(c.gy), static_cast<const T*>(c.x),
                                 static_cast<const T*>(c.weight), static_cast<const T*>(c.more),
                                 static_cast<const T*>(c.gx)),
                    c.columns);
}

template <class T>
void backward(const LayerNormGradCall& c) {
  using C = compute_t<T>;
  const GradRows<T> r{c.rows,
                      c.columns,
                      static_cast<const T*>(c.gy),
                      static_cast<const T*>(c.x),
                      static_cast<const T*>(c.weight),
                      static_cast<const C*>(c.mean),
                      static_cast<const C*>(c.rstd),
                      static_cast<const T*>(c.more),
                      static_cast<T*>(c.gx),
                      static_cast<C*>(c.partial)};
  const std::int64_t parts = c.parts();
  const int form = grad_form<T>(c);
  if (form == 0) {
    if (c.rows > 0) backward_rows_any<T><<<static_cast<unsigned>(c.rows), block, 0, c.stream>>>(r);
    const dim3 grid(static_cast<unsigned>((c.columns + block - 1) / block), static_cast<unsigned>(parts));
    backward_columns_any<T><<<grid, block, 0, c.stream>>>(r);
  } else {
    with_form(form, [&]<int Warps, int Packs>() {
      const auto blocks = static_cast<unsigned>(parts / Held<Warps, Packs>::groups);
      backward_held<T, Warps, Packs><<<blocks, block, 0, c.stream>>>(r, parts);
    });
  }
  const auto blocks = static_cast<unsigned>((2 * c.columns + tile_columns - 1) / tile_columns);
  sum_parts<T><<<blocks, dim3(tile_columns, tile_rows), 0, c.stream>>>(
      r.partial, parts, c.columns, static_cast<T*>(c.gweight), static_cast<T*>(c.gbias));
}

}  // namespace

std::int64_t LayerNormGradCall::parts() const {
  int form = 0;
  for_floating(dtype, [&]<class T>() { form = grad_form<T>(*this); });
  // As many blocks as a Hopper GPU holds at once, by the registers that a form takes: more wait for a second
  // round.
  const std::int64_t most = form == 0 ? 256 : form <= 2 ? 2112 : form == 3 ? 660 : 396;
  const std::int64_t wanted = form == 0 ? rows / 16 : rows / 4;
  const std::int64_t whole = wanted / 4 * 4;  // of the groups of a block
  return whole < 4 ? 4 : whole < most ? whole : most;
}

void launch_layer_norm(const LayerNormCall& call) {
  for_floating(call.dtype, [&]<class T>() { forward<T>(call); });
}

void launch_layer_norm_grad(const LayerNormGradCall& call) {
  for_floating(call.dtype, [&]<class T>() { backward<T>(call); });
}

}  // namespace sherd::cuda
