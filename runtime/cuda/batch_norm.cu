#include "runtime/cuda/batch_norm.h"

#include <initializer_list>

#include "runtime/cuda/async_copy.cuh"
#include "runtime/cuda/norm_epilogue.cuh"

namespace sherd::cuda {
namespace {

using Call = BatchNormCall;

constexpr int block = 256, warps = block / warp_size;

/// How a launch deals out the elements: to blocks tiles of `across` threads side by side with some channels
/// each, and pieces of the batch.
struct Deal {
  int across;  // a power of two, a warp at most
  std::int64_t tiles, pieces, length;
};

/// Elements of `N` arrays that are on their way to the block's threads, `Ahead` places of each thread.
template <int Ahead, int N, int V, class T>
struct Coming {
  Raw<V, T> at[Ahead][N][block];

  __device__ void fetch(const T* from, int slot, int n) {
    Raw<V, T>& to = at[slot][n][threadIdx.x];
    if constexpr (sizeof to < 4)
      to = Raw<V, T>::load(from);
    else
      copy_async<sizeof to>(&to, from);
  }
};

/// The thread's `V` channels, and its elements of them.
template <int V>
struct Strip {
  int lane, line, lines;
  std::int64_t channel, channels, piece, begin, end;

  __device__ Strip(const Call& c, const Deal& d)
      : lane(static_cast<int>(threadIdx.x) % d.across),
        line(static_cast<int>(threadIdx.x) / d.across),
        lines(block / d.across),
        channel((blockIdx.x % d.tiles * d.across + lane) * V),
        channels(c.channels),
        piece(blockIdx.x / d.tiles),
        begin(piece * d.length),
        end(min(begin + d.length, c.batch)) {}
  __device__ bool inside() const { return channel < channels; }
  __device__ std::int64_t first_of_block() const { return channel - lane * V; }
  __device__ std::int64_t place(std::int64_t row) const { return row * channels + channel; }
  /// Calls `use(load(at), at)` for the places of the thread's elements, `U` loads before the first use: what
  /// is stored might be what is loaded, for all that the compiler knows.
  template <int U, class Load, class Use>
  __device__ void for_each(const Load& load, const Use& use) const {
    if (!inside()) return;
    std::int64_t row = begin + line;
    for (; row + (U - 1) * lines < end; row += U * lines) {
      decltype(load(0)) loaded[U];
#pragma unroll
      for (int u = 0; u < U; ++u) loaded[u] = load(place(row + u * lines));
#pragma unroll
      for (int u = 0; u < U; ++u) use(loaded[u], place(row + u * lines));
    }
#pragma unroll 1
    for (; row < end; row += lines) use(load(place(row)), place(row));
  }
  /// Calls `use(elements, at)` with those of the arrays at the places of the thread, and `after()` behind
  /// each `Ahead` of them and the last. So many are under way at once, for which registers would not do.
  template <int Ahead, int N, class T, class Use, class After>
  __device__ void for_each(Coming<Ahead, N, V, T>& coming, const void* const (&arrays)[N], const Use& use,
                           const After& after) const {
    if (!inside()) return;
    const T* next[N];
#pragma unroll
    for (int n = 0; n < N; ++n) next[n] = static_cast<const T*>(arrays[n]) + place(begin + line);
    const std::int64_t step = lines * channels;
    auto left = static_cast<int>((end - begin - line + lines - 1) / lines), to_fetch = left;
    const auto fetch = [&](int slot) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (to_fetch > 0) coming.fetch(next[n], slot, n);
        next[n] += step;
      }
      --to_fetch;
      close_copies();
    };
#pragma unroll
    for (int u = 0; u < Ahead; ++u) fetch(u);
    for (std::int64_t at = place(begin + line); left > 0;) {
#pragma unroll
      for (int u = 0; u < Ahead; ++u, --left, at += step) {
        if (left <= 0) break;
        wait_copies<Ahead - 1>();
        Raw<V, T> elements[N];
#pragma unroll
        for (int n = 0; n < N; ++n) elements[n] = coming.at[u][n][threadIdx.x];
        fetch(u);
        use(elements, at);
      }
      after();
    }
  }
};

