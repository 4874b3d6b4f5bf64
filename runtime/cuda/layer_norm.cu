#include "runtime/cuda/layer_norm.h"

#include <algorithm>

#include "runtime/cuda/async_copy.cuh"
#include "runtime/cuda/block.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

constexpr int block = 128;  // threads; a row belongs to one warp of it or to all four
/// Of the kernels whose rows `Warps` share; of long rows more.
template <int Warps>
constexpr int block_of = Warps * warp_size < block ? block : Warps * warp_size;

template <class T>
struct NormRows {
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
struct RegisterRow {
  static constexpr int threads = Warps * warp_size, groups = block_of<Warps> / threads;
  int lane = static_cast<int>(threadIdx.x) % threads, group = static_cast<int>(threadIdx.x) / threads;
  __device__ int pack(int p) const { return p * threads + lane; }
};

/// Sums values over groups of `Warps` warps. `shared` is free again after the next barrier but one.
template <int Warps, class C, class... More>
__device__ void group_sums(C (&shared)[2 * Warps], C& value, More&... more) {
#pragma unroll
  for (int step = warp_size / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(whole_warp, value, step);
    ((more += __shfl_xor_sync(whole_warp, more, step)), ...);
  }
  if constexpr (Warps > 1) {
    const auto add_up = [&](C& sum, int at) {
      sum = shared[at];
      for (int w = 1; w < Warps; ++w) sum += shared[2 * w + at];
    };
    if (threadIdx.x % warp_size == 0) {
      int at = 2 * (static_cast<int>(threadIdx.x) / warp_size);
      shared[at] = value;
      ((shared[++at] = more), ...);
    }
    __syncthreads();
    int at = 0;
    add_up(value, at);
    (add_up(more, ++at), ...);
  }
}

constexpr int stages = 2;  // rows of a group in shared memory: one on its way while one is computed

/// Rows of `Arrays` arrays in a block's shared memory. Each thread computes what it brought there itself.
template <class T, int Warps, int Packs, int Arrays>
struct Staged {
  static constexpr int V = wide_count<T>, bytes = stages * Arrays * Packs * block_of<Warps> * 16;
  T* memory;
  __device__ T* at(int stage, int array, int p) const {
    return memory +
           (((stage * Arrays + array) * Packs + p) * block_of<Warps> + static_cast<int>(threadIdx.x)) * V;
  }
};

/// A thread's part of a weight or a bias, in registers where there is room for it.
template <class T, int Packs>
class OfColumns {
 public:
  __device__ explicit OfColumns(const T* from) : from_(from) {}
  __device__ void keep(int p, int at) {
    if constexpr (kept)
      if (from_) packs_[p] = Pack::load(from_ + at);
  }
  template <class C, int V>
  __device__ void widen_to(C (&wide)[V], int p, int at) const {
    if constexpr (kept)
      packs_[p].widen_to(wide);
    else
      Pack::load(from_ + at).widen_to(wide);
  }

