// Sums of what is put at equal positions, the same to the bit on every run.
#include <bit>

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/picking.cuh"
#include "runtime/cuda/sort.h"
#include "runtime/cuda/types.cuh"
#include "runtime/wrapping.h"

namespace sherd::cuda {
namespace {

constexpr int warps = 4;  // of a block that sums lines, each with sums of its own
// Of shared memory for the sums of a warp that has a line's picks alone, and of one that shares them.
std::int64_t alone_bytes() { return most_shared_memory() / warps; }
constexpr std::int64_t shared_bytes = 12 << 10;
constexpr std::int64_t most_tiles = 8;  // of a line, whose picks are all read for each of them
constexpr int ahead = 8;                // values of a thread on their way at a time
constexpr std::int64_t wide_slice = 8;  // elements that make it worth a warp to read a slice

std::int64_t number_bytes(DType dtype) {  // of the type that sums are made in
  const std::int64_t size = size_of(dtype);
  return size == 2 ? 4 : size;
}
std::int64_t long_sum_bytes(DType dtype) { return is_floating(dtype) ? 8 : size_of(dtype); }

/// The type in which any number of values are summed.
template <class C>
using long_sum_t = std::conditional_t<std::is_integral_v<C>, C, double>;

template <class C>
__device__ C plus(C a, C b) {
  return math::wrapping(std::plus<>{}, a, b);
}
template <class T>
__device__ void write_sum(T* to, compute_t<T> sum, bool based) {
  *to = narrow<T>(based ? plus(widen(*to), sum) : sum);
}

// ---- No element is met twice.

template <class T, class N>
__global__ void __launch_bounds__(threads_per_block) add_apart(const AddCall c) {
  const N count = static_cast<N>(c.picks.count), step = static_cast<N>(gridDim.x) * threads_per_block;
  for (N i = static_cast<N>(blockIdx.x) * threads_per_block + threadIdx.x; i < count; i += step) {
    const PickPlace p = place_of(c.picks, i);
    const std::int64_t at = c.index[p.index];
    if (at >= 0 && at < c.picks.columns)
      write_sum(static_cast<T*>(c.y) + p.x + at * c.picks.x_axis, widen(static_cast<const T*>(c.values)[i]),
                c.based);
    else
      c.faults(c.name, at, p.index, c.picks.columns);
  }
}

// ---- Lines. A warp takes a part of a line's picks, 32 at a time, in order, and sums those that fall into a
// tile of the line in shared memory.

/// Which tiles and parts lines are cut into. The sums of a part are written and read again, which its picks
/// must be worth; where no line is cut into parts, sums are shorter and fewer warps do, so tiles are wider.
struct LineParts {
  std::int64_t tile, tiles, parts, part, units;
  explicit LineParts(const AddCall& c) {
    const std::int64_t least = c.picks.columns / 4 > 1024 ? c.picks.columns / 4 : 1024;
    cut(c, shared_bytes / (long_sum_bytes(c.dtype) + 1), c.line_picks / least);
    if (parts == 1) cut(c, alone_bytes() / (number_bytes(c.dtype) + 1), 1);
  }