template <class T, class C = compute_t<T>>
__device__ C at(const void* values, std::int64_t i, C otherwise = C(1)) {
  return values ? static_cast<const C*>(values)[i] : otherwise;
}
/// 1 / deviation of a channel.
template <class T, class C = compute_t<T>>
__device__ C rstd_of(const Call& c, std::int64_t channel) {
  return C(1) / std::sqrt(at<T>(c.variance, channel) + static_cast<C>(c.eps));
}
/// That times the weight.
template <class T, class C = compute_t<T>>
__device__ C factor_of(const Call& c, std::int64_t channel) {
  return rstd_of<T>(c, channel) * at<T>(c.weight, channel);
}

/// Values of a block's channels, each computed once and then read by all threads.
template <int V, class C>
struct Shared {
  C values[warp_size * V];

  /// `of(channel)` of each; to be read after `__syncthreads`.
  template <class F>
  __device__ void fill(const Strip<V>& strip, const F& of) {
    const std::int64_t first = strip.first_of_block();
    for (int i = static_cast<int>(threadIdx.x); i < block / strip.lines * V; i += block)
      if (first + i < strip.channels) values[i] = of(first + i);
  }
  __device__ void read(const Strip<V>& strip, C (&mine)[V]) const {
#pragma unroll
    for (int j = 0; j < V; ++j) mine[j] = values[strip.lane * V + j];
  }
};

/// How the forward normalises elements of the thread's channels.
template <int V, class C>
struct Normal {
  C mean[V], factor[V], shift[V];

  __device__ void of(C (&x)[V]) const {
#pragma unroll
    for (int j = 0; j < V; ++j) x[j] = std::fma(x[j] - mean[j], factor[j], shift[j]);
  }
};
/// Makes `up`, the gradient of ReLU's results, that of what it was taken of, which is made again of `x`.
template <class T, int V, class C>
__device__ void go_through_relu_of(const Normal<V, C>& normal, const C (&x)[V], C (&up)[V]) {
  C value[V];
#pragma unroll
  for (int j = 0; j < V; ++j) value[j] = x[j];
  normal.of(value);
#pragma unroll
  for (int j = 0; j < V; ++j) up[j] = value[j] <= rounded_to_zero<T>() ? C(0) : up[j];
}

/// What a backward does for a ReLU behind the normalisation.
enum class OfRelu { nothing, reads_y, makes_y };

/// What a channel's elements are counted from while its mean is not known: its first one, so that squares are
/// small.
template <class T>
__device__ compute_t<T> origin_of(const Call& c, std::int64_t channel) {
  const auto first = widen(static_cast<const T*>(c.x)[channel]);
  return first - first == 0 ? first : 0;
}

/// What short runs of terms add up in: a few 16-bit numbers lose nothing that counts in f32.
template <class T>
using run_t = std::conditional_t<sizeof(T) == 2, float, double>;
/// Of elements, and of gradients with them, of which as many at once leave room for fewer threads.
constexpr int run_length = 8, run_of_gradients = 4;
/// Of a thread's channels those that it sums: accumulators are many registers.
constexpr int summed(int V) { return V > 4 ? 4 : V; }

/// Neighbouring elements of x, and what a result is made of beside them.
template <int V, class T, class Other>
struct Both {
  Raw<V, T> x;
  Other other;
};

/// What a block shares of its lines' sums.
template <int V>
using LineSums = double[warps][2 * V][warp_size];

/// What a block that sums shares: first what comes, then what was made of it.
template <int Ahead, int N, int V, class T>
union SharedOfSums {
  Coming<Ahead, N, V, T> coming;
  LineSums<V> lines;
  __device__ SharedOfSums() {}
};

/// Adds the sums of the lines of a block up in order, and writes two for each channel.
template <int V>
__device__ void write_sums(const Call& c, const Deal& d, const Strip<V>& strip, double (&sums)[2 * V],
                           LineSums<V>& shared) {
#pragma unroll
  for (double& sum : sums)
    for (int step = d.across; step < warp_size; step *= 2) sum += __shfl_xor_sync(whole_warp, sum, step);
  __syncthreads();  // nothing comes any more
  if (static_cast<int>(threadIdx.x) % warp_size < d.across)
#pragma unroll
    for (int k = 0; k < 2 * V; ++k) shared[threadIdx.x / warp_size][k][strip.lane] = sums[k];
  __syncthreads();
  const std::int64_t first = strip.first_of_block() * 2;
  double* const to = c.sums + strip.piece * c.channels * 2;
  for (int i = static_cast<int>(threadIdx.x); i < d.across * 2 * V; i += block) {
    if (first + i >= c.channels * 2) return;
    double sum = shared[0][i % (2 * V)][i / (2 * V)];
    for (int w = 1; w < warps; ++w) sum += shared[w][i % (2 * V)][i / (2 * V)];
    to[first + i] = sum;
  }
}