 private:
  using Pack = Raw<wide_count<T>, T>;
  static constexpr bool kept = Packs <= 3;
  const T* from_;
  Pack packs_[kept ? Packs : 1];
};

/// Each group takes every so manyth row.
template <class T, int Warps, int Packs>
__global__ void __launch_bounds__(block_of<Warps>) forward_held(const NormRows<T> r) {
  using C = compute_t<T>;
  constexpr int V = wide_count<T>;
  using Row = RegisterRow<Warps, Packs>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ C shared[2][2 * Warps];
  const Staged<T, Warps, Packs, 1> staged{reinterpret_cast<T*>(memory)};
  const Row held;
  const int count = static_cast<int>(r.columns) / V;
  const C n = static_cast<C>(r.columns);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * Row::groups,
                     first = static_cast<std::int64_t>(blockIdx.x) * Row::groups + held.group;
  const auto each_pack = [&](const auto& f) {
#pragma unroll
    for (int p = 0; p < Packs; ++p)
      if (held.pack(p) < count) f(p, held.pack(p) * V);
  };
  const auto fetch = [&](std::int64_t row, int stage) {
    if (row < r.rows)
      each_pack([&](int p, int at) { copy_async(staged.at(stage, 0, p), r.x + row * r.columns + at); });
    close_copies();
  };
  OfColumns<T, Packs> weights(r.weight), biases(r.bias);
  each_pack([&](int p, int at) {
    weights.keep(p, at);
    biases.keep(p, at);
  });
  int stage = 0, slot = 0;
  fetch(first, 0);
  for (std::int64_t row = first; row < r.rows; row += step, stage ^= 1) {
    fetch(row + step, stage ^ 1);
    wait_copies<stages - 1>();
    C x[Packs][V];
    each_pack([&](int p, int) { Raw<V, T>::load(staged.at(stage, 0, p)).widen_to(x[p]); });
    const auto sum_of = [&](const auto& f) {
      C total = 0;
      each_pack([&](int p, int) {
#pragma unroll
        for (int j = 0; j < V; ++j) total = f(x[p][j], total);
      });
      group_sums<Warps>(shared[slot ^= 1], total);  // in turn: a warp may be one sum ahead of another
      return total / n;
    };
    C mean = r.mean ? sum_of([](C v, C total) { return total + v; }) : C(0);
    const auto variance_of = [&] {
      return sum_of([&](C v, C total) { return std::fma(v - mean, v - mean, total); });
    };
    C variance = variance_of();
    if (variance < mean * mean * static_cast<C>(math::nearly_constant)) {
      mean += sum_of([&](C v, C total) { return total + (v - mean); });
      variance = variance_of();
    }
    const C rstd = C(1) / std::sqrt(variance + r.eps);
    if (held.lane == 0) {
      if (r.mean) r.mean[row] = mean;
      r.rstd[row] = rstd;
    }
    each_pack([&](int p, int at) {
      C weight[V], bias[V] = {};
      if (r.weight) weights.widen_to(weight, p, at);
      if (r.bias) biases.widen_to(bias, p, at);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const C normal = (x[p][j] - mean) * rstd;
        x[p][j] = r.weight ? std::fma(normal, weight[j], bias[j]) : normal + bias[j];
      }
      Raw<V, T>::of(x[p]).store(r.y + row * r.columns + at);
    });
  }
}

/// Rows of any width at any address: a block each, read three times.
template <class T>
__global__ void __launch_bounds__(block) forward_any(const NormRows<T> r) {
  using C = compute_t<T>;
  constexpr int warps = block / warp_size;
  __shared__ C shared[warps];
  for (std::int64_t row = blockIdx.x; row < r.rows; row += gridDim.x) {
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
      const C normal = (widen(x[j]) - mean) * rstd;
      const C shift = r.bias ? widen(r.bias[j]) : C(0);
      r.y[row * r.columns + j] =
          narrow<T>(r.weight ? std::fma(normal, widen(r.weight[j]), shift) : normal + shift);
    }
  }
}