 private:
  void cut(const AddCall& c, std::int64_t most_columns, std::int64_t most_parts) {
    tile = c.picks.columns < most_columns ? c.picks.columns : most_columns;
    tiles = blocks_of(c.picks.columns, tile);
    units = c.lines.count * tiles;
    const std::int64_t wanted = 4096 / units;  // as many as fill the device
    parts = wanted < most_parts ? wanted : most_parts;
    if (parts < 1) parts = 1;
    part = blocks_of(blocks_of(c.line_picks, parts), ahead * warp_size) * ahead * warp_size;
    parts = blocks_of(c.line_picks, part);
    units *= parts;
  }
};

/// The sums of a warp; and, where lines are so wide that the keys of 32 picks seldom meet, for each of them
/// the lane that wrote last, by which meetings are found: to compare all lanes takes far longer.
template <class Sum>
struct WarpSums {
  Sum* sums;
  std::uint8_t* writer;  ///< null for narrow lines
};
constexpr std::int64_t wide_line = 256;

/// Adds the warp's 32 values to the sums that they belong to, equal ones in order of lanes; those of no sum
/// have key -1.
template <class C, class Sum>
__device__ void add_in_order(const WarpSums<Sum>& at, int key, C value) {
  const int lane = static_cast<int>(threadIdx.x);
  Sum* sums = at.sums;
  if (at.writer != nullptr) {
    if (key >= 0) at.writer[key] = static_cast<std::uint8_t>(lane);
    __syncwarp();
    const bool met = key >= 0 && at.writer[key] != lane;
    if (!__any_sync(whole_warp, met)) {
      if (key >= 0) sums[key] = plus(sums[key], static_cast<Sum>(value));
      __syncwarp();
      return;
    }
  } else if (!__any_sync(whole_warp, key >= 0)) {
    return;
  }
  const unsigned same = __match_any_sync(whole_warp, key);
  const bool first = key >= 0 && lane == __ffs(static_cast<int>(same)) - 1;
  Sum total = first ? plus(sums[key], static_cast<Sum>(value)) : Sum(0);
  unsigned left = first ? same & (same - 1) : 0;
  while (__any_sync(whole_warp, left != 0)) {
    const C other =
        static_cast<C>(__shfl_sync(whole_warp, value, left != 0 ? __ffs(static_cast<int>(left)) - 1 : lane));
    if (left != 0) total = plus(total, static_cast<Sum>(other));
    left &= left - 1;
  }
  if (first) sums[key] = total;
  __syncwarp();
}

/// `Sum` is what a line is summed in: where one warp has all its picks that is what the CPU sums them in,
/// with the CPU's bits.
template <class T, class Sum>
__global__ void __launch_bounds__(warp_size* warps) sum_lines(const AddCall c, const LineParts parts) {
  using C = compute_t<T>;
  extern __shared__ double memory[];
  Sum* sums = reinterpret_cast<Sum*>(memory) + threadIdx.y * parts.tile;
  const WarpSums<Sum> of_warp{
      sums, parts.tile < wide_line
                ? nullptr
                : reinterpret_cast<std::uint8_t*>(reinterpret_cast<Sum*>(memory) + warps * parts.tile) +
                      threadIdx.y * parts.tile};
  const std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * warps + threadIdx.y;
  if (unit >= parts.units) return;
  // Neighbouring warps have neighbouring lines, whose picks lie side by side.
  const std::int64_t line = unit % c.lines.count, tile = unit / c.lines.count % parts.tiles,
                     part = unit / c.lines.count / parts.tiles;
  const PickPlace p = place_of(c.lines, static_cast<std::uint64_t>(line));
  const std::int64_t first = tile * parts.tile, left = c.picks.columns - first,
                     width = left < parts.tile ? left : parts.tile;
  T* y = static_cast<T*>(c.y) + p.x + first * c.picks.x_axis;
  const bool alone = parts.parts == 1, from_base = alone && c.based && !c.slices;
  const int lane = static_cast<int>(threadIdx.x);
  for (std::int64_t k = lane; k < width; k += warp_size)
    sums[k] = from_base ? static_cast<Sum>(widen(y[k * c.picks.x_axis])) : Sum(0);
  __syncwarp();
  const std::int64_t begin = part * parts.part,
                     end = begin + parts.part < c.line_picks ? begin + parts.part : c.line_picks;
  const T* values = static_cast<const T*>(c.values) + p.value;
  for (std::int64_t j = begin; j < end; j += ahead * warp_size) {
    std::int64_t at[ahead];
    T value[ahead];
#pragma unroll
    for (int a = 0; a < ahead; ++a) {  // without a branch, so that all are on their way at a time
      const std::int64_t i = min(j + a * warp_size + lane, end - 1);
      at[a] = c.index[p.index + i * c.index_axis];
      value[a] = values[i * c.value_axis];
    }
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
      const std::int64_t i = j + a * warp_size + lane, in_tile = at[a] - first;
      const bool mine = i < end && in_tile >= 0 && in_tile < width;
      if (i < end && (at[a] < 0 || at[a] >= c.picks.columns))
        c.faults(c.name, at[a], p.index + i * c.index_axis, c.picks.columns);
      add_in_order(of_warp, mine ? static_cast<int>(in_tile) : -1, widen(value[a]));
    }
  }
  Sum* partial = static_cast<Sum*>(c.scratch) + (part * c.lines.count + line) * c.picks.columns + first;
  for (std::int64_t k = lane; k < width; k += warp_size)
    if (alone)
      write_sum(y + k * c.picks.x_axis, static_cast<C>(sums[k]), c.based && c.slices);
    else
      partial[k] = sums[k];
}

constexpr int joiners = 8;  // threads that share the parts of a sum

/// Sums the parts of each sum: every thread some of them in order, then the first thread those sums.
template <class T>
__global__ void __launch_bounds__(warp_size* joiners) join_lines(const AddCall c, std::int64_t parts) {
  using C = compute_t<T>;
  using Sum = long_sum_t<C>;
  __shared__ Sum shared[joiners][warp_size];
  const std::int64_t sums = c.lines.count * c.picks.columns,
                     s = static_cast<std::int64_t>(blockIdx.x) * warp_size + threadIdx.x;
  Sum total = 0;
  if (s < sums)
#pragma unroll 4
    for (std::int64_t part = threadIdx.y; part < parts; part += joiners)
      total = plus(total, static_cast<const Sum*>(c.scratch)[part * sums + s]);
  shared[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || s >= sums) return;
  for (int j = 1; j < joiners; ++j) total = plus(total, shared[j][threadIdx.x]);
  const std::int64_t line = s / c.picks.columns;
  const PickPlace p = place_of(c.lines, static_cast<std::uint64_t>(line));
  write_sum(static_cast<T*>(c.y) + p.x + (s - line * c.picks.columns) * c.picks.x_axis, static_cast<C>(total),
            c.based);
}

// ---- Runs. Picks are sorted by destination, stably; runs of one destination are then summed in pieces of a
// fixed length.

constexpr int piece = warp_size;  // sorted picks of slices that one warp sums, for each of its columns
constexpr int piece_warps = 8;    // of a block, each with a piece
constexpr int short_piece = 8;    // sorted picks of elements that one thread sums

struct Runs {
  Pairs<unsigned> pairs[2];  // destinations and picks; sorted ones, of the first
  void *partial = nullptr, *sort_memory = nullptr;
  std::int64_t count, bound, width;  // picks, destinations, and columns of each
  std::size_t bytes = 0;

