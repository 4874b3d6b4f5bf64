// Bitonic sort. An element is a key of 64 bits, whose order is that of the result, and its place, which
// decides between equal keys: so the order is total and the network's result is the stable one.
#include "runtime/cuda/block.cuh"
#include "runtime/cuda/sort.h"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

constexpr int chunk = 2048;  // elements that a block sorts in shared memory, two a thread

struct Pairs {
  std::uint64_t* keys;
  std::uint32_t* places;
};

/// Smaller for what comes first: the largest first, and NaN before all.
template <class T>
__device__ std::uint64_t key_of(T x) {
  constexpr std::uint64_t sign = std::uint64_t{1} << 63;
  if constexpr (std::is_same_v<T, bool> || std::is_integral_v<T>) {
    return ~(static_cast<std::uint64_t>(static_cast<std::int64_t>(x)) ^ sign);
  } else {
    const auto wide = static_cast<double>(static_cast<compute_t<T>>(x));
    if (wide != wide) return 0;
    const auto bits = static_cast<std::uint64_t>(__double_as_longlong(wide == 0 ? 0.0 : wide));
    return ~((bits & sign) != 0 ? ~bits : bits | sign);
  }
}

__device__ void exchange(const Pairs& at, std::int64_t a, std::int64_t b, bool up) {
  const std::uint64_t first = at.keys[a], second = at.keys[b];
  const std::uint32_t first_place = at.places[a], second_place = at.places[b];
  const bool after = first > second || (first == second && first_place > second_place);
  if (after != up) return;
  at.keys[a] = second;
  at.keys[b] = first;
  at.places[a] = second_place;
  at.places[b] = first_place;
}

/// The steps of the stages `from` to `to` that stay within a chunk, of which `local` is one, at `base` of its
/// row.
__device__ void sort_chunk(const Pairs& local, std::int64_t base, int size, std::int64_t from,
                           std::int64_t to) {
  for (std::int64_t stage = from; stage <= to; stage *= 2)
    for (int step = static_cast<int>(min(stage / 2, static_cast<std::int64_t>(size / 2))); step > 0;
         step /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += static_cast<int>(blockDim.x)) {
        const int a = i / step * step * 2 + i % step;
        exchange(local, a, a + step, ((base + a) & stage) == 0);
      }
    }
  __syncthreads();
}

/// Makes the keys of a chunk, or takes them, and runs stages in shared memory.
template <class T, bool Begin>
__global__ void __launch_bounds__(chunk / 2)
    sort_chunks(const TopKCall c, Pairs all, std::int64_t padded, std::int64_t from, std::int64_t to) {
  __shared__ std::uint64_t keys[chunk];
  __shared__ std::uint32_t places[chunk];
  const int size = static_cast<int>(min(padded, static_cast<std::int64_t>(chunk)));
  const std::int64_t chunks = c.rows * (padded / size);
  for (std::int64_t n = blockIdx.x; n < chunks; n += gridDim.x) {
    const std::int64_t at = n * size, row = at / padded, base = at % padded;
    for (int i = static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x)) {
      const std::int64_t place = base + i;
      if constexpr (Begin) {
        const bool inside = place < c.columns;
        keys[i] = inside ? key_of(static_cast<const T*>(c.x)[row * c.columns + place]) : ~std::uint64_t{0};
        places[i] = static_cast<std::uint32_t>(place);
      } else {
        keys[i] = all.keys[at + i];
        places[i] = all.places[at + i];
      }
    }
    sort_chunk({keys, places}, base, size, from, to);
    for (int i = static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x)) {
      all.keys[at + i] = keys[i];
      all.places[at + i] = places[i];
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(threads_per_block)
    sort_step(Pairs all, std::int64_t half, std::int64_t padded, std::int64_t stage, std::int64_t step) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < half;
       i += threads) {
    const std::int64_t a = i / step * step * 2 + i % step;
    exchange(all, a, a + step, (a % padded & stage) == 0);
  }
}

template <class T>
__global__ void __launch_bounds__(threads_per_block)
    take_sorted(const TopKCall c, Pairs all, std::int64_t padded) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x;
       i < c.rows * c.k; i += threads) {
    const std::int64_t row = i / c.k, place = all.places[row * padded + i % c.k];
    static_cast<T*>(c.values)[i] = static_cast<const T*>(c.x)[row * c.columns + place];
    c.places[i] = place;
  }
}

}  // namespace

void launch_sort(const SortCall& call) {
  const TopKCall& c = call.rows;
  const std::int64_t padded = call.padded(), all = c.rows * padded, size = padded < chunk ? padded : chunk;
  auto* keys = static_cast<std::uint64_t*>(call.scratch);
  const Pairs pairs{keys, reinterpret_cast<std::uint32_t*>(keys + all)};
  const unsigned blocks = looping_grid_of(all / size);
  for_any(c.dtype, [&]<class T>() {
    sort_chunks<T, true><<<blocks, chunk / 2, 0, c.stream>>>(c, pairs, padded, 2, size);
    for (std::int64_t stage = 2 * size; stage <= padded; stage *= 2) {
      for (std::int64_t step = stage / 2; step >= size; step /= 2)
        sort_step<<<blocks_for(all / 2), threads_per_block, 0, c.stream>>>(pairs, all / 2, padded, stage,
                                                                           step);
      sort_chunks<T, false><<<blocks, chunk / 2, 0, c.stream>>>(c, pairs, padded, stage, stage);
    }
    take_sorted<T><<<blocks_for(c.rows * c.k), threads_per_block, 0, c.stream>>>(c, pairs, padded);
  });
}

}  // namespace sherd::cuda
