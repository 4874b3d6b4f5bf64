#include <bit>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/peer_moves.h"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

/// Few blocks saturate the link between two GPUs, if each thread has several reads on their way; the other
/// multiprocessors are left to the rank's own work.
constexpr unsigned most_blocks = 24;
constexpr int threads = 512, packs_at_once = 4;
/// What a block moves in one go.
constexpr std::int64_t chunk_packs = std::int64_t{threads} * packs_at_once, chunk_bytes = chunk_packs * 16;

/// Elements of a piece that are read in one access, if all pointers allow it.
template <class T>
constexpr int wide = static_cast<int>(16 / sizeof(T));

/// Calls `body(piece, chunk)` for this block's share of the chunks of all pieces, `bytes_of(piece)` each.
template <class BytesOf, class Body>
__device__ void each_chunk(int pieces, const BytesOf& bytes_of, const Body& body) {
  std::int64_t chunk = blockIdx.x, first = 0;
  for (int piece = 0; piece < pieces; ++piece) {
    const std::int64_t end = first + (bytes_of(piece) + chunk_bytes - 1) / chunk_bytes;
    for (; chunk < end; chunk += gridDim.x) body(piece, chunk - first);
    first = end;
  }
}

/// Of one chunk of `packs` wide accesses and of `count` elements, `narrow` of which one access has: calls
/// `all(first)` for `packs_at_once` packs that lie `threads` apart, or `pack(i)` and `element(i)` for what
/// is there.
template <class All, class Pack, class Element>
__device__ void each_pack(std::int64_t chunk, std::int64_t packs, std::int64_t count, int narrow,
                          const All& all, const Pack& pack, const Element& element) {
  const std::int64_t begin = chunk * chunk_packs, end = begin + chunk_packs;
  if (end <= packs) return all(begin + threadIdx.x);
  for (std::int64_t i = begin + threadIdx.x; i < (end < packs ? end : packs); i += threads) pack(i);
  const std::int64_t from = (begin > packs ? begin : packs) * narrow, last = end * narrow;
  for (std::int64_t i = from + threadIdx.x; i < (last < count ? last : count); i += threads) element(i);
}

__global__ void __launch_bounds__(threads) copy_pieces(const __grid_constant__ CopyTable table) {
  const auto bytes_of = [&](int piece) { return table.piece[piece].bytes; };
  each_chunk(table.count, bytes_of, [&](int at, std::int64_t chunk) {
    const auto& piece = table.piece[at];
    auto* const to = reinterpret_cast<uint4*>(piece.to);
    const auto* const from = reinterpret_cast<const uint4*>(piece.from);
    const bool aligned =
        (reinterpret_cast<std::uintptr_t>(piece.to) | reinterpret_cast<std::uintptr_t>(piece.from)) % 16 == 0;
    each_pack(
        chunk, aligned ? piece.bytes / 16 : 0, piece.bytes, 16,
        [&](std::int64_t first) {
          uint4 x[packs_at_once];
#pragma unroll
          for (int u = 0; u < packs_at_once; ++u) x[u] = from[first + u * threads];
#pragma unroll
          for (int u = 0; u < packs_at_once; ++u) to[first + u * threads] = x[u];
        },
        [&](std::int64_t i) { to[i] = from[i]; }, [&](std::int64_t i) { piece.to[i] = piece.from[i]; });
  });
}

template <class A>
__device__ A add(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}

/// `Exact`: averages are over a power of two, of which `scale` is the inverse. A product with it has the
/// quotient's bits, and a division is most of what the kernel would do.
template <class A, ReduceOp::Kind K, bool Exact>
struct Rule {
  A scale;
  __device__ A first(A x) const { return K == ReduceOp::Kind::prescaled_sum ? x * scale : x; }
  __device__ A next(A sum, A x) const {
    if constexpr (K == ReduceOp::Kind::max) {
      if constexpr (std::is_floating_point_v<A>) return (sum > x || sum != sum) ? sum : x;
      return sum > x ? sum : x;
    } else {
      return add(sum, first(x));
    }
  }
  __device__ A last(A sum, int sources) const {
    if constexpr (K != ReduceOp::Kind::average) return sum;
    return Exact ? sum * scale : sum / static_cast<A>(sources);
  }
};