  explicit Runs(const AddCall& c) : count(c.sorted()), bound(c.destinations()) {
    const bool wide = c.way() == AddCall::Way::wide_runs;
    width = wide ? c.outer * c.inner : 1;
    const auto take = [&](std::size_t size) {
      const std::size_t at = bytes;
      bytes += (size + 255) / 256 * 256;
      return c.scratch == nullptr ? nullptr : static_cast<void*>(static_cast<char*>(c.scratch) + at);
    };
    const std::size_t list = static_cast<std::size_t>(count) * sizeof(unsigned);
    for (Pairs<unsigned>& each : pairs)
      each = {static_cast<unsigned*>(take(list)), static_cast<unsigned*>(take(list))};
    // Of each piece: its share of the run that it begins with and of the one that it ends with.
    const std::int64_t pieces = blocks_of(count, wide ? piece : short_piece);
    partial = take(static_cast<std::size_t>(pieces * 2 * width * number_bytes(c.dtype)));
    sort_memory = take(sort_pairs_bytes(count));
  }
  /// By the bits that destinations have; those of positions out of range are `bound` and come last.
  void sort(cudaStream_t stream) {
    launch_sort_pairs(pairs, count, std::bit_width(static_cast<unsigned>(bound)), sort_memory, stream);
  }
  /// The destination of sorted pick `i`; of none, `none`, which is none's number.
  __device__ unsigned key_at(std::int64_t i) const { return i >= 0 && i < count ? pairs[0].keys[i] : none; }
  static constexpr unsigned none = 0xffffffffu;
};

template <bool Wide>
__global__ void __launch_bounds__(threads_per_block) list_picks(const AddCall c, Runs s) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < s.count;
       i += step) {
    PickPlace p;
    if constexpr (Wide)
      p.index = i;
    else
      p = place_of(c.picks, static_cast<std::uint32_t>(i));
    const std::int64_t at = c.index[p.index];
    const bool valid = at >= 0 && at < c.picks.columns;
    if (!valid) c.faults(c.name, at, p.index, c.picks.columns);
    s.pairs[0].keys[i] = static_cast<unsigned>(!valid ? s.bound : Wide ? at : p.x + at * c.picks.x_axis);
    s.pairs[0].places[i] = static_cast<unsigned>(i);
  }
}

