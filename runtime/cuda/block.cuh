// What kernels that work on rows share: wide loads, exponentials, and reductions whose tree depends on the
// number of threads alone, so a run repeats to the bit.
#pragma once

#include <cstdint>
#include <limits>

#include "runtime/cuda/packed.cuh"
#include "runtime/cuda/types.cuh"
#include "runtime/element.h"
#include "runtime/math.h"

namespace sherd::cuda {

inline constexpr unsigned whole_warp = 0xffffffffu;
inline constexpr int warp_size = 32;

/// Neighbouring elements as words of memory, for kernels that are bound by instructions: elements of 8 and 16
/// bits taken apart one by one cost more of them than the arithmetic does, and a register each.
template <int V, class T>
struct alignas(sizeof(T) * V) Raw {
  static constexpr bool pairs = V % 2 == 0 && sizeof(T) == 2, fours = V % 4 == 0 && sizeof(T) == 1;
  using Word = std::conditional_t<pairs || fours, std::uint32_t, T>;
  Word at[pairs ? V / 2 : fours ? V / 4 : V];

  __device__ static Raw load(const T* from) { return *reinterpret_cast<const Raw*>(from); }
  __device__ void store(T* to) const { *reinterpret_cast<Raw*>(to) = *this; }
  template <class C>
  __device__ void widen_to(C (&wide)[V]) const {
    if constexpr (pairs && std::is_same_v<T, BFloat16>) {
#pragma unroll
      for (int j = 0; j < V; j += 2) {
        wide[j] = __uint_as_float(at[j / 2] << 16);
        wide[j + 1] = __uint_as_float(at[j / 2] & 0xffff0000u);
      }
    } else if constexpr (pairs) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        wide[j] = widen(T::from_bits(static_cast<std::uint16_t>(at[j / 2] >> (j % 2 * 16))));
    } else if constexpr (fours) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        wide[j] = widen(static_cast<T>(static_cast<std::uint8_t>(at[j / 4] >> (j % 4 * 8))));
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) wide[j] = widen(at[j]);
    }
  }
  /// Values rounded as `narrow` rounds one; two 16-bit floats in one instruction.
  template <class C>
  __device__ static Raw of(const C (&wide)[V]) {
    static_assert(!fours, "nobody stores single bytes");
    Raw made;
    if constexpr (pairs) {
#pragma unroll
      for (int j = 0; j < V; j += 2)
        if constexpr (std::is_same_v<T, BFloat16>)
          asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(made.at[j / 2]) : "f"(wide[j + 1]), "f"(wide[j]));
        else
          asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(made.at[j / 2]) : "f"(wide[j + 1]), "f"(wide[j]));
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) made.at[j] = narrow<T>(wide[j]);
    }
    return made;
  }
};

/// Elements of 16 bytes.
template <class T>
inline constexpr int wide_count = 16 / static_cast<int>(sizeof(T));

/// Whether rows of `columns` can be read 16 bytes at a time at all of `pointers` (null is no matter).
template <class T, class... P>
bool wide_rows(std::int64_t columns, const P*... pointers) {
  return columns % wide_count<T> == 0 && ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
}

template <int V, class T, class C>
__device__ void widen_all(const T (&x)[V], C (&wide)[V]) {
#pragma unroll
  for (int j = 0; j < V; ++j) wide[j] = widen(x[j]);
}

/// e^x; what a 16-bit result rounds away leaves room for the fast instruction.
template <class T, class C>
__device__ C exponential(C x) {
  if constexpr (sizeof(T) == 2)
    return __expf(x);
  else
    return math::exp(x);
}

/// The whole warp's sum, in every lane.
template <class C>
__device__ C warp_sum(C x) {
  for (int step = warp_size / 2; step > 0; step /= 2) x += __shfl_xor_sync(whole_warp, x, step);
  return x;
}

/// Sums over groups of `Warps` neighbouring warps of a block; a block is one group, or a group is one warp.
template <int Warps, class C>
__device__ C group_sum(C x, C* shared) {
  x = warp_sum(x);
  if constexpr (Warps > 1) {
    __syncthreads();  // what was shared before has been read
    if (threadIdx.x % warp_size == 0) shared[threadIdx.x / warp_size] = x;
    __syncthreads();
    x = shared[0];
    for (int w = 1; w < Warps; ++w) x += shared[w];
  }
  return x;
}

template <class C>
__device__ constexpr C lowest() {
  return -std::numeric_limits<C>::infinity();
}

/// A sum of exponentials beside the largest exponent seen, which they are relative to.
template <class T, class C = compute_t<T>>
struct LogSum {
  C top = lowest<C>(), total = 0;

  /// What exponents are shifted by; nothing where all are -inf, so that no NaN is made of them.
  __device__ static C shift(C top) { return top == lowest<C>() ? C(0) : top; }
  /// Adds values; NaN and +inf make the total NaN.
  template <int N>
  __device__ void add(const C (&x)[N]) {
    C larger = top;
    for (int i = 0; i < N; ++i) larger = x[i] > larger ? x[i] : larger;
    const C by = shift(larger);
    if (larger != top) total *= exponential<T>(top - by);
    for (int i = 0; i < N; ++i) total += exponential<T>(x[i] - by);
    top = larger;
  }
  __device__ void merge(C other_top, C other_total) {
    const C larger = other_top > top ? other_top : top, by = shift(larger);
    total = total * exponential<T>(top - by) + other_total * exponential<T>(other_top - by);
    top = larger;
  }
  /// Merges a group's, in every thread; `shared` has room for two values a warp.
  template <int Warps>
  __device__ void merge_group(C* shared) {
    for (int step = warp_size / 2; step > 0; step /= 2) {
      const C other_top = __shfl_xor_sync(whole_warp, top, step),
              other_total = __shfl_xor_sync(whole_warp, total, step);
      merge(other_top, other_total);
    }
    if constexpr (Warps > 1) {
      __syncthreads();
      if (threadIdx.x % warp_size == 0) {
        shared[2 * (threadIdx.x / warp_size)] = top;
        shared[2 * (threadIdx.x / warp_size) + 1] = total;
      }
      __syncthreads();
      top = shared[0];
      total = shared[1];
      for (int w = 1; w < Warps; ++w) merge(shared[2 * w], shared[2 * w + 1]);
    }
  }
};

}  // namespace sherd::cuda
