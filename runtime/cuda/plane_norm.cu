#include "runtime/cuda/plane_norm.h"

#include "runtime/cuda/norm_epilogue.cuh"

namespace sherd::cuda {
namespace {

using Call = PlaneNormCall;

__device__ std::int64_t set_of(const Call& c, std::int64_t plane) {
  return c.sets == Call::Sets::channels ? plane % c.channels : plane / c.per_set;
}
__device__ std::int64_t plane_of(const Call& c, std::int64_t set, std::int64_t k) {
  return c.sets == Call::Sets::channels ? set + k * c.channels : set * c.per_set + k;
}

template <class T, class C = compute_t<T>>
__device__ C at(const void* values, std::int64_t i, C otherwise = C(1)) {
  return values ? static_cast<const C*>(values)[i] : otherwise;
}
template <class T, class C = compute_t<T>>
__device__ C rstd_of(const Call& c, std::int64_t set) {
  const C spread = at<T>(c.spread, set);
  return c.spread_is == Call::Spread::rstd ? spread : C(1) / std::sqrt(spread + static_cast<C>(c.eps));
}
/// What a set's elements are counted from while its mean is not known: its first one, so that squares are
/// small.
template <class T>
__device__ double origin_of(const Call& c, std::int64_t set) {
  const auto first = static_cast<double>(widen(static_cast<const T*>(c.x)[plane_of(c, set, 0) * c.inner]));
  return first - first == 0 ? first : 0;
}

/// A warp or a block (`lanes`) a piece of a plane, and its elements of `V` at once.
struct Piece {
  int lane, lanes;
  std::int64_t plane, begin, end;
  bool inside;

