#include "runtime/cuda/block.cuh"
#include "runtime/cuda/elementwise.cuh"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/slots.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

/// Converts to what `To` is computed in; the store converts to `To` itself.
template <class To>
struct Convert {
  using Copies = void;
  template <class V>
  __device__ compute_t<To> operator()(V x) const {
    if constexpr (std::is_same_v<To, bool>)
      return x != V(0);
    else if constexpr (std::is_integral_v<To> && !std::is_integral_v<V>)
      return math::to_integer<To>(x);
    else
      return static_cast<compute_t<To>>(x);
  }
};

/// To 16 bits from what a float does not hold: the float that rounds on as the number itself does.
struct ConvertOdd {
  using Copies = void;
  template <class V>
  __device__ float operator()(V x) const {
    return sherd::detail::odd_float(x);
  }
};

struct Same {
  using Copies = void;
  template <class V>
  __device__ V operator()(V x) const {
    return x;
  }
};

template <class V>
struct Constant {
  V value;
  __device__ V operator()() const { return value; }
};

bool is_small_float(DType d) { return d == DType::f32 || d == DType::f16 || d == DType::bf16; }

/// Small floats wide; other pairs are rare, and one by one.
template <class From>
void copy_from(const Operands& p) {
  for_any(p.out_dtype, [&]<class To>() {
    using C = compute_t<To>;
    if constexpr (std::is_same_v<To, From>)
      return;  // bits
    else if constexpr (std::is_same_v<C, float> && std::is_same_v<compute_t<From>, float>)
      launch<Convert<C>, To, From>({}, p);
    else if constexpr (sizeof(To) == 2)
      launch_strided<ConvertOdd, To, From>({}, p);
    else
      launch_strided<Convert<C>, To, From>({}, p);
  });
}

/// Whether both operands have rows of whole packs of `V` elements, wherever they lie; `turned`: of the second
/// one from their ends on.
template <int V, class Bits>
bool in_packs(const Operands& p, bool turned) {
  const int last = p.rank - 1;
  if (p.rank < (turned ? 1 : 2) || p.sizes[last] % V != 0) return false;
  for (int k = 0; k < 2; ++k) {
    const bool ends = turned && k == 1;
    const auto first = reinterpret_cast<std::uintptr_t>(p.data[k]) - (ends ? (V - 1) * sizeof(Bits) : 0);
    if (p.strides[k][last] != (ends ? -1 : 1) || first % (V * sizeof(Bits)) != 0) return false;
    for (int d = 0; d < last; ++d)
      if (p.strides[k][d] % V != 0) return false;
  }
  return true;
}

template <int V, class Bits, bool turned>
__global__ void __launch_bounds__(threads_per_block) copy_packs(const __grid_constant__ Operands p) {
  wait_for_earlier();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x;
       i < p.numel / V; i += step) {
    std::int64_t at[2];
    if (p.numel <= 0x7fffffff)
      offsets_of(p, static_cast<std::uint32_t>(i * V), at);  // division in 64 bits is slow
    else
      offsets_of(p, static_cast<std::uint64_t>(i * V), at);
    Packed<V, Bits> pack = load_pack<V>(static_cast<const Bits*>(p.data[1]) + at[1] - (turned ? V - 1 : 0));
    if constexpr (turned)
#pragma unroll
      for (int j = 0; j < V / 2; ++j) {
        const Bits one = pack.at[j];
        pack.at[j] = pack.at[V - 1 - j];
        pack.at[V - 1 - j] = one;
      }
    store_pack(static_cast<Bits*>(p.data[0]) + at[0], pack);
  }
}

/// A matrix that is read by columns and written by rows, once for each element of the other axes.
struct Turned {
  static constexpr int tile = 32, tile_rows = 8;
  std::int64_t rows, columns, row_step, column_step;  ///< of the result's rows, of the operand's columns
  std::int64_t across, down;                          ///< tiles
  Operands others;                                    ///< the operands' other axes
};

/// The axis along which operand 1 lies, if it is not the last one, along which operand 0 does and operand 1
/// has steps, and both are long.
int turned_axis(const Operands& p) {
  const int last = p.rank - 1;
  const bool steps =
      p.rank >= 2 && p.strides[0][last] == 1 && p.strides[1][last] != 1 && p.strides[1][last] != 0;
  if (!steps || p.sizes[last] < Turned::tile / 2) return -1;
  for (int d = 0; d < last; ++d)
    if (p.strides[1][d] == 1 && p.sizes[d] >= Turned::tile / 2) return d;
  return -1;
}

