#include "runtime/cuda/picking.cuh"

#include "runtime/cuda/block.cuh"

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
      if (!valid) c.faults(c.fault, at, p.index, c.picks.columns);
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
        if (!c.last) c.faults(c.fault, at, p.index, c.picks.columns);
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

template <class N>
__global__ void __launch_bounds__(threads_per_block) find_last(const FindLastCall c) {
  const N count = static_cast<N>(c.picks.count), step = static_cast<N>(gridDim.x) * threads_per_block;
  for (N i = static_cast<N>(blockIdx.x) * threads_per_block + threadIdx.x; i < count; i += step) {
    const PickPlace p = place_of(c.picks, i);
    const std::int64_t at = c.index[p.index];
    if (at >= 0 && at < c.picks.columns)
      atomicMax(c.last + p.x + at * c.picks.x_axis, static_cast<int>(i));
    else
      c.faults(c.fault, at, p.index, c.picks.columns);
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

}  // namespace

void launch_take(const TakeCall& c) {
  const unsigned blocks = blocks_for(blocks_of(c.picks.count, at_once));
  for_bytes(c.bytes, [&]<class Bits>() {
    for_numbers_of(c.picks.count,
                   [&]<class N>() { take<Bits, N><<<blocks, threads_per_block, 0, c.stream>>>(c); });
  });
}

void launch_replace(const ReplaceCall& c) {
  const unsigned blocks = blocks_for(blocks_of(c.picks.count, at_once));
  for_bytes(c.bytes, [&]<class Bits>() {
    for_numbers_of(c.picks.count,
                   [&]<class N>() { replace<Bits, N><<<blocks, threads_per_block, 0, c.stream>>>(c); });
  });
}

void launch_find_last(const FindLastCall& c) {
  for_numbers_of(c.picks.count, [&]<class N>() {
    find_last<N><<<blocks_for(c.picks.count), threads_per_block, 0, c.stream>>>(c);
  });
}

}  // namespace sherd::cuda