  __device__ Piece(const Call& c, int lanes, std::int64_t pieces, std::int64_t length)
      : lane(static_cast<int>(threadIdx.x) % lanes), lanes(lanes) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * (threads_per_block / lanes) +
                           static_cast<int>(threadIdx.x) / lanes;
    plane = i / pieces;
    begin = plane * c.inner + i % pieces * length;
    end = min(begin + length, (plane + 1) * c.inner);
    inside = plane < c.planes;
  }
  /// Calls `body.operator()<N>(i)` for this thread's elements [i, i + N).
  template <int V, class F>
  __device__ void for_each(bool wide, const F& body) const {
    if (!inside) return;
    if (wide)
      for (std::int64_t i = begin + lane * V; i < end; i += lanes * V) body.template operator()<V>(i);
    else
      for (std::int64_t i = begin + lane; i < end; i += lanes) body.template operator()<1>(i);
  }
};

/// Sums over `lanes` neighbouring threads, a warp or the block, in the first of them.
__device__ double sum_of_lanes(double x, int lanes, double (&shared)[threads_per_block / warp_size]) {
  x = warp_sum(x);
  if (lanes == warp_size) return x;
  __syncthreads();  // what was shared before has been read
  if (threadIdx.x % warp_size == 0) shared[threadIdx.x / warp_size] = x;
  __syncthreads();
  x = shared[0];
  for (int w = 1; w < threads_per_block / warp_size; ++w) x += shared[w];
  return x;
}

/// How a launch deals out pieces.
struct Deal {
  int lanes;
  std::int64_t pieces, length;
  bool wide;
};

/// Adds the two sums of a piece up and writes them.
__device__ void write_sums(const Call& c, const Deal& d, const Piece& piece, double first, double second) {
  __shared__ double shared[threads_per_block / warp_size];
  first = sum_of_lanes(first, d.lanes, shared);
  second = sum_of_lanes(second, d.lanes, shared);
  if (piece.lane != 0 || !piece.inside) return;
  double* to = c.sums + 2 * (piece.plane * d.pieces + (piece.begin - piece.plane * c.inner) / d.length);
  to[0] = first, to[1] = second;
}

/// Of each piece the sums of x and of its squares, from the set's origin.
template <class T>
__global__ void __launch_bounds__(threads_per_block) sums_of_values(const Call c, const Deal d) {
  const Piece piece(c, d.lanes, d.pieces, d.length);
  double first = 0, second = 0;
  const double origin = origin_of<T>(c, piece.inside ? set_of(c, piece.plane) : 0);
  piece.template for_each<wide_count<T>>(d.wide, [&]<int V>(std::int64_t i) {
    const Packed<V, T> values = load_pack<V>(static_cast<const T*>(c.x) + i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const double from = static_cast<double>(widen(values.at[j])) - origin;
      first += from;
      second = fma(from, from, second);
    }
  });
  write_sums(c, d, piece, first, second);
}

/// Of each piece the sums of the gradient of its normalised values, and of that times x - mean. That gradient
/// is the residual's too.
template <class T, bool epilogue>
__global__ void __launch_bounds__(threads_per_block)
    sums_of_gradients(const PlaneNormGradCall g, const Deal d) {
  using C = compute_t<T>;
  const Call& c = g.forward;
  const Piece piece(c, d.lanes, d.pieces, d.length);
  double first = 0, second = 0;
  const C mean = at<T>(c.mean, piece.inside ? set_of(c, piece.plane) : 0);
  piece.template for_each<wide_count<T>>(d.wide, [&]<int V>(std::int64_t i) {
    const Raw<V, T> x = load_at<V, T>(c.x, i);
    C value[V], up[V];
    x.widen_to(value);
    Upstream<V, T, epilogue>(g.gy, g.epilogue, i).widen_to(g.epilogue, up);
    if (epilogue && g.epilogue.residual != nullptr)
      Raw<V, T>::of(up).store(static_cast<T*>(g.epilogue.residual) + i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const C along = up[j] * (value[j] - mean);
      first += static_cast<double>(up[j]);
      second += static_cast<double>(along);
    }
  });
  write_sums(c, d, piece, first, second);
}

/// A block a set.
template <class T>
__global__ void __launch_bounds__(threads_per_block) statistics(const Call c, std::int64_t pieces) {
  using C = compute_t<T>;
  __shared__ double shared[threads_per_block / warp_size];
  const std::int64_t set = blockIdx.x;
  double first = 0, second = 0;
  for (std::int64_t k = threadIdx.x; k < c.per_set * pieces; k += threads_per_block) {
    const double* from = c.sums + 2 * (plane_of(c, set, k / pieces) * pieces + k % pieces);
    first += from[0], second += from[1];
  }
  first = sum_of_lanes(first, threads_per_block, shared);
  second = sum_of_lanes(second, threads_per_block, shared);
  if (threadIdx.x != 0) return;
  const double elements = static_cast<double>(c.per_set) * static_cast<double>(c.inner),
               shift = first / elements;
  double variance = second / elements - shift * shift;
  if (variance < 0) variance = 0;  // and NaN stays
  static_cast<C*>(c.mean)[set] = static_cast<C>(origin_of<T>(c, set) + shift);
  static_cast<C*>(c.spread)[set] =
      static_cast<C>(c.spread_is == Call::Spread::rstd ? 1 / std::sqrt(variance + c.eps) : variance);
}

template <class T, bool epilogue>
__global__ void __launch_bounds__(threads_per_block) normalise(const Call c, const Deal d) {
  using C = compute_t<T>;
  const Piece piece(c, d.lanes, d.pieces, d.length);
  if (!piece.inside) return;
  const std::int64_t set = set_of(c, piece.plane), channel = piece.plane % c.channels;
  const C mean = at<T>(c.mean, set), factor = rstd_of<T>(c, set) * at<T>(c.weight, channel),
          shift = at<T>(c.bias, channel, C(0));
  piece.template for_each<wide_count<T>>(d.wide, [&]<int V>(std::int64_t i) {
    C value[V];
    load_at<V, T>(c.x, i).widen_to(value);
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] = std::fma(value[j] - mean, factor, shift);
    Raw<V, T> y = Raw<V, T>::of(value);
    if constexpr (epilogue) y = finished(c.epilogue, y, load_if<V, T>(c.epilogue.residual, i));
    y.store(static_cast<T*>(c.y) + i);
  });
}

/// Blocks of sets: what every element's gradient loses through mean and deviation. Blocks of channels after
/// them: the gradients of weight and bias.
template <class T>
__global__ void __launch_bounds__(threads_per_block)
    finish_sums(const PlaneNormGradCall g, std::int64_t pieces) {
  using C = compute_t<T>;
  const Call& c = g.forward;
  __shared__ double shared[threads_per_block / warp_size];
  const std::int64_t sets = c.planes / c.per_set, which = blockIdx.x;
  const bool of_set = which < sets;
  const std::int64_t images = c.planes / c.channels, channel = which - sets;
  double ones = 0, along = 0;
  for (std::int64_t k = threadIdx.x; k < (of_set ? c.per_set : images) * pieces; k += threads_per_block) {
    const std::int64_t plane = of_set ? plane_of(c, which, k / pieces) : k / pieces * c.channels + channel;
    const double* from = c.sums + 2 * (plane * pieces + k % pieces);
    const double by = of_set ? static_cast<double>(at<T>(c.weight, plane % c.channels)) : 1;
    ones += by * from[0];
    along += (of_set ? by : static_cast<double>(rstd_of<T>(c, set_of(c, plane)))) * from[1];
  }
  ones = sum_of_lanes(ones, threads_per_block, shared);
  along = sum_of_lanes(along, threads_per_block, shared);
  if (threadIdx.x != 0) return;
  if (!of_set) {
    static_cast<C*>(g.gweight)[channel] = static_cast<C>(along);
    static_cast<C*>(g.gbias)[channel] = static_cast<C>(ones);
    return;
  }
  const double elements = static_cast<double>(c.per_set) * static_cast<double>(c.inner);
  const auto rstd = static_cast<double>(rstd_of<T>(c, which));
  C* to = static_cast<C*>(g.of_sets) + 2 * which;
  to[0] = g.through_statistics ? static_cast<C>(-along * rstd * rstd / elements) : C(0);
  to[1] = g.through_statistics ? static_cast<C>(ones / elements) : C(0);
}