/// Sums the runs of one piece, a thread each. A run that lies in it whole is written, a part of one goes to
/// `partial`.
template <class T>
__global__ void __launch_bounds__(threads_per_block) sum_short_pieces(const AddCall c, const Runs s) {
  using C = compute_t<T>;
  const std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x,
                     begin = number * short_piece;
  if (begin >= s.count) return;
  unsigned key[short_piece + 1];
  C value[short_piece];
#pragma unroll
  for (int i = 0; i <= short_piece; ++i) key[i] = s.key_at(begin + i);
#pragma unroll
  for (int i = 0; i < short_piece; ++i)
    value[i] = key[i] < s.bound ? widen(static_cast<const T*>(c.values)[s.pairs[0].places[begin + i]]) : C(0);
  bool starts_here = s.key_at(begin - 1) != key[0];
  C total = 0;
#pragma unroll
  for (int i = 0; i < short_piece; ++i) {
    if (key[i] >= s.bound) return;  // those out of range and the end are last
    total = plus(total, value[i]);
    const bool goes_on = key[i + 1] == key[i];
    if (goes_on && i + 1 < short_piece) continue;
    if (starts_here && !goes_on)
      write_sum(static_cast<T*>(c.y) + key[i], total, c.based);
    else
      static_cast<C*>(s.partial)[2 * number + starts_here] = total;
    starts_here = true;
    total = 0;
  }
}

/// Joins runs that cross pieces: the warp that has the piece where one starts walks to where it ends.
template <class T>
__global__ void __launch_bounds__(threads_per_block) join_short_pieces(const AddCall c, const Runs s) {
  using C = compute_t<T>;
  using Sum = long_sum_t<C>;
  const C* partial = static_cast<const C*>(s.partial);
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x,
                     begin = number * short_piece, end = begin + short_piece;
  const unsigned key = s.key_at(end - 1);
  const bool crosses =
      key < s.bound && s.key_at(end) == key && !(s.key_at(begin) == key && s.key_at(begin - 1) == key);
  for (unsigned left = __ballot_sync(whole_warp, crosses); left != 0; left &= left - 1) {
    const int source = __ffs(static_cast<int>(left)) - 1;
    const unsigned run = __shfl_sync(whole_warp, key, source);
    const std::int64_t start = number - lane + source;
    Sum total = lane == 0 ? static_cast<Sum>(partial[2 * start + 1]) : Sum(0);
    for (std::int64_t first = start + 1;; first += warp_size) {
      const bool mine = s.key_at((first + lane) * short_piece) == run;
      if (mine) total = plus(total, static_cast<Sum>(partial[2 * (first + lane)]));
      if (!__all_sync(whole_warp, mine)) break;
    }
    for (int step = warp_size / 2; step > 0; step /= 2)
      total = plus(total, static_cast<Sum>(__shfl_xor_sync(whole_warp, total, step)));
    if (lane == 0) write_sum(static_cast<T*>(c.y) + run, static_cast<C>(total), c.based);
  }
}

/// Columns of wide slices that a warp's lane has, `V` of them, and where they begin in what is put and in y.
template <int V>
struct Columns {
  std::int64_t number, begin, column, values, y;  // a piece, its first pick; a column, and places
  bool inside;
  __device__ Columns(const AddCall& c, const Runs& s) {
    const auto across = static_cast<unsigned>(blocks_of(s.width, warp_size * V));
    number = static_cast<std::int64_t>(blockIdx.x / across) * piece_warps + threadIdx.y;
    begin = number * piece;
    column = (static_cast<std::int64_t>(blockIdx.x % across) * warp_size + threadIdx.x) * V;
    inside = column < s.width;
    const std::int64_t outer = c.outer == 1 ? 0 : column / c.inner, inner = column - outer * c.inner;
    values = outer * c.line_picks * c.inner + inner;
    y = outer * c.picks.columns * c.inner + inner;
  }
};

template <int V, class T, class C>
__device__ void write_sums(T* to, C (&sums)[V], bool based) {
  if (based) {
    C before[V];
    Raw<V, T>::load(to).widen_to(before);
#pragma unroll
    for (int j = 0; j < V; ++j) sums[j] += before[j];
  }
  Raw<V, T>::of(sums).store(to);
}

