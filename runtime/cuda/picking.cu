#include "runtime/cuda/picking.cuh"

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/launch.cuh"

namespace sherd::cuda {
namespace {

constexpr int at_once = 4;  // picks of a thread on their way at a time

/// Calls `body(i, k)` for the picks of a thread that are on their way together: `k` is the number among them.
template <class N, class F>
__device__ void for_some(N first, N count, const F& body) {
#pragma unroll
  for (int k = 0; k < at_once; ++k) {
    const N i = first + static_cast<N>(k * threads_per_block);
    if (i < count) body(i, k);
  }
}

template <class Bits, class N>
__global__ void __launch_bounds__(threads_per_block) take(const TakeCall c) {
  const N count = static_cast<N>(c.picks.count),
          step = static_cast<N>(gridDim.x) * (at_once * threads_per_block);
  const Bits* x = static_cast<const Bits*>(c.x);
  Bits* y = static_cast<Bits*>(c.y);
  for (N first = static_cast<N>(blockIdx.x) * (at_once * threads_per_block) + threadIdx.x; first < count;
       first += step) {
    std::int64_t from[at_once];
    Bits value[at_once];
    for_some(first, count, [&](N i, int k) {
      const PickPlace p = place_of(c.picks, i);
      const std::int64_t at = c.index[p.index];
      const bool valid = at >= 0 && at < c.picks.columns;
      if (!valid) c.faults(c.name, at, p.index, c.picks.columns);
      from[k] = valid ? p.x + at * c.picks.x_axis : -1;
    });
    for_some(first, count, [&](N, int k) {
      if (from[k] >= 0)
        value[k] = x[from[k]];
      else
        memset(&value[k], 0xff, sizeof(Bits));
    });
    for_some(first, count, [&](N i, int k) { y[i] = value[k]; });
  }
}

template <class Bits, class N>
__global__ void __launch_bounds__(threads_per_block) replace(const ReplaceCall c) {
  const N count = static_cast<N>(c.picks.count),
          step = static_cast<N>(gridDim.x) * (at_once * threads_per_block);
  const Bits* values = static_cast<const Bits*>(c.values);
  Bits* y = static_cast<Bits*>(c.y);
  for (N first = static_cast<N>(blockIdx.x) * (at_once * threads_per_block) + threadIdx.x; first < count;
       first += step) {
    std::int64_t to[at_once];
    for_some(first, count, [&](N i, int k) {
      const PickPlace p = place_of(c.picks, i);
      const std::int64_t at = c.index[p.index];
      to[k] = -1;
      if (at < 0 || at >= c.picks.columns) {
        if (!c.last) c.faults(c.name, at, p.index, c.picks.columns);
        return;
      }
      const std::int64_t place = p.x + at * c.picks.x_axis;
      const bool mine = !c.last || (c.slices ? c.last[at] == static_cast<int>(p.index)
                                             : c.last[place] == static_cast<int>(i));
      if (mine) to[k] = place;
    });
    for_some(first, count, [&](N i, int k) {
      if (to[k] >= 0) y[to[k]] = values[c.one_value ? 0 : i];
    });
  }
}

/// Finds the last pick of each column of a line, whose positions begin at `first`, in shared memory, a block
/// a line. Reports positions outside.
__device__ void find_last_of_line(int* last, const PositionsCall& c, std::int64_t first, int picks,
                                  int columns) {
  for (int k = static_cast<int>(threadIdx.x); k < columns; k += threads_per_block) last[k] = -1;
  __syncthreads();
#pragma unroll 4
  for (int j = static_cast<int>(threadIdx.x); j < picks; j += threads_per_block) {
    const std::int64_t at = c.index[first + j];
    if (at >= 0 && at < columns)
      atomicMax(last + at, j);
    else
      c.faults(c.name, at, first + j, columns);
  }
  __syncthreads();
}

template <class Bits>
__global__ void __launch_bounds__(threads_per_block) replace_lines(const ReplaceCall c) {
  extern __shared__ int last[];
  const int columns = static_cast<int>(c.picks.columns), picks = static_cast<int>(c.line_picks);
  for (std::int64_t line = blockIdx.x; line < c.lines.count; line += gridDim.x) {
    const PickPlace p = place_of(c.lines, static_cast<std::uint64_t>(line));
    find_last_of_line(last, c, p.index, picks, columns);
    const Bits* values = static_cast<const Bits*>(c.values) + p.value;
    Bits* y = static_cast<Bits*>(c.y) + p.x;
#pragma unroll 4
    for (int k = static_cast<int>(threadIdx.x); k < columns; k += threads_per_block)
      if (last[k] >= 0) y[k * c.picks.x_axis] = values[last[k]];
    __syncthreads();
  }
}

/// The slot of a column, which has one or gets it.
__device__ int slot_of(int* columns, int column, bool one_each, int bits) {
  if (one_each) return column;
  for (unsigned slot = static_cast<unsigned>(column) * 2654435769u >> (32 - bits);; ++slot) {
    slot &= (1u << bits) - 1;
    const int found = atomicCAS(columns + slot, -1, column);
    if (found == -1 || found == column) return static_cast<int>(slot);
  }
}

/// Every block finds what is last among all positions, which is done sooner than one more launch.
template <class Bits>
__global__ void __launch_bounds__(threads_per_block) replace_few(const ReplaceCall c) {
  __shared__ int memory[FewPositions::most_words];
  const int slots = 1 << c.few.slot_bits, thread = static_cast<int>(threadIdx.x);
  const bool one_each = slots >= c.picks.columns;
  int *columns = memory, *last = columns + slots, *to = last + slots;
  for (int k = thread; k < slots; k += threads_per_block) columns[k] = last[k] = -1;
  wait_for_earlier();
  __syncthreads();
  for (int j = thread; j < c.few.count; j += threads_per_block) {
    const std::int64_t at = c.index[j];
    const bool valid = at >= 0 && at < c.picks.columns;
    to[j] = valid ? static_cast<int>(at) : -1;
    if (valid)
      atomicMax(last + slot_of(columns, to[j], one_each, c.few.slot_bits), j);
    else if (blockIdx.x == 0)
      c.faults(c.name, at, j, c.picks.columns);
  }
  __syncthreads();
  for (int j = thread; j < c.few.count; j += threads_per_block)
    if (to[j] >= 0 && last[slot_of(columns, to[j], one_each, c.few.slot_bits)] != j) to[j] = -1;
  __syncthreads();
  const Bits* values = static_cast<const Bits*>(c.values);
  Bits* y = static_cast<Bits*>(c.y);
  const std::uint32_t count = static_cast<std::uint32_t>(c.picks.count);
  for (std::uint32_t i = blockIdx.x * threads_per_block + threadIdx.x; i < count;
       i += gridDim.x * threads_per_block) {
    const PickPlace p = place_of(c.picks, i);
    if (const int at = to[p.index]; at >= 0) y[p.x + at * c.picks.x_axis] = values[i];
  }
}

template <class Bits>
__global__ void __launch_bounds__(threads_per_block) take_last_of_lines(const TakeLastCall c) {
  extern __shared__ int last[];
  const int columns = static_cast<int>(c.call.picks.columns), picks = static_cast<int>(c.line_picks);
  for (std::int64_t line = blockIdx.x; line < c.lines.count; line += gridDim.x) {
    const PickPlace p = place_of(c.lines, static_cast<std::uint64_t>(line));
    find_last_of_line(last, c.call, p.index, picks, columns);
    const Bits* x = static_cast<const Bits*>(c.call.x) + p.x;
    Bits* y = static_cast<Bits*>(c.call.y) + p.value;
#pragma unroll 4
    for (int j = static_cast<int>(threadIdx.x); j < picks; j += threads_per_block) {
      const std::int64_t at = c.call.index[p.index + j];
      const bool mine = at >= 0 && at < columns && last[at] == j;
      y[j] = mine ? x[at * c.call.picks.x_axis] : Bits{};
    }
    __syncthreads();
  }
}

template <class Bits, class N>
__global__ void __launch_bounds__(threads_per_block) take_last(const TakeLastCall c) {
  const PickWalk& picks = c.call.picks;
  const N count = static_cast<N>(picks.count), step = static_cast<N>(gridDim.x) * threads_per_block;
  for (N i = static_cast<N>(blockIdx.x) * threads_per_block + threadIdx.x; i < count; i += step) {
    const PickPlace p = place_of(picks, i);
    const std::int64_t at = c.call.index[p.index], place = p.x + at * picks.x_axis;
    const bool mine =
        at >= 0 && at < picks.columns &&
        (c.slices ? c.last[at] == static_cast<int>(p.index) : c.last[place] == static_cast<int>(i));
    static_cast<Bits*>(c.call.y)[i] = mine ? static_cast<const Bits*>(c.call.x)[place] : Bits{};
  }
}

template <class Bits>
__global__ void __launch_bounds__(threads_per_block) split_last(const SplitLastCall c) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * (at_once * threads_per_block);
  const Bits* gy = static_cast<const Bits*>(c.gy);
  wait_for_earlier();
  for (std::int64_t first =
           static_cast<std::int64_t>(blockIdx.x) * (at_once * threads_per_block) + threadIdx.x;
       first < c.numel; first += step) {
    int pick[at_once];
    Bits g[at_once];
    for_some(first, c.numel, [&](std::int64_t i, int k) {
      pick[k] = c.last[i];
      g[k] = gy[i];
    });
    for_some(first, c.numel, [&](std::int64_t i, int k) {
      if (pick[k] >= 0) static_cast<Bits*>(c.gvalues)[pick[k]] = g[k];
      static_cast<Bits*>(c.gx)[i] = pick[k] >= 0 ? Bits{} : g[k];
    });
  }
}

/// The number of a pick, from 1 on, above its value.
template <class Bits, class N>
__global__ void __launch_bounds__(threads_per_block) pack_last(const ReplacePackedCall c) {
  const N count = static_cast<N>(c.call.picks.count), step = static_cast<N>(gridDim.x) * threads_per_block;
  wait_for_earlier();
  for (N i = static_cast<N>(blockIdx.x) * threads_per_block + threadIdx.x; i < count; i += step) {
    const PickPlace p = place_of(c.call.picks, i);
    const std::int64_t at = c.call.index[p.index];
    if (at >= 0 && at < c.call.picks.columns)
      atomicMax(c.packed + p.x + at * c.call.picks.x_axis,
                (static_cast<unsigned long long>(i) + 1) << 32 | static_cast<const Bits*>(c.call.values)[i]);
    else
      c.call.faults(c.call.name, at, p.index, c.call.picks.columns);
  }
}

template <class Bits>
__global__ void __launch_bounds__(threads_per_block) unpack_last(const ReplacePackedCall c) {
  wait_for_earlier();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < c.numel;
       i += step) {
    const unsigned long long found = c.packed[i];
    if (found != 0)
      static_cast<Bits*>(c.call.y)[i] = static_cast<Bits>(found);
    else if (c.base != c.call.y)
      static_cast<Bits*>(c.call.y)[i] = c.base != nullptr ? static_cast<const Bits*>(c.base)[i] : Bits{};
  }
}