/// A thread's sums, two for each of its channels.
template <class T, int V>
struct Sums {
  double sums[2 * V] = {};
  run_t<T> run[2 * V] = {};

  __device__ void end_run() {
#pragma unroll
    for (int k = 0; k < 2 * V; ++k) sums[k] += static_cast<double>(run[k]), run[k] = 0;
  }
};

/// Of each piece of a channel the sums of x and of its squares, from the channel's origin.
template <class T, int V>
__global__ void __launch_bounds__(block) sums_of_values(const Call c, const Deal d) {
  using C = compute_t<T>;
  const Strip<V> strip(c, d);
  Sums<T, V> of;
  C from[V] = {};
  if (strip.inside())
#pragma unroll
    for (int j = 0; j < V; ++j) from[j] = origin_of<T>(c, strip.channel + j);
  __shared__ SharedOfSums<run_length, 1, V, T> shared;
  strip.for_each(
      shared.coming, {c.x},
      [&](const Raw<V, T>(&x)[1], std::int64_t) {
        C value[V];
        x[0].widen_to(value);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const run_t<T> apart = static_cast<run_t<T>>(value[j]) - static_cast<run_t<T>>(from[j]);
          of.run[2 * j] += apart;
          of.run[2 * j + 1] = std::fma(apart, apart, of.run[2 * j + 1]);
        }
      },
      [&] { of.end_run(); });
  write_sums<V>(c, d, strip, of.sums, shared.lines);
}

/// Where the gradient of the normalised values goes that sums are taken of: to the residual, whose it is too,
/// or, if it came in two parts, to where that of x will be.
__host__ __device__ inline void* upstream_of(const BatchNormGradCall& g) {
  return g.epilogue.residual != nullptr ? g.epilogue.residual : g.more != nullptr ? g.gx : nullptr;
}

/// Of each piece of a channel the sums of the gradient of its normalised values, and of that times x - mean.
template <class T, int V, OfRelu relu, bool two_parts>
__global__ void __launch_bounds__(block) sums_of_gradients(const BatchNormGradCall g, const Deal d) {
  using C = compute_t<T>;
  constexpr bool reads_y = relu == OfRelu::reads_y;
  const Call& c = g.forward;
  const Strip<V> strip(c, d);
  Sums<T, V> of;
  Normal<V, C> normal{};
  if (strip.inside())
#pragma unroll
    for (int j = 0; j < V; ++j) {
      normal.mean[j] = at<T>(c.mean, strip.channel + j);
      if constexpr (relu != OfRelu::makes_y) continue;
      normal.factor[j] = factor_of<T>(c, strip.channel + j);
      normal.shift[j] = at<T>(c.bias, strip.channel + j, C(0));
    }
  constexpr int y_at = two_parts ? 3 : 2;
  __shared__ SharedOfSums<run_of_gradients, reads_y ? y_at + 1 : y_at, V, T> shared;
  const auto add = [&](const auto& elements, std::int64_t i) {
    C value[V], up[V];
    elements[0].widen_to(value);
    elements[1].widen_to(up);
    if constexpr (two_parts) {
      C more[V];
      elements[2].widen_to(more);
#pragma unroll
      for (int j = 0; j < V; ++j) up[j] += more[j];
      Raw<V, T>::of(up).widen_to(up);
    }
    if constexpr (relu == OfRelu::makes_y) go_through_relu_of<T>(normal, value, up);
    if constexpr (reads_y)
      if (g.epilogue.y != nullptr) go_through_relu(elements[y_at], up);
    if constexpr (reads_y || two_parts)
      if (void* const to = upstream_of(g)) Raw<V, T>::of(up).store(static_cast<T*>(to) + i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      of.run[2 * j] += static_cast<run_t<T>>(up[j]);
      of.run[2 * j + 1] += static_cast<run_t<T>>(up[j] * (value[j] - normal.mean[j]));
    }
  };
  const auto end_run = [&] { of.end_run(); };
  const void* const y = g.epilogue.y != nullptr ? g.epilogue.y : c.x;  // which is read, and no matter
  if constexpr (reads_y && two_parts)
    strip.for_each(shared.coming, {c.x, g.gy, g.more, y}, add, end_run);
  else if constexpr (reads_y)
    strip.for_each(shared.coming, {c.x, g.gy, y}, add, end_run);
  else if constexpr (two_parts)
    strip.for_each(shared.coming, {c.x, g.gy, g.more}, add, end_run);
  else
    strip.for_each(shared.coming, {c.x, g.gy}, add, end_run);
  write_sums<V>(c, d, strip, of.sums, shared.lines);
}