/// Sums the runs of one piece, a warp each.
template <int V, class T>
__global__ void __launch_bounds__(warp_size* piece_warps) sum_pieces(const AddCall c, const Runs s) {
  using C = compute_t<T>;
  const Columns<V> mine(c, s);
  if (mine.begin >= s.count) return;
  const std::int64_t i = mine.begin + threadIdx.x;
  const unsigned key = s.key_at(i), pick = i < s.count ? s.pairs[0].places[i] : 0;
  const unsigned before = s.key_at(mine.begin - 1), after = s.key_at(mine.begin + piece);
  const T* from = static_cast<const T*>(c.values) + mine.values;
  C total[V] = {};
  bool starts_here = true;
  for (int first = 0; first < piece; first += ahead) {
    Raw<V, T> values[ahead];
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
      const unsigned at = __shfl_sync(whole_warp, pick, first + a),
                     now = __shfl_sync(whole_warp, key, first + a);
      if (mine.inside && now < s.bound) values[a] = Raw<V, T>::load(from + at * c.inner);
    }
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
      const int k = first + a;
      const unsigned now = __shfl_sync(whole_warp, key, k),
                     following = __shfl_sync(whole_warp, key, (k + 1) % piece),
                     next = k + 1 < piece ? following : after;
      if (now >= s.bound) return;  // those out of range and the end are last
      if (k == 0) starts_here = before != now;
      C wide[V];
      if (mine.inside) values[a].widen_to(wide);
#pragma unroll
      for (int j = 0; j < V; ++j) total[j] += wide[j];
      if (next == now && k + 1 < piece) continue;
      if (mine.inside) {
        if (starts_here && next != now) {
          write_sums<V>(static_cast<T*>(c.y) + mine.y + now * c.inner, total, c.based);
        } else {
          Packed<V, C> part;
#pragma unroll
          for (int j = 0; j < V; ++j) part.at[j] = total[j];
          store_pack(static_cast<C*>(s.partial) + (2 * mine.number + starts_here) * s.width + mine.column,
                     part);
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
__global__ void __launch_bounds__(warp_size* piece_warps) join_pieces(const AddCall c, const Runs s) {
  using C = compute_t<T>;
  const Columns<V> mine(c, s);
  const std::int64_t end = mine.begin + piece;
  if (end >= s.count) return;
  const unsigned key = s.pairs[0].keys[end - 1];
  if (key >= s.bound || s.pairs[0].keys[end] != key) return;                          // ends here
  if (s.pairs[0].keys[mine.begin] == key && s.key_at(mine.begin - 1) == key) return;  // starts before
  double total[V] = {};  // a run may have any number of pieces
  const auto add = [&](std::int64_t part) {
    const auto pack = load_pack<V>(static_cast<const C*>(s.partial) + part * s.width + mine.column);
#pragma unroll
    for (int j = 0; j < V; ++j) total[j] += pack.at[j];
  };
  if (mine.inside) add(2 * mine.number + 1);
  for (std::int64_t first = mine.number + 1;; first += warp_size) {
    const unsigned others = __ballot_sync(whole_warp, s.key_at((first + threadIdx.x) * piece) != key);
    const int count = others == 0 ? warp_size : __ffs(static_cast<int>(others)) - 1;
    if (mine.inside)
#pragma unroll 8
      for (int i = 0; i < count; ++i) add(2 * (first + i));
    if (count < warp_size) break;
  }
  if (!mine.inside) return;
  C sums[V];
#pragma unroll
  for (int j = 0; j < V; ++j) sums[j] = static_cast<C>(total[j]);
  write_sums<V>(static_cast<T*>(c.y) + mine.y + key * c.inner, sums, c.based);
}

template <int V, class T>
void sum_wide_runs(const AddCall& c, const Runs& s) {
  const unsigned grid = grid_of(blocks_of(s.count, piece * piece_warps) * blocks_of(s.width, warp_size * V));
  const dim3 block(warp_size, piece_warps);
  sum_pieces<V, T><<<grid, block, 0, c.stream>>>(c, s);
  join_pieces<V, T><<<grid, block, 0, c.stream>>>(c, s);
}

/// Calls `f.operator()<T>()` for what adds up; bool was refused before.
template <class F>
void for_numbers(DType dtype, const F& f) {
  for_any(dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, bool>) f.template operator()<T>();
  });
}

template <class T>
void add_lines(const AddCall& c) {
  const LineParts parts(c);
  const auto sum = [&]<class Sum>() {
    const auto shared = static_cast<std::size_t>(warps * parts.tile) * (sizeof(Sum) + 1);
    // The process's bound, so the same in all calls: this call's would refuse another thread's launch.
    cudaFuncSetAttribute(sum_lines<T, Sum>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         most_shared_memory());
    sum_lines<T, Sum>
        <<<grid_of(blocks_of(parts.units, warps)), dim3(warp_size, warps), shared, c.stream>>>(c, parts);
  };
  if (parts.parts == 1) return sum.template operator()<compute_t<T>>();
  sum.template operator()<long_sum_t<compute_t<T>>>();
  const unsigned grid = grid_of(blocks_of(c.lines.count * c.picks.columns, warp_size));
  join_lines<T><<<grid, dim3(warp_size, joiners), 0, c.stream>>>(c, parts.parts);
}

template <class T>
void add_runs(const AddCall& c) {
  Runs s(c);
  const bool wide = c.way() == AddCall::Way::wide_runs;
  const unsigned blocks = blocks_for(s.count);
  if (wide)
    list_picks<true><<<blocks, threads_per_block, 0, c.stream>>>(c, s);
  else
    list_picks<false><<<blocks, threads_per_block, 0, c.stream>>>(c, s);
  s.sort(c.stream);
  if (!wide) {
    const unsigned grid = grid_of(blocks_of(s.count, short_piece * threads_per_block));
    sum_short_pieces<T><<<grid, threads_per_block, 0, c.stream>>>(c, s);
    join_short_pieces<T><<<grid, threads_per_block, 0, c.stream>>>(c, s);
    return;
  }
  if constexpr (!std::is_integral_v<T>) {
    if (wide_rows<T>(c.inner, static_cast<const T*>(c.values), static_cast<const T*>(c.y)))
      sum_wide_runs<wide_count<T>, T>(c, s);
    else
      sum_wide_runs<1, T>(c, s);
  }
}

}  // namespace

