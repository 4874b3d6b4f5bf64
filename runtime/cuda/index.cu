#include "runtime/cuda/index.h"

#include "runtime/cuda/block.cuh"

namespace sherd::cuda {
namespace {

constexpr int per_thread = static_cast<int>(PlacesCall::chunk) / threads_per_block;

/// A thread's bools as bits; those past the end are not set.
__device__ unsigned bits_of(const PlacesCall& c, std::int64_t first) {
  unsigned bits = 0;
  if (first + per_thread <= c.n && reinterpret_cast<std::uintptr_t>(c.mask + first) % per_thread == 0) {
    const Packed<per_thread, bool> pack = load_pack<per_thread>(c.mask + first);
#pragma unroll
    for (int j = 0; j < per_thread; ++j) bits |= static_cast<unsigned>(pack.at[j]) << j;
  } else {
    for (int j = 0; j < per_thread && first + j < c.n; ++j)
      bits |= static_cast<unsigned>(c.mask[first + j]) << j;
  }
  return bits;
}

/// How many the threads before this one have, and in `all` how many the block has.
__device__ int before_thread(int mine, int& all) {
  __shared__ int of_warps[threads_per_block / warp_size];
  const int lane = static_cast<int>(threadIdx.x) % warp_size,
            warp = static_cast<int>(threadIdx.x) / warp_size;
  int through = mine;
  for (int step = 1; step < warp_size; step *= 2) {
    const int before = __shfl_up_sync(whole_warp, through, step);
    if (lane >= step) through += before;
  }
  if (lane == warp_size - 1) of_warps[warp] = through;
  __syncthreads();
  int before = through - mine;
  all = 0;
  for (int w = 0; w < threads_per_block / warp_size; ++w) {
    if (w == warp) before += all;
    all += of_warps[w];
  }
  return before;
}

__global__ void __launch_bounds__(threads_per_block) count_places(const PlacesCall c) {
  const std::int64_t first = blockIdx.x * PlacesCall::chunk + threadIdx.x * per_thread;
  int all = 0;
  before_thread(__popc(bits_of(c, first)), all);
  if (threadIdx.x == 0) c.counts[blockIdx.x] = all;
}

/// Places are listed in shared memory first, from where neighbouring threads write neighbouring ones.
__global__ void __launch_bounds__(threads_per_block) write_places(const PlacesCall c) {
  __shared__ std::uint16_t listed[PlacesCall::chunk];
  const std::int64_t begin = blockIdx.x * PlacesCall::chunk;
  const unsigned first = threadIdx.x * per_thread, bits = bits_of(c, begin + first);
  int all = 0;
  int at = before_thread(__popc(bits), all);
  for (unsigned left = bits; left != 0; left &= left - 1)
    listed[at++] =
        static_cast<std::uint16_t>(first + static_cast<unsigned>(__ffs(static_cast<int>(left))) - 1);
  __syncthreads();
  std::int64_t* to = c.places + (blockIdx.x == 0 ? 0 : c.counts[blockIdx.x - 1]);
  for (int i = static_cast<int>(threadIdx.x); i < all; i += threads_per_block) to[i] = begin + listed[i];
}

template <class Bits>
__global__ void __launch_bounds__(threads_per_block) fill_where(const FillWhereCall c) {
  constexpr int V = wide_count<Bits>;
  const Bits value = *static_cast<const Bits*>(c.value);
  Bits* x = static_cast<Bits*>(c.x);
  const bool wide =
      reinterpret_cast<std::uintptr_t>(x) % 16 == 0 && reinterpret_cast<std::uintptr_t>(c.mask) % V == 0;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x,
                     step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  const std::int64_t whole = wide ? c.n / V * V : 0;
  for (std::int64_t i = thread * V; i < whole; i += step * V) {
    const Packed<V, bool> holds = load_pack<V>(c.mask + i);
    Packed<V, Bits> pack = load_pack<V>(x + i);
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (holds.at[j]) pack.at[j] = value;
    store_pack(x + i, pack);
  }
  for (std::int64_t i = whole + thread; i < c.n; i += step)
    if (c.mask[i]) x[i] = value;
}

}  // namespace

void launch_count_places(const PlacesCall& c) {
  count_places<<<grid_of(c.chunks()), threads_per_block, 0, c.stream>>>(c);
}
void launch_write_places(const PlacesCall& c) {
  write_places<<<grid_of(c.chunks()), threads_per_block, 0, c.stream>>>(c);
}

void launch_fill_where(const FillWhereCall& c) {
  const auto fill = [&]<class Bits>() {
    fill_where<Bits><<<blocks_for(c.n / wide_count<Bits>), threads_per_block, 0, c.stream>>>(c);
  };
  switch (c.bytes) {
    case 1:
      return fill.template operator()<std::uint8_t>();
    case 2:
      return fill.template operator()<std::uint16_t>();
    case 4:
      return fill.template operator()<std::uint32_t>();
    default:
      return fill.template operator()<std::uint64_t>();
  }
}

}  // namespace sherd::cuda
