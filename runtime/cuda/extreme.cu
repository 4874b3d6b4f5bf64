#include "runtime/cuda/extreme.h"

#include "runtime/cuda/order.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

constexpr std::int64_t piece_length = 4096;

template <class T>
__device__ Candidate<T> candidate(const T* x, std::int64_t offset, std::int64_t place) {
  return {static_cast<typename Candidate<T>::C>(x[offset]), place};
}

template <class T>
__device__ void write(const ExtremeCall& c, const T* x, std::int64_t result, std::int64_t offset,
                      const Candidate<T>& best) {
  if (c.values) static_cast<T*>(c.values)[result] = x[offset + best.place * c.inner];
  if (c.places) c.places[result] = best.place;
}

/// Along contiguous elements: a block a piece.
template <class T>
__global__ void __launch_bounds__(threads_per_block) along_rows(const ExtremeCall c, std::int64_t length) {
  __shared__ alignas(16) unsigned char memory[threads_per_block * sizeof(Candidate<T>)];
  auto* shared = reinterpret_cast<Candidate<T>*>(memory);
  const T* x = static_cast<const T*>(c.x);
  const std::int64_t begin = blockIdx.y * length, end = min(begin + length, c.reduce);
  for (std::int64_t o = blockIdx.x; o < c.outer; o += gridDim.x) {
    Candidate<T> best;
    for (std::int64_t i = begin + threadIdx.x; i < end; i += threads_per_block) {
      const Candidate<T> next = candidate(x, o * c.reduce + i, i);
      if (next.before(best, c.largest)) best = next;
    }
    best = block_first<threads_per_block>(best, c.largest, shared);
    if (threadIdx.x == 0) {
      if (c.partial)
        c.partial[blockIdx.y * c.outer + o] = best.place;
      else
        write(c, x, o, o * c.reduce, best);
    }
    __syncthreads();
  }
}

/// Across rows: a thread a column of a piece.
template <class T>
__global__ void __launch_bounds__(threads_per_block) along_columns(const ExtremeCall c, std::int64_t length) {
  const T* x = static_cast<const T*>(c.x);
  const std::int64_t begin = blockIdx.y * length, end = min(begin + length, c.reduce);
  const std::int64_t results = c.outer * c.inner,
                     step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; r < results;
       r += step) {
    const std::int64_t offset = r / c.inner * c.reduce * c.inner + r % c.inner;
    Candidate<T> best;
    for (std::int64_t i = begin; i < end; ++i) {
      const Candidate<T> next = candidate(x, offset + i * c.inner, i);
      if (next.before(best, c.largest)) best = next;
    }
    if (c.partial)
      c.partial[blockIdx.y * results + r] = best.place;
    else
      write(c, x, r, offset, best);
  }
}

template <class T>
__global__ void __launch_bounds__(threads_per_block) join_pieces(const ExtremeCall c, std::int64_t pieces) {
  const T* x = static_cast<const T*>(c.x);
  const std::int64_t results = c.outer * c.inner,
                     step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; r < results;
       r += step) {
    const std::int64_t offset = r / c.inner * c.reduce * c.inner + r % c.inner;
    Candidate<T> best;
    for (std::int64_t p = 0; p < pieces; ++p) {
      const std::int64_t place = c.partial[p * results + r];
      if (place < 0) continue;  // an empty piece
      const Candidate<T> next = candidate(x, offset + place * c.inner, place);
      if (next.before(best, c.largest)) best = next;
    }
    write(c, x, r, offset, best);
  }
}

}  // namespace

std::int64_t ExtremeCall::pieces() const {
  const std::int64_t wanted = (reduce + piece_length - 1) / piece_length;
  if (outer * inner >= 1 << 16 || wanted <= 1) return 1;
  return wanted < 1024 ? wanted : 1024;
}

void launch_extreme(const ExtremeCall& c) {
  const std::int64_t pieces = c.pieces(), length = (c.reduce + pieces - 1) / pieces;
  for_any(c.dtype, [&]<class T>() {
    const auto down = static_cast<unsigned>(pieces);
    if (c.inner == 1)
      along_rows<T><<<dim3(blocks_for(c.outer * threads_per_block), down), threads_per_block, 0, c.stream>>>(
          c, length);
    else
      along_columns<T>
          <<<dim3(blocks_for(c.outer * c.inner), down), threads_per_block, 0, c.stream>>>(c, length);
    if (pieces > 1)
      join_pieces<T><<<blocks_for(c.outer * c.inner), threads_per_block, 0, c.stream>>>(c, pieces);
  });
}

}  // namespace sherd::cuda
