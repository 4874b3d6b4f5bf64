// The order of elements by value, NaN first of all, then by place.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cuda/types.cuh"
#include "runtime/element.h"

namespace sherd::cuda {

/// An unsigned number, smaller for what comes first: the largest first, and NaN before all.
template <class T, class Key>
__device__ Key key_of(T x) {
  constexpr int bits = static_cast<int>(sizeof(T)) * 8;
  if constexpr (std::is_same_v<T, bool>) {
    return x ? 0 : 1;
  } else if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    constexpr U sign = std::is_signed_v<T> ? U(1) << (bits - 1) : U(0);
    return static_cast<Key>(static_cast<U>(~(static_cast<U>(x) ^ sign)));
  } else {
    using U = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                 std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
    constexpr U sign = U(1) << (bits - 1);
    const auto value = widen(x);
    if (value != value) return 0;
    U pattern;
    if constexpr (sizeof(T) == 2)
      pattern = x.bits;
    else if constexpr (sizeof(T) == 4)
      pattern = __float_as_uint(x);
    else
      pattern = static_cast<U>(__double_as_longlong(x));
    if (value == 0) pattern = 0;  // of both signs
    return static_cast<Key>(static_cast<U>(~((pattern & sign) != 0 ? ~pattern : pattern | sign)));
  }
}

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