Turned turned(const Operands& p, int axis) {
  const int last = p.rank - 1;
  Turned t{p.sizes[axis], p.sizes[last], p.strides[0][axis], p.strides[1][last], 0, 0, p};
  t.across = blocks_of(t.columns, Turned::tile);
  t.down = blocks_of(t.rows, Turned::tile);
  t.others.rank = 0;
  t.others.numel = 1;
  for (int d = 0; d < last; ++d) {
    if (d == axis) continue;
    for (int k = 0; k < 2; ++k) t.others.strides[k][t.others.rank] = p.strides[k][d];
    t.others.sizes[t.others.rank++] = p.sizes[d];
    t.others.numel *= p.sizes[d];
  }
  return t;
}

template <class Bits>
__global__ void __launch_bounds__(Turned::tile* Turned::tile_rows)
    copy_turned(const __grid_constant__ Turned t) {
  constexpr int tile = Turned::tile;
  __shared__ Bits held[tile][tile + 1];
  wait_for_earlier();
  const std::int64_t tiles = t.across * t.down;
  for (std::int64_t b = blockIdx.x; b < tiles * t.others.numel; b += gridDim.x) {
    std::int64_t at[2];
    offsets_of(t.others, static_cast<std::uint64_t>(b / tiles), at);
    const std::int64_t row = b % tiles / t.across * tile, column = b % t.across * tile;
    const Bits* from = static_cast<const Bits*>(t.others.data[1]) + at[1];
    Bits* to = static_cast<Bits*>(t.others.data[0]) + at[0];
    __syncthreads();  // what was held before has been written
    for (int j = static_cast<int>(threadIdx.y); j < tile; j += Turned::tile_rows)
      if (row + threadIdx.x < t.rows && column + j < t.columns)
        held[j][threadIdx.x] = from[row + threadIdx.x + (column + j) * t.column_step];
    __syncthreads();
    for (int j = static_cast<int>(threadIdx.y); j < tile; j += Turned::tile_rows)
      if (row + j < t.rows && column + threadIdx.x < t.columns)
        to[(row + j) * t.row_step + column + threadIdx.x] = held[threadIdx.x][j];
  }
}

/// Lines of words that are neighbours in both operands, each read from `by` words before its end on and then
/// from its beginning. Warps take parts of them.
struct Lines {
  static constexpr std::int64_t longest_part = 1024;
  Operands lines;  ///< the operands' other axes
  std::int64_t length, by, parts, part;

  Lines(const Operands& of, std::int64_t length, std::int64_t by) : lines(of), length(length), by(by) {
    parts = blocks_of(length, longest_part);
    part = blocks_of(blocks_of(length, parts), warp_size) * warp_size;
  }
};

template <class Bits>
__global__ void __launch_bounds__(threads_per_block) copy_lines(const __grid_constant__ Lines c) {
  constexpr int ahead = 8;
  wait_for_earlier();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * (threads_per_block / warp_size);
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const bool small = c.lines.numel * c.parts <= 0x7fffffff;  // division in 64 bits is slow
  for (std::int64_t w = (static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x) / warp_size;
       w < c.lines.numel * c.parts; w += step) {
    const std::int64_t line = small ? static_cast<std::uint32_t>(w) / static_cast<std::uint32_t>(c.parts)
                                    : w / c.parts,
                       begin = (w - line * c.parts) * c.part, end = min(begin + c.part, c.length);
    std::int64_t at[2];
    if (small)
      offsets_of(c.lines, static_cast<std::uint32_t>(line), at);
    else
      offsets_of(c.lines, static_cast<std::uint64_t>(line), at);
    Bits* to = static_cast<Bits*>(c.lines.data[0]) + at[0];
    const Bits* from = static_cast<const Bits*>(c.lines.data[1]) + at[1];
    for (std::int64_t first = begin + lane; first < end; first += ahead * warp_size) {
      Bits held[ahead];
#pragma unroll
      for (int a = 0; a < ahead; ++a) {
        const std::int64_t i = first + a * warp_size;
        if (i < end) held[a] = from[i < c.by ? i + c.length - c.by : i - c.by];
      }
#pragma unroll
      for (int a = 0; a < ahead; ++a)
        if (first + a * warp_size < end) to[first + a * warp_size] = held[a];
    }
  }
}