constexpr int channels_of_block = 2;  // that join pieces: their sums fill a sector of memory

/// A block's two channels: the sums of all pieces, in its first two threads.
__device__ double2 join_pieces(const Call& c, std::int64_t pieces, std::int64_t channel) {
  __shared__ double2 shared[warps][channels_of_block];
  double2 total{};
  if (channel < c.channels)
    for (std::int64_t p = threadIdx.x / channels_of_block; p < pieces; p += block / channels_of_block) {
      const double2 sums = reinterpret_cast<const double2*>(c.sums)[p * c.channels + channel];
      total.x += sums.x, total.y += sums.y;
    }
  for (int step = channels_of_block; step < warp_size; step *= 2) {
    total.x += __shfl_xor_sync(whole_warp, total.x, step);
    total.y += __shfl_xor_sync(whole_warp, total.y, step);
  }
  if (threadIdx.x % warp_size < channels_of_block)
    shared[threadIdx.x / warp_size][threadIdx.x % warp_size] = total;
  __syncthreads();
  if (threadIdx.x >= channels_of_block) return {};
  total = shared[0][threadIdx.x];
  for (int w = 1; w < warps; ++w) total.x += shared[w][threadIdx.x].x, total.y += shared[w][threadIdx.x].y;
  return total;
}

template <class T>
__global__ void __launch_bounds__(block) statistics(const Call c, std::int64_t pieces) {
  using C = compute_t<T>;
  const std::int64_t channel = blockIdx.x * channels_of_block + threadIdx.x % channels_of_block;
  const double2 sums = join_pieces(c, pieces, channel);
  if (threadIdx.x >= channels_of_block || channel >= c.channels) return;
  const auto elements = static_cast<double>(c.batch);
  const double shift = sums.x / elements, variance = sums.y / elements - shift * shift;
  static_cast<C*>(c.mean)[channel] = static_cast<C>(static_cast<double>(origin_of<T>(c, channel)) + shift);
  static_cast<C*>(c.variance)[channel] = static_cast<C>(variance < 0 ? 0 : variance);  // NaN stays
}

template <class T, int V, bool epilogue>
__global__ void __launch_bounds__(block) normalise(const Call c, const Deal d) {
  using C = compute_t<T>;
  using Elements = Both<V, T, Raw<V, T>>;
  const Strip<V> strip(c, d);
  __shared__ Shared<V, C> means, factors, shifts;
  means.fill(strip, [&](std::int64_t i) { return at<T>(c.mean, i); });
  factors.fill(strip, [&](std::int64_t i) { return factor_of<T>(c, i); });
  shifts.fill(strip, [&](std::int64_t i) { return at<T>(c.bias, i, C(0)); });
  __syncthreads();
  Normal<V, C> normal;
  means.read(strip, normal.mean), factors.read(strip, normal.factor), shifts.read(strip, normal.shift);
  strip.template for_each<4>(
      [&](std::int64_t i) {
        return Elements{load_at<V, T>(c.x, i), load_if<V, T>(epilogue ? c.epilogue.residual : nullptr, i)};
      },
      [&](const Elements& both, std::int64_t i) {
        C value[V];
        both.x.widen_to(value);
        normal.of(value);
        Raw<V, T> y = Raw<V, T>::of(value);
        if constexpr (epilogue) y = finished(c.epilogue, y, both.other);
        y.store(static_cast<T*>(c.y) + i);
      });
}