template <class N>
__global__ void __launch_bounds__(threads_per_block) find_last(const FindLastCall c) {
  const N count = static_cast<N>(c.picks.count), step = static_cast<N>(gridDim.x) * threads_per_block;
  for (N i = static_cast<N>(blockIdx.x) * threads_per_block + threadIdx.x; i < count; i += step) {
    const PickPlace p = place_of(c.picks, i);
    const std::int64_t at = c.index[p.index];
    if (at >= 0 && at < c.picks.columns)
      atomicMax(c.last + p.x + at * c.picks.x_axis, static_cast<int>(i));
    else
      c.faults(c.name, at, p.index, c.picks.columns);
  }
}

__global__ void __launch_bounds__(threads_per_block) element_numbers(const NumbersCall c) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  wait_for_earlier();
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < c.count;
       i += step) {
    std::int64_t number = 0;
    bool valid = true;
    for (int k = 0; k < c.axes; ++k) {
      const std::int64_t at = c.at[k][i], size = c.size[k];
      if (at < -size || at >= size) {
        c.faults(c.name, at, i, size);
        valid = false;
      }
      number = number * size + at + (at < 0 ? size : 0);
    }
    c.numbers[i] = valid ? number : -1;
  }
}

template <class F>
void for_bytes(std::int64_t bytes, const F& f) {
  switch (bytes) {
    case 1:
      return f.template operator()<std::uint8_t>();
    case 2:
      return f.template operator()<std::uint16_t>();
    case 4:
      return f.template operator()<std::uint32_t>();
    case 8:
      return f.template operator()<std::uint64_t>();
    default:
      return f.template operator()<uint4>();
  }
}

