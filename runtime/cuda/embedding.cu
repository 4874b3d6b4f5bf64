#include "runtime/cuda/embedding.h"

#include <cub/device/device_radix_sort.cuh>

#include <bit>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

template <class Word>
__global__ void __launch_bounds__(threads_per_block) gather(const EmbeddingCall c, std::int64_t words) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x;
       i < c.count * words; i += step) {
    const std::int64_t position = i / words, word = i - position * words, row = c.index[position];
    Word value;
    if (row >= 0 && row < c.rows) {
      value = static_cast<const Word*>(c.table)[row * words + word];
    } else {
      memset(&value, 0xff, sizeof value);
      if (word == 0) c.faults(FaultKind::embedding_index, row, position, c.rows);
    }
    static_cast<Word*>(c.out)[i] = value;
  }
}

template <class Word>
void gather_words(const EmbeddingCall& c) {
  const std::int64_t words = c.row_bytes / static_cast<std::int64_t>(sizeof(Word));
  gather<Word><<<blocks_for(c.count * words), threads_per_block, 0, c.stream>>>(c, words);
}

// ---- The gradient. Positions are sorted by row, stably; runs of one row are then summed in pieces of a
// fixed length.

constexpr int piece = warp_size;  // sorted positions that one warp sums, for each of its columns
constexpr int warps = 8;          // of a block, each with a piece
constexpr int ahead = 8;          // gradients on their way at a time

struct Scratch {
  unsigned *row = nullptr, *sorted_row = nullptr;
  unsigned *position = nullptr, *sorted_position = nullptr;
  void *partial = nullptr, *sort_memory = nullptr;
  std::size_t sort_bytes = 0, bytes = 0;

  explicit Scratch(const EmbeddingGradCall& c) {
    sort(c.count, c.rows, nullptr);
    const auto take = [&](std::size_t size) {
      const std::size_t at = bytes;
      bytes += (size + 255) / 256 * 256;
      return c.scratch == nullptr ? nullptr : static_cast<void*>(static_cast<char*>(c.scratch) + at);
    };
    const std::size_t list = static_cast<std::size_t>(c.count) * sizeof(unsigned);
    row = static_cast<unsigned*>(take(list));
    sorted_row = static_cast<unsigned*>(take(list));
    position = static_cast<unsigned*>(take(list));
    sorted_position = static_cast<unsigned*>(take(list));
    // Of each piece: its share of the run that it begins with and of the one that it ends with.
    const std::size_t number = c.dtype == DType::f64 ? sizeof(double) : sizeof(float);
    partial = take(static_cast<std::size_t>((c.count + piece - 1) / piece * 2 * c.width) * number);
    sort_memory = take(sort_bytes);
  }
  /// By the bits that rows have; those out of range are `rows` and come last.
  void sort(std::int64_t count, std::int64_t rows, cudaStream_t stream) {
    cub::DeviceRadixSort::SortPairs(sort_memory, sort_bytes, row, sorted_row, position, sorted_position,
                                    count, 0, std::bit_width(static_cast<unsigned>(rows)), stream);
  }
  /// The row of sorted position `i`; of none, `none`, which is no row's number.
  __device__ unsigned row_at(std::int64_t i, std::int64_t count) const {
    return i >= 0 && i < count ? sorted_row[i] : none;
  }
  static constexpr unsigned none = 0xffffffffu;
};

__global__ void __launch_bounds__(threads_per_block)
    list_positions(const std::int64_t* index, std::int64_t count, std::int64_t rows, Scratch s) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < count;
       i += step) {
    const std::int64_t row = index[i];
    s.row[i] = static_cast<unsigned>(row >= 0 && row < rows ? row : rows);
    s.position[i] = static_cast<unsigned>(i);
  }
}

/// Sums the runs of one piece, a warp each. A run that lies in it whole is written to the table, a part of
/// one to `partial`.
template <int V, class T>
__global__ void __launch_bounds__(warp_size* warps) sum_pieces(const EmbeddingGradCall c, const Scratch s) {
  using C = compute_t<T>;
  const auto across = static_cast<unsigned>(blocks_of(c.width, warp_size * V));
  const std::int64_t number = static_cast<std::int64_t>(blockIdx.x / across) * warps + threadIdx.y,
                     begin = number * piece,
                     column = (static_cast<std::int64_t>(blockIdx.x % across) * warp_size + threadIdx.x) * V;
  if (begin >= c.count) return;
  const std::int64_t mine = begin + threadIdx.x;
  const unsigned row = s.row_at(mine, c.count), position = mine < c.count ? s.sorted_position[mine] : 0;
  const unsigned before = s.row_at(begin - 1, c.count), after = s.row_at(begin + piece, c.count);
  const bool inside = column < c.width;
  const T* from = static_cast<const T*>(c.gy) + column;
  C total[V] = {};
  bool starts_here = true;
  for (int first = 0; first < piece; first += ahead) {
    Raw<V, T> gradients[ahead];
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
      const unsigned at = __shfl_sync(whole_warp, position, first + a),
                     now = __shfl_sync(whole_warp, row, first + a);
      if (inside && now < c.rows) gradients[a] = Raw<V, T>::load(from + at * c.width);
    }
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
      const int i = first + a;
      const unsigned now = __shfl_sync(whole_warp, row, i),
                     following = __shfl_sync(whole_warp, row, (i + 1) % piece),
                     next = i + 1 < piece ? following : after;
      if (now >= c.rows) return;  // those out of range and the end are last
      if (i == 0) starts_here = before != now;
      C wide[V];
      if (inside) gradients[a].widen_to(wide);
#pragma unroll
      for (int j = 0; j < V; ++j) total[j] += wide[j];
      if (next == now && i + 1 < piece) continue;
      if (inside) {
        if (starts_here && next != now) {
          Raw<V, T>::of(total).store(static_cast<T*>(c.table) + now * c.width + column);
        } else {
          Packed<V, C> part;
#pragma unroll
          for (int j = 0; j < V; ++j) part.at[j] = total[j];
          store_pack(static_cast<C*>(s.partial) + (2 * number + starts_here) * c.width + column, part);
        }
      }
      starts_here = true;
#pragma unroll
      for (int j = 0; j < V; ++j) total[j] = 0;
    }
  }
}