template <class Bits>
void launch_lines(const Lines& c) {
  launch_early(copy_lines<Bits>, blocks_for(c.lines.numel * c.parts * warp_size), threads_per_block,
               c.lines.stream, c);
}

/// Whether neighbours along the last axis are so in both operands, and it is worth a warp.
bool in_lines(const Operands& p) {
  const int last = p.rank - 1;
  return p.rank > 0 && p.strides[0][last] == 1 && p.strides[1][last] == 1 && p.sizes[last] >= 4 * warp_size;
}
Lines lines_of(const Operands& p) {
  Operands others = p;
  others.numel /= p.sizes[--others.rank];
  return {others, p.sizes[others.rank], 0};
}

/// Equal dtypes are copied as plain bits of their size.
template <class Bits>
void copy_bits(const Operands& p) {
  constexpr int V = 16 / static_cast<int>(sizeof(Bits));
  if (!p.dense && in_packs<V, Bits>(p, false))
    return launch_early(copy_packs<V, Bits, false>, blocks_for(p.numel / V), threads_per_block, p.stream, p);
  if (!p.dense && in_packs<V, Bits>(p, true))
    return launch_early(copy_packs<V, Bits, true>, blocks_for(p.numel / V), threads_per_block, p.stream, p);
  if (const int axis = turned_axis(p); !p.dense && axis >= 0) {
    const Turned t = turned(p, axis);
    return launch_early(copy_turned<Bits>, looping_grid_of(t.across * t.down * t.others.numel),
                        dim3(Turned::tile, Turned::tile_rows), p.stream, t);
  }
  if (!p.dense && in_lines(p)) return launch_lines<Bits>(lines_of(p));
  launch<Same, Bits, Bits>({}, p);
}

template <class Bits>
void fill_bits(const Operands& p, std::uint64_t bits) {
  launch<Constant<Bits>, Bits>({static_cast<Bits>(bits)}, p);
}

template <class T, class Wide>
__global__ void arange_kernel(Wide start, Wide step, T* out, std::int64_t n) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < n;
       i += stride)
    out[i] = static_cast<T>(start + static_cast<Wide>(i) * step);
}

template <class T>
void arange(Number start, Number step, void* out, std::int64_t n, cudaStream_t stream) {
  using Wide = std::conditional_t<std::is_integral_v<T>, std::int64_t, double>;  // exact beyond 2^53
  arange_kernel<<<blocks_for(n), threads_per_block, 0, stream>>>(start.as<Wide>(), step.as<Wide>(),
                                                                 static_cast<T*>(out), n);
}

/// A block's chunk of one copy, 16 bytes of the wider type at a time where both are aligned to that.
template <class To, class From>
__device__ void copy_chunk(const Chunk& chunk, const CopySlot& s) {
  To* const to = static_cast<To*>(s.to);
  const From* const from = static_cast<const From*>(s.from);
  constexpr int width = 16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
  const auto bits = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  chunk.for_each<width>(bits % 16 == 0, [&]<int V>(std::int64_t i) {
    const Packed<V, From> pack = load_pack<V>(from + i);
    Packed<V, To> result;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if constexpr (std::is_same_v<To, From>)
        result.at[j] = pack.at[j];
      else
        result.at[j] = narrow<To>(widen(pack.at[j]));
    }
    store_pack(to + i, result);
  });
}

/// The same bits, of an element's size (`size_of` reads a table of the host's).
__device__ void copy_chunk_of_bits(const Chunk& chunk, const CopySlot& s) {
  switch (s.to_dtype) {
    case DType::u8:
    case DType::boolean:
      return copy_chunk<std::uint8_t, std::uint8_t>(chunk, s);
    case DType::f16:
    case DType::bf16:
      return copy_chunk<std::uint16_t, std::uint16_t>(chunk, s);
    case DType::f32:
    case DType::i32:
      return copy_chunk<std::uint32_t, std::uint32_t>(chunk, s);
    case DType::f64:
    case DType::i64:
      return copy_chunk<std::uint64_t, std::uint64_t>(chunk, s);
  }
}

template <class From>
__device__ void copy_chunk_from(const Chunk& chunk, const CopySlot& s) {
  switch (s.to_dtype) {
    case DType::bf16:
      return copy_chunk<BFloat16, From>(chunk, s);
    case DType::f16:
      return copy_chunk<Half, From>(chunk, s);
    default:
      return copy_chunk<float, From>(chunk, s);
  }
}

