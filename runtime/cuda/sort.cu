// Elements become unsigned keys whose order is that of the result. Rows that fit a block are sorted by it,
// and of longer ones few elements are what the first of each chunk are sorted to; else all rows are sorted at
// once, by keys that begin with the row. All of it is stable, so equal elements stay in order.
#include "runtime/cuda/sort.h"

#include <algorithm>
#include <cub/block/block_radix_sort.cuh>
#include <cub/device/device_radix_sort.cuh>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/order.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

constexpr int long_chunk = 4096, short_chunk = 512;            // elements of a block
constexpr std::int64_t at_once = (std::int64_t{1} << 31) - 1;  // elements of a call of CUB

/// Bits of an element's key.
int key_bits(DType dtype) { return static_cast<int>(size_of(dtype)) * 8; }

/// Keys of rows from `first` on, with the row above the key's own bits, and the places where those are asked
/// for.
template <class T, class Key>
__global__ void __launch_bounds__(threads_per_block)
    make_keys(const SortCall c, std::int64_t n, int row_shift, Key* keys, std::uint32_t* places) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < n;
       i += step) {
    Key key = key_of<T, Key>(static_cast<const T*>(c.x)[i]);
    if (places) {
      const auto row = static_cast<std::uint32_t>(i) / static_cast<std::uint32_t>(c.columns);
      if (row_shift > 0) key |= static_cast<Key>(row) << row_shift;
      places[i] = static_cast<std::uint32_t>(i) - row * static_cast<std::uint32_t>(c.columns);
    }
    keys[i] = key;
  }
}

/// Each block sorts a chunk of a row of `columns` and writes its first `kept` pairs. Places that are not
/// given are those of the row.
template <class Key, int Threads, int Items>
__global__ void __launch_bounds__(Threads) sort_chunks(Pairs<Key> from, Pairs<Key> to, std::int64_t columns,
                                                       std::int64_t chunks, int kept, int bits) {
  using Sort = cub::BlockRadixSort<Key, Threads, Items, std::uint32_t>;
  __shared__ typename Sort::TempStorage storage;
  constexpr int size = Threads * Items;
  const std::int64_t row = blockIdx.x / chunks, chunk = blockIdx.x % chunks, first = chunk * size;
  Key keys[Items];
  std::uint32_t places[Items];
#pragma unroll
  for (int j = 0; j < Items; ++j) {
    const std::int64_t i = first + threadIdx.x * Items + j;
    const bool inside = i < columns;
    keys[j] = inside ? from.keys[row * columns + i] : static_cast<Key>(~Key(0));
    places[j] = inside && from.places ? from.places[row * columns + i] : static_cast<std::uint32_t>(i);
  }
  Sort(storage).SortBlockedToStriped(keys, places, 0, bits);
  const std::int64_t left = columns - first;
  const int count = static_cast<int>(min(static_cast<std::int64_t>(kept), left));
  // Of a row all chunks but the last keep as many.
  const std::int64_t width =
      (chunks - 1) * kept + min(static_cast<std::int64_t>(kept), columns - (chunks - 1) * size);
#pragma unroll
  for (int j = 0; j < Items; ++j) {
    const int i = j * Threads + static_cast<int>(threadIdx.x);
    if (i >= count) continue;
    to.keys[row * width + chunk * kept + i] = keys[j];
    to.places[row * width + chunk * kept + i] = places[j];
  }
}

/// places[i] of row i / k, of rows `width` apart.
template <class Bits>
__global__ void __launch_bounds__(threads_per_block)
    take_sorted(const SortCall c, const std::uint32_t* places, std::int64_t width) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x;
       i < c.rows * c.k; i += step) {
    const std::int64_t row = c.rows * c.k <= 0x7fffffff  // division in 64 bits is slow
                                 ? static_cast<std::uint32_t>(i) / static_cast<std::uint32_t>(c.k)
                                 : i / c.k;
    const std::int64_t place = places[row * width + i - row * c.k];
    static_cast<Bits*>(c.values)[i] = static_cast<const Bits*>(c.x)[row * c.columns + place];
    c.places[i] = place;
  }
}

__global__ void __launch_bounds__(threads_per_block)
    rows_of_places(const std::uint32_t* places, std::uint32_t columns, std::uint32_t* rows, std::int64_t n) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < n;
       i += step)
    rows[i] = places[i] / columns;
}
__global__ void __launch_bounds__(threads_per_block)
    places_in_rows(std::uint32_t* places, std::uint32_t columns, std::int64_t n) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < n;
       i += step)
    places[i] %= columns;
}