/// U packs of V elements that lie `step` elements apart, from element `i` on, in rank order. The next source
/// is on its way while one is added. All are read before one is written, so `out` may be a source.
template <int U, int V, class T, class R>
__device__ void combine_at(const CombineTable& table, int piece, std::int64_t i, std::int64_t step,
                           const R& rule) {
  const std::byte* const* source = table.source + piece * table.sources;
  Packed<V, compute_t<T>> sum[U];
  Packed<V, T> x[U], next[U];
  const auto load = [&](Packed<V, T>(&to)[U], int r) {
#pragma unroll
    for (int u = 0; u < U; ++u) to[u] = load_pack<V>(reinterpret_cast<const T*>(source[r]) + i + u * step);
  };
  load(next, 0);
  for (int r = 0; r < table.sources; ++r) {
#pragma unroll
    for (int u = 0; u < U; ++u) x[u] = next[u];
    if (r + 1 < table.sources) load(next, r + 1);
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int j = 0; j < V; ++j)
        sum[u].at[j] = r == 0 ? rule.first(widen(x[u].at[j])) : rule.next(sum[u].at[j], widen(x[u].at[j]));
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    Packed<V, T> out;
#pragma unroll
    for (int j = 0; j < V; ++j) out.at[j] = narrow<T>(rule.last(sum[u].at[j], table.sources));
    store_pack<V>(reinterpret_cast<T*>(table.piece[piece].out) + i + u * step, out);
  }
}

template <class T, ReduceOp::Kind K, bool Exact>
__global__ void __launch_bounds__(threads)
    combine_pieces(const __grid_constant__ CombineTable table, Rule<compute_t<T>, K, Exact> rule) {
  constexpr int V = wide<T>;
  const auto bytes_of = [&](int piece) {
    return table.piece[piece].count * static_cast<std::int64_t>(sizeof(T));
  };
  each_chunk(table.count, bytes_of, [&](int piece, std::int64_t chunk) {
    const std::int64_t count = table.piece[piece].count;
    auto bits = reinterpret_cast<std::uintptr_t>(table.piece[piece].out);
    for (int r = 0; r < table.sources; ++r)
      bits |= reinterpret_cast<std::uintptr_t>(table.source[piece * table.sources + r]);
    each_pack(
        chunk, bits % 16 == 0 ? count / V : 0, count, V,
        [&](std::int64_t first) {
          combine_at<packs_at_once, V, T>(table, piece, first * V, std::int64_t{threads} * V, rule);
        },
        [&](std::int64_t i) { combine_at<1, V, T>(table, piece, i * V, 0, rule); },
        [&](std::int64_t i) { combine_at<1, 1, T>(table, piece, i, 0, rule); });
  });
}

/// For `bytes` over all pieces, of which each may end within a chunk.
unsigned grid_for(std::int64_t bytes, int pieces) {
  const std::int64_t chunks = bytes / chunk_bytes + pieces;
  return static_cast<unsigned>(chunks < most_blocks ? chunks : most_blocks);
}

template <class T, ReduceOp::Kind K, bool Exact = false>
void launch(const CombineTable& table, float scale, cudaStream_t stream) {
  std::int64_t count = 0;
  for (int i = 0; i < table.count; ++i) count += table.piece[i].count;
  combine_pieces<T, K, Exact>
      <<<grid_for(count * static_cast<std::int64_t>(sizeof(T)), table.count), threads, 0, stream>>>(
          table, {static_cast<compute_t<T>>(scale)});
}

}  // namespace

void launch_copies(const CopyTable& table, cudaStream_t stream) {
  std::int64_t bytes = 0;
  for (int i = 0; i < table.count; ++i) bytes += table.piece[i].bytes;
  copy_pieces<<<grid_for(bytes, table.count), threads, 0, stream>>>(table);
}

void launch_combine(DType dtype, ReduceOp reduction, const CombineTable& table, cudaStream_t stream) {
  for_any(dtype, [&]<class T>() {
    using Kind = ReduceOp::Kind;
    if constexpr (!std::is_same_v<T, bool>) {  // no rank may ask for bool
      if (reduction.kind == Kind::max) return launch<T, Kind::max>(table, 1, stream);
      if constexpr (std::is_floating_point_v<compute_t<T>>) {
        if (reduction.kind == Kind::average && std::has_single_bit(static_cast<unsigned>(table.sources)))
          return launch<T, Kind::average, true>(table, 1 / static_cast<float>(table.sources), stream);
        if (reduction.kind == Kind::average) return launch<T, Kind::average>(table, 1, stream);
        if (reduction.kind == Kind::prescaled_sum)
          return launch<T, Kind::prescaled_sum>(table, reduction.scale, stream);
      }
      launch<T, Kind::sum>(table, 1, stream);
    }
  });
}

}  // namespace sherd::cuda