/// Each group takes every so manyth row and keeps its share of the column sums in registers; a block adds up
/// those of its groups.
template <class T, int Warps, int Packs, bool Sums>
__global__ void __launch_bounds__(block_of<Warps>) backward_held(const GradRows<T> r) {
  using C = compute_t<T>;
  constexpr int V = wide_count<T>;
  using Row = RegisterRow<Warps, Packs>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ C shared[stages][2 * Warps];
  enum Array { x_array, gy_array, more_array, arrays };
  const Staged<T, Warps, Packs, arrays> staged{reinterpret_cast<T*>(memory)};
  const Row held;
  const int count = static_cast<int>(r.columns) / V;
  const C n = static_cast<C>(r.columns);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * Row::groups,
                     first = static_cast<std::int64_t>(blockIdx.x) * Row::groups + held.group;
  const auto each_pack = [&](const auto& f) {
#pragma unroll
    for (int p = 0; p < Packs; ++p)
      if (held.pack(p) < count) f(p, held.pack(p) * V);
  };
  C next_mean = 0, next_rstd = 0;
  const auto fetch = [&](std::int64_t row, int stage) {
    if (row < r.rows) {
      each_pack([&](int p, int at) {
        copy_async(staged.at(stage, x_array, p), r.x + row * r.columns + at);
        copy_async(staged.at(stage, gy_array, p), r.gy + row * r.columns + at);
        if (r.more) copy_async(staged.at(stage, more_array, p), r.more + row * r.columns + at);
      });
      next_mean = r.mean ? r.mean[row] : C(0);
      next_rstd = r.rstd[row];
    }
    close_copies();
  };
  OfColumns<T, Packs> weights(r.weight);
  each_pack([&](int p, int at) { weights.keep(p, at); });
  constexpr int kinds = Sums ? 3 : 2;
  C sums[kinds][Packs][V] = {};
  int stage = 0;
  fetch(first, 0);
  for (std::int64_t row = first; row < r.rows; row += step, stage ^= 1) {
    const C mean = next_mean, rstd = next_rstd;
    fetch(row + step, stage ^ 1);
    wait_copies<stages - 1>();
    const auto load = [&](int p, int at, C(&normal)[V], C(&g)[V], C(&scaled)[V]) {
      Raw<V, T>::load(staged.at(stage, x_array, p)).widen_to(normal);
      Raw<V, T>::load(staged.at(stage, gy_array, p)).widen_to(g);
      if (r.weight) weights.widen_to(scaled, p, at);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        normal[j] = (normal[j] - mean) * rstd;
        scaled[j] = r.weight ? g[j] * scaled[j] : g[j];
      }
    };
    C ones = 0, along = 0;
    each_pack([&](int p, int at) {
      C normal[V], g[V], scaled[V];
      load(p, at, normal, g, scaled);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sums[0][p][j] = std::fma(g[j], normal[j], sums[0][p][j]);
        sums[1][p][j] += g[j];
        ones += scaled[j];
        along = std::fma(scaled[j], normal[j], along);
      }
    });
    group_sums<Warps>(shared[stage], ones, along);
    ones = r.mean ? ones / n : C(0);
    along /= n;
    each_pack([&](int p, int at) {
      C normal[V], g[V], scaled[V], more[V] = {};
      load(p, at, normal, g, scaled);
      if (r.more) Raw<V, T>::load(staged.at(stage, more_array, p)).widen_to(more);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        g[j] = std::fma(std::fma(normal[j], -along, scaled[j]) - ones, rstd, more[j]);
        if constexpr (Sums) sums[2][p][j] += g[j];
      }
      Raw<V, T>::of(g).store(r.gx + row * r.columns + at);
    });
  }
  wait_copies<0>();
  C* out = r.partial + blockIdx.x * kinds * r.columns;
  C* of_groups = reinterpret_cast<C*>(memory);