/// Whether blocks sort: rows that fit one, or few elements of each chunk of one.
bool in_blocks(const SortCall& c) { return c.columns <= long_chunk || c.k <= long_chunk / 8; }

std::int64_t rounded(std::int64_t bytes) { return blocks_of(bytes, 256) * 256; }

/// Rows that a call takes at once.
std::int64_t rows_at_once(const SortCall& c) {
  const std::int64_t rows = at_once / c.columns;
  return rows < 1 ? 1 : rows < c.rows ? rows : c.rows;
}

int bits_for(std::int64_t values) {
  int bits = 0;
  while (values > std::int64_t{1} << bits) ++bits;
  return bits;
}

template <class Key>
std::size_t cub_bytes(std::int64_t n) {
  std::size_t bytes = 0;
  cub::DoubleBuffer<Key> keys;
  cub::DoubleBuffer<std::uint32_t> places;
  cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, places, static_cast<std::uint32_t>(n));
  return bytes;
}

/// Sorts by bits [0, bits) of the keys.
template <class Key>
void sort_pairs(Pairs<Key> (&pairs)[2], std::int64_t n, int bits, void* room, std::size_t bytes,
                cudaStream_t stream) {
  cub::DoubleBuffer<Key> keys(pairs[0].keys, pairs[1].keys);
  cub::DoubleBuffer<std::uint32_t> places(pairs[0].places, pairs[1].places);
  cub::DeviceRadixSort::SortPairs(room, bytes, keys, places, static_cast<std::uint32_t>(n), 0, bits, stream);
  pairs[0] = {keys.Current(), places.Current()};
  pairs[1] = {keys.Alternate(), places.Alternate()};
}

template <class F>
void for_bits(DType dtype, F&& f) {
  switch (size_of(dtype)) {
    case 1:
      return f.template operator()<std::uint8_t>();
    case 2:
      return f.template operator()<std::uint16_t>();
    case 4:
      return f.template operator()<std::uint32_t>();
    default:
      return f.template operator()<std::uint64_t>();
  }
}

/// A call on part of the rows, with scratch dealt out.
template <class Key>
struct Sorting {
  SortCall c;
  std::int64_t n = c.rows * c.columns;
  Pairs<Key> pairs[2];
  void* room;
  std::size_t bytes;

  explicit Sorting(const SortCall& call) : c(call) {
    auto* at = static_cast<unsigned char*>(c.scratch);
    for (Pairs<Key>& each : pairs) {
      each.keys = reinterpret_cast<Key*>(at);
      at += rounded(n * static_cast<std::int64_t>(sizeof(Key)));
      each.places = reinterpret_cast<std::uint32_t*>(at);
      at += rounded(n * 4);
    }
    room = at;
    bytes = in_blocks(c) ? 0 : std::max(cub_bytes<Key>(n), cub_bytes<std::uint32_t>(n));
  }
  static std::int64_t scratch_bytes(const SortCall& c) {
    const std::int64_t n = rows_at_once(c) * c.columns;
    const std::int64_t pairs = 2 * (rounded(n * static_cast<std::int64_t>(sizeof(Key))) + rounded(n * 4));
    const std::size_t room = in_blocks(c) ? 0 : std::max(cub_bytes<Key>(n), cub_bytes<std::uint32_t>(n));
    return pairs + rounded(static_cast<std::int64_t>(room));
  }

  void keys(int row_shift, bool with_places) {
    for_any(c.dtype, [&]<class T>() {
      if constexpr (sizeof(T) <= sizeof(Key))
        make_keys<T, Key><<<blocks_for(n), threads_per_block, 0, c.stream>>>(
            c, n, row_shift, pairs[0].keys, with_places ? pairs[0].places : nullptr);
    });
  }
  void take(std::int64_t width) {
    for_bits(c.dtype, [&]<class Bits>() {
      take_sorted<Bits>
          <<<blocks_for(c.rows * c.k), threads_per_block, 0, c.stream>>>(c, pairs[0].places, width);
    });
  }