template <class T, bool epilogue>
__global__ void __launch_bounds__(threads_per_block) gradient(const PlaneNormGradCall g, const Deal d) {
  using C = compute_t<T>;
  const Call& c = g.forward;
  const Piece piece(c, d.lanes, d.pieces, d.length);
  if (!piece.inside) return;
  const std::int64_t set = set_of(c, piece.plane);
  const C mean = at<T>(c.mean, set), weight = at<T>(c.weight, piece.plane % c.channels),
          rstd = rstd_of<T>(c, set);
  const C back = static_cast<const C*>(g.of_sets)[2 * set],
          shift = static_cast<const C*>(g.of_sets)[2 * set + 1];
  piece.template for_each<wide_count<T>>(d.wide, [&]<int V>(std::int64_t i) {
    C value[V], up[V];
    load_at<V, T>(c.x, i).widen_to(value);
    Upstream<V, T, epilogue>(g.gy, g.epilogue, i).widen_to(g.epilogue, up);
#pragma unroll
    for (int j = 0; j < V; ++j)
      up[j] = std::fma(value[j] - mean, back, std::fma(weight, up[j], -shift)) * rstd;
    Raw<V, T>::of(up).store(static_cast<T*>(g.gx) + i);
  });
}

constexpr std::int64_t short_plane = 1024;  // a warp's

template <class T, class... P>
Deal deal_of(const Call& c, const P*... arrays) {
  const std::int64_t pieces = c.pieces();
  constexpr std::int64_t whole = 16;  // elements, so that pieces begin where wide loads may
  const auto data = [](const void* p) { return static_cast<const T*>(p); };
  return {c.inner <= short_plane ? warp_size : threads_per_block, pieces,
          blocks_of(blocks_of(c.inner, pieces), whole) * whole,
          wide_rows<T>(c.inner, data(c.x), data(arrays)...)};
}
unsigned grid_of(const Call& c, const Deal& d) {
  return cuda::grid_of(blocks_of(c.planes * d.pieces, threads_per_block / d.lanes));
}

}  // namespace

std::int64_t PlaneNormCall::pieces() const {
  constexpr std::int64_t blocks = 1024, least = 1 << 13;  // enough for the largest GPU; worth a block
  const std::int64_t wanted = blocks_of(blocks, planes), room = inner / least;
  return wanted < room ? wanted : room > 1 ? room : 1;
}

void launch_plane_statistics(const Call& c) {
  for_floating(c.dtype, [&]<class T>() {
    const Deal deal = deal_of<T>(c);
    sums_of_values<T><<<grid_of(c, deal), threads_per_block, 0, c.stream>>>(c, deal);
    statistics<T><<<cuda::grid_of(c.set_count()), threads_per_block, 0, c.stream>>>(c, deal.pieces);
  });
}

void launch_plane_norm(const Call& c) {
  for_floating(c.dtype, [&]<class T>() {
    const Deal deal = deal_of<T>(c, c.y, c.epilogue.residual);
    with_epilogue(c.epilogue.any(), [&]<bool epilogue>() {
      normalise<T, epilogue><<<grid_of(c, deal), threads_per_block, 0, c.stream>>>(c, deal);
    });
  });
}

void launch_plane_norm_grad(const PlaneNormGradCall& g) {
  const Call& c = g.forward;
  for_floating(c.dtype, [&]<class T>() {
    const Deal deal = deal_of<T>(c, g.gy, g.gx, g.epilogue.y, g.epilogue.residual);
    with_epilogue(g.epilogue.any(), [&]<bool epilogue>() {
      sums_of_gradients<T, epilogue><<<grid_of(c, deal), threads_per_block, 0, c.stream>>>(g, deal);
    });
    finish_sums<T>
        <<<cuda::grid_of(c.set_count() + c.channels), threads_per_block, 0, c.stream>>>(g, deal.pieces);
    const PlaneNormGradCall rest = after_sums(g);
    with_epilogue(rest.epilogue.any(), [&]<bool epilogue>() {
      gradient<T, epilogue><<<grid_of(c, deal), threads_per_block, 0, c.stream>>>(rest, deal);
    });
  });
}

}  // namespace sherd::cuda