__global__ void __launch_bounds__(threads_per_block) copies(const __grid_constant__ CopySlots slots) {
  wait_for_earlier();
  const Chunk chunk(slots);
  const CopySlot& s = slots.slot[chunk.slot];
  if (s.to_dtype == s.from_dtype) return copy_chunk_of_bits(chunk, s);
  switch (s.from_dtype) {
    case DType::bf16:
      return copy_chunk_from<BFloat16>(chunk, s);
    case DType::f16:
      return copy_chunk_from<Half>(chunk, s);
    default:
      return copy_chunk_from<float>(chunk, s);
  }
}

/// `blockIdx.y` is the part.
template <class Bits>
__global__ void __launch_bounds__(threads_per_block) join(const __grid_constant__ JoinCall c) {
  wait_for_earlier();
  const JoinCall::Part& part = c.part[blockIdx.y];
  const auto length = static_cast<std::uint32_t>(part.length),
             count = static_cast<std::uint32_t>(c.rows) * length, step = gridDim.x * threads_per_block;
  const Bits* x = static_cast<const Bits*>(part.x);
  Bits* y = static_cast<Bits*>(c.y) + part.first;
  for (std::uint32_t i = blockIdx.x * threads_per_block + threadIdx.x; i < count; i += step) {
    const std::uint32_t row = i / length, column = i - row * length;
    y[row * c.columns + column] = x[row * part.pitch + column];
  }
}

}  // namespace

bool takes_copy(DType to, DType from) { return to == from || (is_small_float(to) && is_small_float(from)); }

void launch_copy_each(const CopySlots& slots, cudaStream_t stream) {
  if (slots.blocks() > 0) launch_early(copies, slots.blocks(), threads_per_block, stream, slots);
}

void launch_join(const JoinCall& c) {
  std::int64_t longest = 1;
  for (int i = 0; i < c.count; ++i) longest = c.part[i].length > longest ? c.part[i].length : longest;
  const dim3 grid(blocks_for(blocks_of(c.rows * longest, 4)), static_cast<unsigned>(c.count));
  const auto join_bits = [&]<class Bits>() {
    launch_early(join<Bits>, grid, threads_per_block, c.stream, c);
  };
  switch (c.bytes) {
    case 1:
      return join_bits.template operator()<std::uint8_t>();
    case 2:
      return join_bits.template operator()<std::uint16_t>();
    case 4:
      return join_bits.template operator()<std::uint32_t>();
    default:
      return join_bits.template operator()<std::uint64_t>();
  }
}

void launch_copy(const Operands& p) {
  if (p.dtype == p.out_dtype) {
    switch (size_of(p.dtype)) {
      case 1:
        return copy_bits<std::uint8_t>(p);
      case 2:
        return copy_bits<std::uint16_t>(p);
      case 4:
        return copy_bits<std::uint32_t>(p);
      default:
        return copy_bits<std::uint64_t>(p);
    }
  }
  for_any(p.dtype, [&]<class From>() { copy_from<From>(p); });
}

void launch_roll(const RollCall& c) {
  Operands p;
  p.stream = c.stream;
  p.rank = 1;
  p.numel = p.sizes[0] = c.lines;
  p.strides[0][0] = p.strides[1][0] = c.length;
  p.data[0] = c.y;
  p.data[1] = const_cast<void*>(c.x);
  const Lines lines(p, c.length, c.by);
  switch (c.bytes) {
    case 1:
      return launch_lines<std::uint8_t>(lines);
    case 2:
      return launch_lines<std::uint16_t>(lines);
    case 4:
      return launch_lines<std::uint32_t>(lines);
    case 8:
      return launch_lines<std::uint64_t>(lines);
    default:
      return launch_lines<uint4>(lines);
  }
}

void launch_fill(const Operands& p, std::uint64_t bits) {
  switch (size_of(p.dtype)) {
    case 1:
      return fill_bits<std::uint8_t>(p, bits);
    case 2:
      return fill_bits<std::uint16_t>(p, bits);
    case 4:
      return fill_bits<std::uint32_t>(p, bits);
    default:
      return fill_bits<std::uint64_t>(p, bits);
  }
}

void launch_arange(DType dtype, Number start, Number step, void* out, std::int64_t n, cudaStream_t stream) {
  for_any(dtype, [&]<class T>() { arange<T>(start, step, out, n, stream); });
}

}  // namespace sherd::cuda