/// A kernel with a number for each column of a line in shared memory.
template <class C, class Picks>
void launch_lines(void (*kernel)(C), const C& call, const PickWalk& lines, const Picks& c) {
  // The process's bound, so the same in all calls: this call's would refuse another thread's launch.
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(most_line_columns * sizeof(int)));
  kernel<<<looping_grid_of(lines.count), threads_per_block,
           static_cast<std::size_t>(c.picks.columns) * sizeof(int), c.stream>>>(call);
}

}  // namespace

void launch_take(const TakeCall& c) {
  const unsigned blocks = blocks_for(blocks_of(c.picks.count, at_once));
  for_bytes(c.bytes, [&]<class Bits>() {
    for_numbers_of(c.picks.count,
                   [&]<class N>() { take<Bits, N><<<blocks, threads_per_block, 0, c.stream>>>(c); });
  });
}

void launch_take_last(const TakeLastCall& c) {
  for_bytes(c.call.bytes, [&]<class Bits>() {
    if (c.last == nullptr) return launch_lines(take_last_of_lines<Bits>, c, c.lines, c.call);
    for_numbers_of(c.call.picks.count, [&]<class N>() {
      take_last<Bits, N><<<blocks_for(c.call.picks.count), threads_per_block, 0, c.call.stream>>>(c);
    });
  });
}