/// Joins runs that cross pieces: the warp of the piece where a run starts walks to where it ends.
template <int V, class T>
__global__ void __launch_bounds__(warp_size* warps) join_pieces(const EmbeddingGradCall c, const Scratch s) {
  using C = compute_t<T>;
  const auto across = static_cast<unsigned>(blocks_of(c.width, warp_size * V));
  const std::int64_t number = static_cast<std::int64_t>(blockIdx.x / across) * warps + threadIdx.y,
                     begin = number * piece, end = begin + piece,
                     column = (static_cast<std::int64_t>(blockIdx.x % across) * warp_size + threadIdx.x) * V;
  if (end >= c.count) return;
  const unsigned row = s.sorted_row[end - 1];
  if (row >= c.rows || s.sorted_row[end] != row) return;                          // ends here
  if (s.sorted_row[begin] == row && s.row_at(begin - 1, c.count) == row) return;  // starts before
  const bool inside = column < c.width;
  double total[V] = {};  // a run may have any number of pieces
  const auto add = [&](std::int64_t part) {
    const auto pack = load_pack<V>(static_cast<const C*>(s.partial) + part * c.width + column);
#pragma unroll
    for (int j = 0; j < V; ++j) total[j] += pack.at[j];
  };
  if (inside) add(2 * number + 1);
  for (std::int64_t first = number + 1;; first += warp_size) {
    const unsigned others =
        __ballot_sync(whole_warp, s.row_at((first + threadIdx.x) * piece, c.count) != row);
    const int count = others == 0 ? warp_size : __ffs(static_cast<int>(others)) - 1;
    if (inside)
#pragma unroll 8
      for (int i = 0; i < count; ++i) add(2 * (first + i));
    if (count < warp_size) break;
  }
  if (!inside) return;
  C narrow[V];
#pragma unroll
  for (int j = 0; j < V; ++j) narrow[j] = static_cast<C>(total[j]);
  Raw<V, T>::of(narrow).store(static_cast<T*>(c.table) + row * c.width + column);
}

template <int V, class T>
void sum_runs(const EmbeddingGradCall& c, const Scratch& s) {
  const unsigned grid = grid_of(blocks_of(c.count, piece * warps) * blocks_of(c.width, warp_size * V));
  const dim3 block(warp_size, warps);
  sum_pieces<V, T><<<grid, block, 0, c.stream>>>(c, s);
  join_pieces<V, T><<<grid, block, 0, c.stream>>>(c, s);
}

}  // namespace

void launch_embedding(const EmbeddingCall& c) {
  const auto bits = reinterpret_cast<std::uintptr_t>(c.table) | reinterpret_cast<std::uintptr_t>(c.out) |
                    static_cast<std::uintptr_t>(c.row_bytes);
  if (bits % 16 == 0)
    gather_words<uint4>(c);
  else if (bits % 8 == 0)
    gather_words<std::uint64_t>(c);
  else if (bits % 4 == 0)
    gather_words<std::uint32_t>(c);
  else if (bits % 2 == 0)
    gather_words<std::uint16_t>(c);
  else
    gather_words<std::uint8_t>(c);
}

std::size_t EmbeddingGradCall::scratch_bytes() const { return Scratch(*this).bytes; }

void launch_embedding_grad(const EmbeddingGradCall& c) {
  const auto bytes = static_cast<std::size_t>(c.rows * c.width * size_of(c.dtype));
  cudaMemsetAsync(c.table, 0, bytes, c.stream);
  if (c.count == 0 || c.width == 0 || c.rows == 0) return;
  Scratch s(c);
  list_positions<<<blocks_for(c.count), threads_per_block, 0, c.stream>>>(c.index, c.count, c.rows, s);
  s.sort(c.count, c.rows, c.stream);
  for_floating(c.dtype, [&]<class T>() {
    if (wide_rows<T>(c.width, static_cast<const T*>(c.gy), static_cast<const T*>(c.table)))
      sum_runs<wide_count<T>, T>(c, s);
    else
      sum_runs<1, T>(c, s);
  });
}

}  // namespace sherd::cuda
