#include "runtime/cuda/topk.h"

#include "runtime/cuda/order.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

/// A block a row: k times the first of what comes after the one before.
template <class T>
__global__ void __launch_bounds__(threads_per_block) topk(const SortCall c) {
  __shared__ alignas(16) unsigned char memory[threads_per_block * sizeof(Candidate<T>)];
  auto* shared = reinterpret_cast<Candidate<T>*>(memory);
  for (std::int64_t row = blockIdx.x; row < c.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(c.x) + row * c.columns;
    T* values = static_cast<T*>(c.values) + row * c.k;
    std::int64_t* places = c.places + row * c.k;
    Candidate<T> last;
    for (std::int64_t j = 0; j < c.k; ++j) {
      Candidate<T> best;
      for (std::int64_t i = threadIdx.x; i < c.columns; i += threads_per_block) {
        const Candidate<T> next{static_cast<typename Candidate<T>::C>(x[i]), i};
        if (j > 0 && !last.before(next, true)) continue;
        if (next.before(best, true)) best = next;
      }
      block_first<threads_per_block>(best, true, shared);
      __syncthreads();
      last = shared[0];
      __syncthreads();
      if (threadIdx.x == 0) {
        values[j] = x[last.place];
        places[j] = last.place;
      }
    }
  }
}

}  // namespace

void launch_topk(const SortCall& c) {
  for_any(c.dtype,
          [&]<class T>() { topk<T><<<looping_grid_of(c.rows), threads_per_block, 0, c.stream>>>(c); });
}

}  // namespace sherd::cuda