void launch_split_last(const SplitLastCall& c) {
  for_bytes(c.bytes, [&]<class Bits>() {
    launch_early(split_last<Bits>, blocks_for(blocks_of(c.numel, at_once)), threads_per_block, c.stream, c);
  });
}

void launch_replace(const ReplaceCall& c) {
  if (c.few.count > 0)
    return for_bytes(c.bytes, [&]<class Bits>() {
      launch_early(replace_few<Bits>, blocks_for(blocks_of(c.picks.count, at_once)), threads_per_block,
                   c.stream, c);
    });
  if (c.line_picks > 0)
    return for_bytes(c.bytes, [&]<class Bits>() { launch_lines(replace_lines<Bits>, c, c.lines, c); });
  const unsigned blocks = blocks_for(blocks_of(c.picks.count, at_once));
  for_bytes(c.bytes, [&]<class Bits>() {
    for_numbers_of(c.picks.count,
                   [&]<class N>() { replace<Bits, N><<<blocks, threads_per_block, 0, c.stream>>>(c); });
  });
}

void launch_replace_packed(const ReplacePackedCall& c) {
  const auto put = [&]<class Bits>() {
    for_numbers_of(c.call.picks.count, [&]<class N>() {
      launch_early(pack_last<Bits, N>, blocks_for(c.call.picks.count), threads_per_block, c.call.stream, c);
    });
    launch_early(unpack_last<Bits>, blocks_for(c.numel), threads_per_block, c.call.stream, c);
  };
  switch (c.call.bytes) {
    case 1:
      return put.operator()<std::uint8_t>();
    case 2:
      return put.operator()<std::uint16_t>();
    default:
      return put.operator()<std::uint32_t>();
  }
}

void launch_numbers(const NumbersCall& c) {
  launch_early(element_numbers, blocks_for(c.count), threads_per_block, c.stream, c);
}

void launch_find_last(const FindLastCall& c) {
  for_numbers_of(c.picks.count, [&]<class N>() {
    find_last<N><<<blocks_for(c.picks.count), threads_per_block, 0, c.stream>>>(c);
  });
}

}  // namespace sherd::cuda