  /// Rounds until a row's candidates fit a block.
  void by_blocks() {
    keys(0, false);
    std::uint32_t* none = nullptr;
    std::swap(pairs[0].places, none);  // the first round makes them
    std::int64_t columns = c.columns;
    for (;;) {
      const int size = columns <= short_chunk ? short_chunk : long_chunk;
      const std::int64_t chunks = blocks_of(columns, size);
      const int kept = static_cast<int>(c.k < size ? c.k : size), bits = key_bits(c.dtype);
      const unsigned grid = grid_of(c.rows * chunks);
      if (size == short_chunk)
        sort_chunks<Key, 128, 4><<<grid, 128, 0, c.stream>>>(pairs[0], pairs[1], columns, chunks, kept, bits);
      else
        sort_chunks<Key, 512, 8><<<grid, 512, 0, c.stream>>>(pairs[0], pairs[1], columns, chunks, kept, bits);
      const std::int64_t left = columns - (chunks - 1) * size;
      columns = (chunks - 1) * kept + (left < kept ? left : kept);
      std::swap(pairs[0], pairs[1]);
      if (none) std::swap(pairs[1].places, none);
      if (chunks == 1) break;
    }
    take(columns);
  }

  void at_once_by_row() {
    const int bits = key_bits(c.dtype), row_bits = bits_for(c.rows);
    keys(row_bits > 0 ? bits : 0, true);
    sort_pairs(pairs, n, bits + row_bits, room, bytes, c.stream);
    take(c.columns);
  }

  /// Keys that leave no room for the row: by the keys first, then by the row.
  void at_once_in_two() {
    const SortCall all = c;
    c.columns = n;  // places in all rows
    c.rows = 1;
    keys(0, true);
    sort_pairs(pairs, n, key_bits(c.dtype), room, bytes, c.stream);
    c = all;
    const auto columns = static_cast<std::uint32_t>(c.columns);
    Pairs<std::uint32_t> rows[2];
    for (int i = 0; i < 2; ++i) rows[i] = {reinterpret_cast<std::uint32_t*>(pairs[i].keys), pairs[i].places};
    rows_of_places<<<blocks_for(n), threads_per_block, 0, c.stream>>>(rows[0].places, columns, rows[0].keys,
                                                                      n);
    sort_pairs(rows, n, bits_for(c.rows), room, bytes, c.stream);
    places_in_rows<<<blocks_for(n), threads_per_block, 0, c.stream>>>(rows[0].places, columns, n);
    pairs[0].places = rows[0].places;
    take(c.columns);
  }

  void run() {
    if (in_blocks(c)) return by_blocks();
    const int bits = key_bits(c.dtype) + bits_for(c.rows);
    bits <= static_cast<int>(sizeof(Key)) * 8 ? at_once_by_row() : at_once_in_two();
  }
};

/// Keys of 32 bits where element, and row where it is part of the key, fit them.
bool narrow_keys(const SortCall& c) {
  const int row_bits = in_blocks(c) ? 0 : bits_for(rows_at_once(c));
  return key_bits(c.dtype) + row_bits <= 32;
}

}  // namespace

std::size_t sort_pairs_bytes(std::int64_t n) { return cub_bytes<std::uint32_t>(n); }
void launch_sort_pairs(Pairs<std::uint32_t> (&pairs)[2], std::int64_t n, int bits, void* room,
                       cudaStream_t stream) {
  sort_pairs(pairs, n, bits, room, sort_pairs_bytes(n), stream);
}

std::int64_t SortCall::scratch_bytes() const {
  if (in_words() || selects()) return 0;
  return narrow_keys(*this) ? Sorting<std::uint32_t>::scratch_bytes(*this)
                            : Sorting<std::uint64_t>::scratch_bytes(*this);
}

void launch_sort(const SortCall& call) {
  if (call.in_words()) return launch_sort_words(call);
  if (call.selects()) return launch_select(call);
  const std::int64_t rows = rows_at_once(call);
  const bool narrow = narrow_keys(call);
  for (std::int64_t first = 0; first < call.rows; first += rows) {
    SortCall c = call;
    c.rows = std::min(rows, call.rows - first);
    c.x = static_cast<const unsigned char*>(call.x) + first * call.columns * size_of(call.dtype);
    c.values = static_cast<unsigned char*>(call.values) + first * call.k * size_of(call.dtype);
    c.places = call.places + first * call.k;
    narrow ? Sorting<std::uint32_t>(c).run() : Sorting<std::uint64_t>(c).run();
  }
}

}  // namespace sherd::cuda
