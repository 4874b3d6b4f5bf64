#include "runtime/cuda/peer_moves.h"

#include "runtime/combine_rule.h"
#include "runtime/cuda/block.cuh"

namespace sherd::cuda {
namespace {

/// Few blocks saturate the link between two GPUs, if each thread has several reads on their way; the other
/// multiprocessors are left to the rank's own work.
constexpr unsigned most_blocks = 24;
constexpr int move_threads = 512, packs_at_once = 4;
/// What a block moves in one go.
constexpr std::int64_t chunk_packs = std::int64_t{move_threads} * packs_at_once,
                       chunk_bytes = chunk_packs * 16;

/// Elements of a piece that are read in one access, if all pointers allow it.
template <class T>
constexpr int wide_access = static_cast<int>(16 / sizeof(T));

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
/// `all(first)` for `packs_at_once` packs that lie `move_threads` apart, or `pack(i)` and `element(i)` for
/// what is there.
template <class All, class Pack, class Element>
__device__ void each_pack(std::int64_t chunk, std::int64_t packs, std::int64_t count, int narrow,
                          const All& all, const Pack& pack, const Element& element) {
  const std::int64_t begin = chunk * chunk_packs, end = begin + chunk_packs;
  if (end <= packs) return all(begin + threadIdx.x);
  for (std::int64_t i = begin + threadIdx.x; i < (end < packs ? end : packs); i += move_threads) pack(i);
  const std::int64_t from = (begin > packs ? begin : packs) * narrow, last = end * narrow;
  for (std::int64_t i = from + threadIdx.x; i < (last < count ? last : count); i += move_threads) element(i);
}

/// This block's part `chunk` of a copy of `bytes`.
__device__ void copy_chunk(std::byte* to, const std::byte* from, std::int64_t bytes, std::int64_t chunk) {
  auto* const wide_to = reinterpret_cast<uint4*>(to);
  const auto* const wide_from = reinterpret_cast<const uint4*>(from);
  const bool aligned =
      (reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) % 16 == 0;
  each_pack(
      chunk, aligned ? bytes / 16 : 0, bytes, 16,
      [&](std::int64_t first) {
        uint4 x[packs_at_once];
#pragma unroll
        for (int u = 0; u < packs_at_once; ++u) x[u] = wide_from[first + u * move_threads];
#pragma unroll
        for (int u = 0; u < packs_at_once; ++u) wide_to[first + u * move_threads] = x[u];
      },
      [&](std::int64_t i) { wide_to[i] = wide_from[i]; }, [&](std::int64_t i) { to[i] = from[i]; });
}

/// U packs of V elements that lie `step` elements apart, from element `i` on, of `sources` in rank order, of
/// which `source(r)` is one's address. The next source is on its way while one is added. All are read before
/// one is written, so `to` may be a source.
template <int U, int V, class T, class Source, class R>
__device__ void combine_at(std::byte* to, int sources, const Source& source, std::int64_t i,
                           std::int64_t step, const R& rule) {
  Packed<V, compute_t<T>> sum[U];
  Packed<V, T> x[U], next[U];
  const auto load = [&](Packed<V, T>(&to)[U], int r) {
#pragma unroll
    for (int u = 0; u < U; ++u) to[u] = load_pack<V>(reinterpret_cast<const T*>(source(r)) + i + u * step);
  };
  load(next, 0);
  for (int r = 0; r < sources; ++r) {
#pragma unroll
    for (int u = 0; u < U; ++u) x[u] = next[u];
    if (r + 1 < sources) load(next, r + 1);
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
    for (int j = 0; j < V; ++j) out.at[j] = narrow<T>(rule.last(sum[u].at[j], sources));
    store_pack<V>(reinterpret_cast<T*>(to) + i + u * step, out);
  }
}

/// This block's part `chunk` of a combination of `count` elements.
template <class T, class Source, class R>
__device__ void combine_chunk(std::byte* out, int sources, const Source& source, std::int64_t count,
                              std::int64_t chunk, const R& rule) {
  constexpr int V = wide_access<T>;
  auto bits = reinterpret_cast<std::uintptr_t>(out);
  for (int r = 0; r < sources; ++r) bits |= reinterpret_cast<std::uintptr_t>(source(r));
  each_pack(
      chunk, bits % 16 == 0 ? count / V : 0, count, V,
      [&](std::int64_t first) {
        combine_at<packs_at_once, V, T>(out, sources, source, first * V, std::int64_t{move_threads} * V,
                                        rule);
      },
      [&](std::int64_t i) { combine_at<1, V, T>(out, sources, source, i * V, 0, rule); },
      [&](std::int64_t i) { combine_at<1, 1, T>(out, sources, source, i, 0, rule); });
}

/// Blocks for `bytes` over all pieces, of which each may end within a chunk.
unsigned move_blocks(std::int64_t bytes, int pieces) {
  const std::int64_t chunks = bytes / chunk_bytes + pieces;
  return static_cast<unsigned>(chunks < most_blocks ? chunks : most_blocks);
}

__global__ void __launch_bounds__(move_threads) copy_pieces(const __grid_constant__ CopyTable table) {
  each_chunk(
      table.count, [&](int piece) { return table.piece[piece].bytes; },
      [&](int piece, std::int64_t chunk) {
        const auto& [to, from, bytes] = table.piece[piece];
        copy_chunk(to, from, bytes, chunk);
      });
}

template <class T, class R>
__global__ void __launch_bounds__(move_threads)
    combine_pieces(const __grid_constant__ CombineTable table, R rule) {
  each_chunk(
      table.count, [&](int piece) { return table.piece[piece].count * static_cast<std::int64_t>(sizeof(T)); },
      [&](int piece, std::int64_t chunk) {
        const std::byte* const* sources = table.source + piece * table.sources;
        combine_chunk<T>(
            table.piece[piece].out, table.sources, [&](int r) { return sources[r]; },
            table.piece[piece].count, chunk, rule);
      });
}

}  // namespace

void launch_copies(const CopyTable& table, cudaStream_t stream) {
  std::int64_t bytes = 0;
  for (int i = 0; i < table.count; ++i) bytes += table.piece[i].bytes;
  copy_pieces<<<move_blocks(bytes, table.count), move_threads, 0, stream>>>(table);
}

void launch_combine(DType dtype, ReduceOp reduction, const CombineTable& table, cudaStream_t stream) {
  std::int64_t count = 0;
  for (int i = 0; i < table.count; ++i) count += table.piece[i].count;
  with_combine_rule(dtype, reduction, table.sources, [&]<class T, class R>(R rule) {
    combine_pieces<T>
        <<<move_blocks(count * static_cast<std::int64_t>(sizeof(T)), table.count), move_threads, 0, stream>>>(
            table, rule);
  });
}

}  // namespace sherd::cuda
