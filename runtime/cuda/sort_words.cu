// Rows of 16-bit floats that fit a block: an element's key and its place are one word, so keys alone are
// sorted. Words begin in order of places, and are sorted by keys stably.
#include <cub/block/block_radix_sort.cuh>

#include "runtime/cuda/order.cuh"
#include "runtime/cuda/sort.h"

namespace sherd::cuda {
namespace {

constexpr int place_bits = 16;
constexpr std::int64_t shortest_row = 513, longest_row = 1 << 14;

template <class T, int Threads, int Items>
__global__ void __launch_bounds__(Threads) sort_words(const SortCall c) {
  using Sort = cub::BlockRadixSort<std::uint32_t, Threads, Items>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& storage = *reinterpret_cast<typename Sort::TempStorage*>(memory);
  for (std::int64_t row = blockIdx.x; row < c.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(c.x) + row * c.columns;
    std::uint32_t words[Items];
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      const std::uint32_t place = threadIdx.x * Items + j;
      words[j] = place < c.columns ? std::uint32_t{key_of<T, std::uint16_t>(x[place])} << place_bits | place
                                   : ~std::uint32_t{0};
    }
    __syncthreads();  // the row before has been sorted
    Sort(storage).SortBlockedToStriped(words, place_bits);
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      const std::int64_t i = j * Threads + static_cast<std::int64_t>(threadIdx.x);
      if (i >= c.k) continue;
      const std::uint32_t place = words[j] & ((1u << place_bits) - 1);
      static_cast<T*>(c.values)[row * c.k + i] = x[place];
      c.places[row * c.k + i] = place;
    }
  }
}

template <class T, int Threads, int Items>
void launch_rows(const SortCall& c) {
  constexpr auto kernel = sort_words<T, Threads, Items>;
  constexpr int bytes = sizeof(typename cub::BlockRadixSort<std::uint32_t, Threads, Items>::TempStorage);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  kernel<<<looping_grid_of(c.rows), Threads, bytes, c.stream>>>(c);
}

}  // namespace

bool SortCall::in_words() const {
  const bool fits = columns >= shortest_row && columns <= longest_row;
  return (dtype == DType::f16 || dtype == DType::bf16) && fits && !selects();
}

void launch_sort_words(const SortCall& c) {
  const auto launch = [&]<class T>() {
    c.columns <= 4096 ? launch_rows<T, 512, 8>(c) : launch_rows<T, 1024, 16>(c);
  };
  c.dtype == DType::f16 ? launch.template operator()<Half>() : launch.template operator()<BFloat16>();
}

}  // namespace sherd::cuda
