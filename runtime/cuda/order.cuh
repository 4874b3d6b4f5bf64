// The order of elements by value, NaN first of all, then by place.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/element.h"

namespace sherd::cuda {

/// An element and where it lies; no place is a candidate that loses to every other.
template <class T>
struct Candidate {
  using C = std::conditional_t<std::is_same_v<T, bool>, int, compute_t<T>>;
  C value = 0;
  std::int64_t place = -1;

  __device__ bool before(const Candidate& other, bool largest) const {
    if (place < 0 || other.place < 0) return place >= 0;
    if constexpr (std::is_floating_point_v<C>) {
      const bool nan = value != value, other_nan = other.value != other.value;
      if (nan || other_nan) return nan && (!other_nan || place < other.place);
    }
    if (value == other.value) return place < other.place;
    return largest ? value > other.value : value < other.value;
  }
};

/// The first candidate of a block of `Threads`, in thread 0.
template <int Threads, class T>
__device__ Candidate<T> block_first(Candidate<T> mine, bool largest, Candidate<T>* shared) {
  shared[threadIdx.x] = mine;
  for (unsigned half = Threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half && shared[threadIdx.x + half].before(shared[threadIdx.x], largest))
      shared[threadIdx.x] = shared[threadIdx.x + half];
  }
  return shared[0];
}

}  // namespace sherd::cuda