#pragma unroll
  for (int kind = 0; kind < kinds; ++kind) {
    C* to = Row::groups == 1 ? out + kind * r.columns : of_groups + held.group * r.columns;
    if constexpr (Row::groups > 1) __syncthreads();  // the memory has been read
    each_pack([&](int p, int at) {
#pragma unroll
      for (int j = 0; j < V; ++j) to[at + j] = sums[kind][p][j];
    });
    if constexpr (Row::groups > 1) {
      __syncthreads();
      for (int j = static_cast<int>(threadIdx.x); j < r.columns; j += block) {
        C total = of_groups[j];
        for (int group = 1; group < Row::groups; ++group) total += of_groups[group * r.columns + j];
        out[kind * r.columns + j] = total;
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(block) backward_rows_any(const GradRows<T> r) {
  using C = compute_t<T>;
  constexpr int warps = block / warp_size;
  __shared__ C shared[warps];
  for (std::int64_t row = blockIdx.x; row < r.rows; row += gridDim.x) {
    const T *x = r.x + row * r.columns, *gy = r.gy + row * r.columns;
    const C mean = r.mean ? r.mean[row] : C(0), rstd = r.rstd[row], n = static_cast<C>(r.columns);
    const auto scaled = [&](std::int64_t j) {
      return r.weight ? widen(gy[j]) * widen(r.weight[j]) : widen(gy[j]);
    };
    C ones = 0, along = 0;
    for (std::int64_t j = threadIdx.x; j < r.columns; j += block) {
      ones += scaled(j);
      along = std::fma(scaled(j), (widen(x[j]) - mean) * rstd, along);
    }
    ones = r.mean ? group_sum<warps>(ones, shared) / n : C(0);
    along = group_sum<warps>(along, shared) / n;
    for (std::int64_t j = threadIdx.x; j < r.columns; j += block) {
      const C normal = (widen(x[j]) - mean) * rstd;
      const C own = (std::fma(normal, -along, scaled(j)) - ones) * rstd;
      const std::int64_t at = row * r.columns + j;
      r.gx[at] = narrow<T>(r.more ? own + widen(r.more[at]) : own);
    }
  }
}

constexpr int tile_columns = 32, tile_rows = 32;

/// Column sums of every `gridDim.y`th row.
template <class T>
__global__ void __launch_bounds__(block) backward_columns_any(const GradRows<T> r, int kinds) {
  using C = compute_t<T>;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * block + threadIdx.x;
  if (column >= r.columns) return;
  C gweight = 0, gbias = 0, gx = 0;
  for (std::int64_t row = blockIdx.y; row < r.rows; row += gridDim.y) {
    const C g = static_cast<C>(r.gy[row * r.columns + column]);
    if (kinds == 3) gx += static_cast<C>(r.gx[row * r.columns + column]);
    const C mean = r.mean ? r.mean[row] : C(0);
    const C normal = (static_cast<C>(r.x[row * r.columns + column]) - mean) * r.rstd[row];
    gweight = std::fma(g, normal, gweight);
    gbias += g;
  }
  C* out = r.partial + blockIdx.y * kinds * r.columns + column;
  out[0] = gweight;
  out[r.columns] = gbias;
  if (kinds == 3) out[2 * r.columns] = gx;
}

/// Where column sums go: gradients of weight and bias, and the sums of gx; the last two may be null.
template <class T>
struct ColumnSums {
  T *gweight, *gbias, *sums;
};

/// Sums the parts: `tile_rows` threads a column, then a tree.
template <class T>
__global__ void __launch_bounds__(tile_columns* tile_rows)
    sum_parts(const compute_t<T>* partial, std::int64_t parts, std::int64_t columns, ColumnSums<T> to) {
  using C = compute_t<T>;
  __shared__ C sums[tile_rows][tile_columns];
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * tile_columns + threadIdx.x;
  const std::int64_t all = (to.sums ? 3 : 2) * columns;
  C total = 0;
  if (column < all)
    for (std::int64_t part = threadIdx.y; part < parts; part += tile_rows)
      total += partial[part * all + column];
  sums[threadIdx.y][threadIdx.x] = total;
  for (unsigned half = tile_rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
  }
  if (threadIdx.y != 0 || column >= all) return;
  T* out = column < columns ? to.gweight : column < 2 * columns ? to.gbias : to.sums;
  if (out != nullptr) out[column % columns] = narrow<T>(sums[0][threadIdx.x]);
}

/// How a row of `columns` is held in registers, as a number of (warps, packs); 0: it is not.
template <class T>
int form_of(bool wide, std::int64_t columns, int last_form) {
  constexpr std::int64_t most_packs[] = {0, 32, 96, 256, 512, 2048, 4096};
  int form = 1;
  while (form <= last_form && columns / wide_count<T> > most_packs[form]) ++form;
  return wide && form <= last_form ? form : 0;
}
/// Long rows need more shared memory than every device has, most of all those of the gradient.
constexpr int last_form = 6, last_grad_form = 5;
int last_form_here() {
  const int kib = most_shared_memory() >> 10;
  return kib >= 128 ? last_form : kib >= 64 ? 5 : 4;
}
int last_grad_form_here() { return most_shared_memory() >> 10 >= 193 ? last_grad_form : 4; }

/// Calls `f.operator()<warps, packs>()` for a form that is not 0.
template <int last, class F>
void with_form(int form, F&& f) {
  switch (form) {
    case 6:
      if constexpr (last >= 6) return f.template operator()<32, 4>();
    case 5:
      return f.template operator()<16, 4>();
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

/// Blocks of a form that a multiprocessor was measured to be fastest with.
constexpr std::int64_t held_at_once[] = {0, 8, 4, 6, 8, 3, 1};

/// As many blocks as the device has multiprocessors, `each` times.
std::int64_t blocks_of_device(std::int64_t each) {
  return each * attribute_of_device(cudaDevAttrMultiProcessorCount);
}

template <class T>
void forward(const LayerNormCall& c) {
  using C = compute_t<T>;
  const NormRows<T> r{c.rows,
                      c.columns,
                      static_cast<const T*>(c.x),
                      static_cast<const T*>(c.weight),
                      static_cast<const T*>(c.bias),
                      static_cast<C>(c.eps),
                      static_cast<T*>(c.y),
                      static_cast<C*>(c.mean),
                      static_cast<C*>(c.rstd)};
  const int form =
      form_of<T>(wide_rows<T>(c.columns, r.x, r.weight, r.bias, r.y), c.columns, last_form_here());
  if (form == 0) {
    forward_any<T><<<looping_grid_of(c.rows), block, 0, c.stream>>>(r);
    return;
  }
  with_form<last_form>(form, [&]<int Warps, int Packs>() {
    constexpr std::int64_t groups = RegisterRow<Warps, Packs>::groups;
    constexpr int bytes = Staged<T, Warps, Packs, 1>::bytes;
    const std::int64_t wanted = (c.rows + groups - 1) / groups, most = blocks_of_device(held_at_once[form]);
    const auto kernel = forward_held<T, Warps, Packs>;
    if (bytes > 48 << 10) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<static_cast<unsigned>(std::min(wanted, most)), block_of<Warps>, bytes, c.stream>>>(r);
  });
}

template <class T>
int grad_form(const LayerNormGradCall& c) {
  return form_of<T>(wide_rows<T>(c.columns, static_cast<const T*>(c.gy), static_cast<const T*>(c.x),
                                 static_cast<const T*>(c.weight), static_cast<const T*>(c.more),
                                 static_cast<const T*>(c.gx)),
                    c.columns, last_grad_form_here());
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
    if (c.rows > 0) backward_rows_any<T><<<looping_grid_of(c.rows), block, 0, c.stream>>>(r);
    const dim3 grid(static_cast<unsigned>((c.columns + block - 1) / block), static_cast<unsigned>(parts));
    backward_columns_any<T><<<grid, block, 0, c.stream>>>(r, c.kinds());
  } else {
    with_form<last_grad_form>(form, [&]<int Warps, int Packs>() {
      const auto launch = [&](auto kernel) {
        constexpr int bytes = Staged<T, Warps, Packs, 3>::bytes;
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        kernel<<<static_cast<unsigned>(parts), block_of<Warps>, bytes, c.stream>>>(r);
      };
      c.sums ? launch(backward_held<T, Warps, Packs, true>) : launch(backward_held<T, Warps, Packs, false>);
    });
  }
  const auto blocks = static_cast<unsigned>((c.kinds() * c.columns + tile_columns - 1) / tile_columns);
  sum_parts<T><<<blocks, dim3(tile_columns, tile_rows), 0, c.stream>>>(
      r.partial, parts, c.columns,
      {static_cast<T*>(c.gweight), static_cast<T*>(c.gbias), static_cast<T*>(c.sums)});
}

}  // namespace

std::int64_t LayerNormGradCall::parts() const {
  int form = 0;
  for_floating(dtype, [&]<class T>() { form = grad_form<T>(*this); });
  // By form, what was fastest on a Hopper GPU of 132 multiprocessors, which holds that many blocks at once.
  constexpr std::int64_t without[] = {256, 792, 396, 528, 528, 132}, with[] = {256, 792, 396, 396, 396, 132};
  const std::int64_t most = (sums != nullptr ? with : without)[form],
                     rows_of_block = form == 0   ? 16
                                     : form >= 4 ? 2
                                                 : 8,
                     wanted = (rows + rows_of_block - 1) / rows_of_block;
  return wanted < 1 ? 1 : wanted < most ? wanted : most;
}

void launch_layer_norm(const LayerNormCall& call) {
  for_floating(call.dtype, [&]<class T>() { forward<T>(call); });
}

void launch_layer_norm_grad(const LayerNormGradCall& call) {
  for_floating(call.dtype, [&]<class T>() { backward<T>(call); });
}

}  // namespace sherd::cuda