/// The gradients of weight and bias, and what every element's gradient loses through mean and deviation.
template <class T>
__global__ void __launch_bounds__(block) finish_sums(const BatchNormGradCall g, std::int64_t pieces) {
  using C = compute_t<T>;
  const Call& c = g.forward;
  const std::int64_t channel = blockIdx.x * channels_of_block + threadIdx.x % channels_of_block;
  const double2 sums = join_pieces(c, pieces, channel);
  if (threadIdx.x >= channels_of_block || channel >= c.channels) return;
  const auto elements = static_cast<double>(c.batch);
  const auto rstd = static_cast<double>(rstd_of<T>(c, channel));
  static_cast<C*>(g.gbias)[channel] = static_cast<C>(sums.x);
  static_cast<C*>(g.gweight)[channel] = static_cast<C>(sums.y * rstd);
  C* const to = static_cast<C*>(g.of_channels);
  to[channel] = g.through_statistics ? static_cast<C>(-sums.y * rstd * rstd / elements) : C(0);
  to[c.channels + channel] = g.through_statistics ? static_cast<C>(sums.x / elements) : C(0);
}

template <class T, int V, OfRelu relu>
__global__ void __launch_bounds__(block) gradient(const BatchNormGradCall g, const Deal d) {
  using C = compute_t<T>;
  using Elements = Both<V, T, Upstream<V, T, relu == OfRelu::reads_y>>;
  const Call& c = g.forward;
  const Strip<V> strip(c, d);
  __shared__ Shared<V, C> means, factors, backs, shifts, biases;
  means.fill(strip, [&](std::int64_t i) { return at<T>(c.mean, i); });
  factors.fill(strip, [&](std::int64_t i) { return factor_of<T>(c, i); });
  backs.fill(strip, [&](std::int64_t i) { return at<T>(g.of_channels, i); });
  shifts.fill(strip, [&](std::int64_t i) { return at<T>(g.of_channels, c.channels + i); });
  if constexpr (relu == OfRelu::makes_y)
    biases.fill(strip, [&](std::int64_t i) { return at<T>(c.bias, i, C(0)); });
  __syncthreads();
  Normal<V, C> normal;
  C back[V], shift[V];
  means.read(strip, normal.mean), factors.read(strip, normal.factor);
  if constexpr (relu == OfRelu::makes_y) biases.read(strip, normal.shift);
  backs.read(strip, back), shifts.read(strip, shift);
  strip.template for_each<8>(
      [&](std::int64_t i) { return Elements{load_at<V, T>(c.x, i), {g.gy, g.epilogue, i}}; },
      [&](const Elements& both, std::int64_t i) {
        C value[V], up[V];
        both.x.widen_to(value);
        both.other.widen_to(g.epilogue, up);
        if constexpr (relu == OfRelu::makes_y) go_through_relu_of<T>(normal, value, up);
#pragma unroll
        for (int j = 0; j < V; ++j)
          up[j] = std::fma(value[j] - normal.mean[j], back[j], up[j] - shift[j]) * normal.factor[j];
        Raw<V, T>::of(up).store(static_cast<T*>(g.gx) + i);
      });
}

/// Threads of a tile, each with `V` channels.
int across_of(const Call& c, std::int64_t V) {
  int across = 1;
  while (across < warp_size && across * V < c.channels) across *= 2;
  return across;
}

Deal deal_of(const Call& c, int V) {
  const int across = across_of(c, V);
  const std::int64_t pieces = c.pieces();
  return {across, blocks_of(c.channels, std::int64_t{across} * V), pieces, blocks_of(c.batch, pieces)};
}
unsigned grid_of(const Deal& d) { return cuda::grid_of(d.tiles * d.pieces); }
unsigned joining_grid_of(const Call& c) { return cuda::grid_of(blocks_of(c.channels, channels_of_block)); }

/// Calls `body.operator()<T, V>(deal)`, with packs of 16 bytes where x and the arrays allow it.
template <class F>
void with_packs(const Call& c, std::initializer_list<const void*> arrays, F&& body) {
  for_floating(c.dtype, [&]<class T>() {
    constexpr int V = wide_count<T>;
    bool wide = wide_rows<T>(c.channels, static_cast<const T*>(c.x));
    for (const void* array : arrays) wide = wide && wide_rows<T>(c.channels, static_cast<const T*>(array));
    if (wide)
      body.template operator()<T, V>(deal_of(c, V));
    else
      body.template operator()<T, 1>(deal_of(c, 1));
  });
}

