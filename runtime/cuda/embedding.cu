#include "runtime/cuda/embedding.h"

#include <cub/device/device_radix_sort.cuh>

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
      if (word == 0) c.faults(FaultKind::embedding_index, static_cast<double>(row), position, c.rows);
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

constexpr std::int64_t piece = 64;        // sorted positions that one block sums
constexpr unsigned no_row = 0xffffffffu;  // of positions out of range; sorts last

struct Scratch {
  unsigned *row = nullptr, *sorted_row = nullptr;
  unsigned *position = nullptr, *sorted_position = nullptr;
  void *partial = nullptr, *sort = nullptr;
  std::size_t sort_bytes = 0, bytes = 0;

  explicit Scratch(const EmbeddingGradCall& c) {
    cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, row, sorted_row, position, sorted_position, c.count);
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
    partial = take(static_cast<std::size_t>((c.count + piece - 1) / piece * 2 * c.width) * sizeof(double));
    sort = take(sort_bytes);
  }
};

__global__ void __launch_bounds__(threads_per_block)
    list_positions(const std::int64_t* index, std::int64_t count, std::int64_t rows, Scratch s) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < count;
       i += step) {
    const std::int64_t row = index[i];
    s.row[i] = row >= 0 && row < rows ? static_cast<unsigned>(row) : no_row;
    s.position[i] = static_cast<unsigned>(i);
  }
}

/// Sums the runs of one piece. A run that lies in it whole is written to the table, a part of one to
/// `partial`.
template <class T>
__global__ void __launch_bounds__(threads_per_block) sum_pieces(const EmbeddingGradCall c, const Scratch s) {
  using C = compute_t<T>;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * threads_per_block + threadIdx.x;
  if (column >= c.width) return;
  const std::int64_t begin = blockIdx.x * piece, end = min(begin + piece, c.count);
  auto* partial = static_cast<C*>(s.partial) + static_cast<std::int64_t>(blockIdx.x) * 2 * c.width + column;
  const auto* gy = static_cast<const T*>(c.gy);
  for (std::int64_t i = begin; i < end;) {
    const unsigned row = s.sorted_row[i];
    if (row == no_row) return;
    const bool starts_here = i > begin || i == 0 || s.sorted_row[i - 1] != row;
    C total = 0;
    for (; i < end && s.sorted_row[i] == row; ++i)
      total += static_cast<C>(gy[static_cast<std::int64_t>(s.sorted_position[i]) * c.width + column]);
    const bool ends_here = i < end || i == c.count || s.sorted_row[i] != row;
    if (starts_here && ends_here)
      static_cast<T*>(c.table)[row * c.width + column] = static_cast<T>(total);
    else
      partial[starts_here ? c.width : 0] = total;
  }
}

/// Joins runs that cross pieces: the piece where a run starts walks to where it ends.
template <class T>
__global__ void __launch_bounds__(threads_per_block) join_pieces(const EmbeddingGradCall c, const Scratch s) {
  using C = compute_t<T>;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * threads_per_block + threadIdx.x;
  const std::int64_t begin = blockIdx.x * piece, last = begin + piece - 1;
  if (column >= c.width || last + 1 >= c.count) return;
  const unsigned row = s.sorted_row[last];
  if (row == no_row || s.sorted_row[last + 1] != row) return;
  if (s.sorted_row[begin] == row && begin > 0 && s.sorted_row[begin - 1] == row) return;  // starts before
  const C* partial = static_cast<const C*>(s.partial) + column;
  std::int64_t at = blockIdx.x;
  C total = partial[(2 * at + 1) * c.width];
  for (++at; at * piece < c.count && s.sorted_row[at * piece] == row; ++at)
    total += partial[2 * at * c.width];
  static_cast<T*>(c.table)[row * c.width + column] = static_cast<T>(total);
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
  cub::DeviceRadixSort::SortPairs(s.sort, s.sort_bytes, s.row, s.sorted_row, s.position, s.sorted_position,
                                  c.count, 0, 32, c.stream);
  const dim3 grid(static_cast<unsigned>((c.count + piece - 1) / piece),
                  static_cast<unsigned>((c.width + threads_per_block - 1) / threads_per_block));
  for_floating(c.dtype, [&]<class T>() {
    sum_pieces<T><<<grid, threads_per_block, 0, c.stream>>>(c, s);
    join_pieces<T><<<grid, threads_per_block, 0, c.stream>>>(c, s);
  });
}

}  // namespace sherd::cuda
