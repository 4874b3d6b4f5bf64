// The first k of a row, a block each. Every thread finds the first of its own elements; the k-th of those is
// at or behind the k-th of the row, so what is not behind it is a list that holds all k, and is short unless
// few threads have most of it. Words of key and place are all different, so no order of work shows.
#include "runtime/cuda/order.cuh"
#include "runtime/cuda/sort.h"

namespace sherd::cuda {
namespace {

using Word = unsigned long long;

constexpr int threads = 512, longest_list = 1024;
constexpr std::int64_t most_selected = threads / 2, least_columns = 2 * threads, most_columns = 1 << 16;

/// How many of `n` words come before `word`.
__device__ int rank_of(Word word, const Word* words, int n) {
  int rank = 0;
#pragma unroll 8
  for (int i = 0; i < n; ++i) rank += words[i] < word;
  return rank;
}

template <class T>
struct Row {
  const T* x;
  std::int64_t columns;

  __device__ Word word(std::int64_t i) const {
    return Word{key_of<T, std::uint32_t>(x[i])} << 32 | static_cast<Word>(i);
  }
  /// Calls `body` with this thread's words.
  template <class F>
  __device__ void each(const F& body) const {
#pragma unroll 4
    for (std::int64_t i = threadIdx.x; i < columns; i += threads) body(word(i));
  }
};

template <class T>
__global__ void __launch_bounds__(threads) select(const SortCall c) {
  __shared__ Word firsts[threads], list[longest_list], limit;
  __shared__ int listed;
  const int k = static_cast<int>(c.k);
  for (std::int64_t r = blockIdx.x; r < c.rows; r += gridDim.x) {
    const Row<T> row{static_cast<const T*>(c.x) + r * c.columns, c.columns};
    const auto put = [&](int i, Word word) {
      const auto place = static_cast<std::int64_t>(word & 0xffffffffu);
      static_cast<T*>(c.values)[r * c.k + i] = row.x[place];
      c.places[r * c.k + i] = place;
    };
    /// The word that `rank` others of the threads' come before, in every thread.
    const auto of_rank = [&](Word mine, int rank) {
      firsts[threadIdx.x] = mine;
      __syncthreads();
      if (rank_of(mine, firsts, threads) == rank) limit = mine;
      __syncthreads();
      return limit;
    };
    Word first = ~Word{0};
    row.each([&](Word word) { first = min(first, word); });
    if (threadIdx.x == 0) listed = 0;
    const Word last = of_rank(first, k - 1);
    row.each([&](Word word) {
      if (word > last) return;
      const int at = atomicAdd(&listed, 1);
      if (at < longest_list) list[at] = word;
    });
    __syncthreads();
    const int count = listed;
    if (count <= longest_list) {
      for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) {
        const int rank = rank_of(list[i], list, count);
        if (rank < k) put(rank, list[i]);
      }
    } else {
      // One after another: threads keep their first until it is taken.
      for (int i = 0; i < k; ++i) {
        const Word next = of_rank(first, 0);
        if (first != next) continue;
        put(i, next);
        first = ~Word{0};
        row.each([&](Word word) { first = word > next ? min(first, word) : first; });
      }
    }
    __syncthreads();
  }
}

}  // namespace

bool SortCall::selects() const {
  return size_of(dtype) <= 4 && k <= most_selected && columns >= least_columns && columns <= most_columns &&
         (rows >= 64 || columns <= 8 * least_columns);
}

void launch_select(const SortCall& c) {
  for_any(c.dtype, [&]<class T>() {
    if constexpr (sizeof(T) <= 4) select<T><<<looping_grid_of(c.rows), threads, 0, c.stream>>>(c);
  });
}

}  // namespace sherd::cuda