AddCall::Way AddCall::way() const {
  if (distinct || line_picks == 1 || picks.columns == 0) return Way::apart;
  const bool by_slices = slices && is_floating(dtype);          // integers are rare, and kernels for them too
  if (by_slices && inner >= wide_slice) return Way::wide_runs;  // lanes have neighbouring elements of a slice
  // Sums in shared memory cost no sort; a line of many tiles is read too often.
  if (LineParts(*this).tiles <= most_tiles) return Way::lines;
  if (by_slices && inner > 1) return Way::wide_runs;
  constexpr std::int64_t most_sums = 1 << 21, most_picks = 1 << 24;  // 12 bytes each; and 38 bits of a number
  const bool small_float = is_floating(dtype) && dtype != DType::f64;
  return small_float && numel <= most_sums && picks.count <= most_picks ? Way::fixed : Way::runs;
}

std::size_t AddCall::scratch_bytes() const {
  switch (way()) {
    case Way::apart:
      return 0;
    case Way::lines: {
      const LineParts parts(*this);
      return parts.parts == 1 ? 0
                              : static_cast<std::size_t>(parts.parts * lines.count * picks.columns *
                                                         long_sum_bytes(dtype));
    }
    case Way::fixed:
      return static_cast<std::size_t>(numel) * (sizeof(std::int64_t) + sizeof(unsigned));
    default:
      return Runs(*this).bytes;
  }
}

void launch_add(const AddCall& c) {
  for_numbers(c.dtype, [&]<class T>() {
    switch (c.way()) {
      case AddCall::Way::apart:
        return for_numbers_of(c.picks.count, [&]<class N>() {
          add_apart<T, N><<<blocks_for(c.picks.count), threads_per_block, 0, c.stream>>>(c);
        });
      case AddCall::Way::lines:
        return add_lines<T>(c);
      case AddCall::Way::fixed:
        return launch_add_fixed(c);
      default:
        return add_runs<T>(c);
    }
  });
}

}  // namespace sherd::cuda