/// Rounded where the reference rounds.
template <class R, class C>
__global__ void move_statistics(const RunningStatisticsCall c) {
  const std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  if (i >= c.channels) return;
  const auto move = [&](void* running, const void* batch, double taken) {
    R* const r = static_cast<R*>(running) + i;
    *r = static_cast<R>(static_cast<C>(widen(*r)) * static_cast<C>(c.kept) +
                        static_cast<const C*>(batch)[i] * static_cast<C>(taken));
  };
  move(c.running_mean, c.mean, c.of_mean);
  move(c.running_variance, c.variance, c.of_variance);
}

/// Calls `body.operator()<epilogue>()`; single elements are rare enough for kernels that ask at each whether
/// there is one.
template <int V, class F>
void with_epilogue_of(bool epilogue, F&& body) {
  if constexpr (V == 1)
    body.template operator()<true>();
  else
    with_epilogue(epilogue, body);
}

/// Calls `body.operator()<relu>()`.
template <int V, class F>
void with_relu_of(const NormEpilogueGrad& e, F&& body) {
  if (V == 1 || (e.any() && !e.y_again))
    body.template operator()<OfRelu::reads_y>();
  else if constexpr (V > 1)
    e.any() ? body.template operator()<OfRelu::makes_y>() : body.template operator()<OfRelu::nothing>();
}

}  // namespace

/// By the sizes alone, as the tree of sums.
std::int64_t BatchNormCall::pieces() const {
  constexpr std::int64_t blocks = 396, least = 8;  // what the largest GPU has room for; rows worth a thread
  const std::int64_t wide = 16 / size_of(dtype), V = channels % wide == 0 ? wide : 1;
  const int across = across_of(*this, V);
  const std::int64_t wanted = blocks_of(blocks, blocks_of(channels, across * V)),
                     room = batch / (block / across * least);
  return wanted < room ? wanted : room > 1 ? room : 1;
}

void launch_channel_statistics(const Call& c) {
  with_packs(c, {}, [&]<class T, int V>(const Deal&) {
    const Deal s = deal_of(c, summed(V));
    sums_of_values<T, summed(V)><<<grid_of(s), block, 0, c.stream>>>(c, s);
    statistics<T><<<joining_grid_of(c), block, 0, c.stream>>>(c, s.pieces);
  });
}

void launch_batch_norm(const Call& c) {
  with_packs(c, {c.y, c.epilogue.residual}, [&]<class T, int V>(const Deal& d) {
    with_epilogue_of<V>(c.epilogue.any(), [&]<bool epilogue>() {
      normalise<T, V, epilogue><<<grid_of(d), block, 0, c.stream>>>(c, d);
    });
  });
}

void launch_batch_norm_grad(const BatchNormGradCall& g) {
  const Call& c = g.forward;
  with_packs(c, {g.gy, g.more, g.gx, g.epilogue.y, g.epilogue.residual}, [&]<class T, int V>(const Deal& d) {
    const Deal s = deal_of(c, summed(V));
    with_relu_of<V>(g.epilogue, [&]<OfRelu relu>() {
      g.more != nullptr
          ? sums_of_gradients<T, summed(V), relu, true><<<grid_of(s), block, 0, c.stream>>>(g, s)
          : sums_of_gradients<T, summed(V), relu, false><<<grid_of(s), block, 0, c.stream>>>(g, s);
    });
    finish_sums<T><<<joining_grid_of(c), block, 0, c.stream>>>(g, d.pieces);
    BatchNormGradCall rest = g;  // what was written is gy, and ReLU has been gone through
    if (void* const up = upstream_of(g)) rest.gy = up, rest.more = nullptr, rest.epilogue = {};
    with_relu_of<V>(rest.epilogue, [&]<OfRelu relu>() {
      gradient<T, V, relu><<<grid_of(d), block, 0, c.stream>>>(rest, d);
    });
  });
}

void launch_running_statistics(const RunningStatisticsCall& c) {
  for_floating(c.running, [&]<class R>() {
    const auto launch = [&]<class C>() {
      move_statistics<R, C><<<blocks_for(c.channels), threads_per_block, 0, c.stream>>>(c);
    };
    c.batch == DType::f64 ? launch.template operator()<double>() : launch.template operator()<float>();
  });
}

}  // namespace sherd::cuda
