// What the kernels of fused regions are written in, behind the functors' headers: see region_prelude.cuh.
#pragma once

namespace sherd::cuda {

/// A functor from its bytes.
template <class F, class... Bytes>
constexpr F functor(Bytes... bytes) {
  if constexpr (sizeof...(Bytes) == 0) {
    return F{};
  } else {
    struct Raw {
      unsigned char at[sizeof...(Bytes)];
    };
    return __builtin_bit_cast(F, Raw{{static_cast<unsigned char>(bytes)...}});
  }
}

/// The functor's value as an op of its own computes it, of elements of `T`s: floats with the same numbers in
/// special forms (`Pow::for_number`), rounded once.
template <class To, class F, class... T>
__device__ To call(const F& f, T... x) {
  if constexpr ((std::is_same_v<compute_t<T>, float> && ...) &&
                requires { f.for_number([](const auto&) {}); }) {
    To y{};
    if (f.for_number([&](const auto& special) { y = narrow<To>(special(widen(x)...)); })) return y;
  }
  return narrow<To>(f(widen(x)...));
}

/// As `Cast` converts an element.
template <class To, class From>
__device__ To cast(From x) {
  if constexpr (std::is_same_v<To, From>)
    return x;
  else if constexpr (std::is_same_v<To, bool>)
    return widen(x) != compute_t<From>(0);
  else if constexpr (std::is_same_v<compute_t<To>, float> && std::is_same_v<compute_t<From>, float>)
    return narrow<To>(widen(x));
  else if constexpr (sizeof(To) == 2)
    return narrow<To>(sherd::detail::odd_float(x));
  else if constexpr (std::is_integral_v<To> && !std::is_integral_v<From>)
    return math::to_integer<To>(widen(x));
  else
    return static_cast<To>(widen(x));
}

/// Tensors begin at 16 bytes, so wider ones are several loads.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];
};

/// What threads add up of one row, in the order of `fold_rows`: 256 of them, of which one thread is `Own`.
/// `total[k]` is number `thread + k * (256 / Own)`'s; the sum comes out in every thread.
template <int Own, class Total>
__device__ Total sum_of_row(Total (&total)[Own]) {
  static_assert(Own == 1 || Own == 8);
  if constexpr (Own == 8) {
    for (int half = 4; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) total[k] += total[k + half];
    for (int half = 16; half > 0; half /= 2) total[0] += __shfl_down_sync(0xffffffffu, total[0], half);
    return __shfl_sync(0xffffffffu, total[0], 0);
  } else {
    __shared__ Total all[256];
    all[threadIdx.x] = total[0];
    __syncthreads();
    if (threadIdx.x < 32) {
      Total own[8];
      for (int k = 0; k < 8; ++k) own[k] = all[threadIdx.x + 32 * k];
      const Total sum = sum_of_row<8>(own);
      __syncwarp();
      if (threadIdx.x == 0) all[0] = sum;
    }
    __syncthreads();
    const Total sum = all[0];
    __syncthreads();
    return sum;
  }
}

/// Every so manyth row from `first` on, before `end`.
template <class Index>
struct LaneRows {
  Index first, end;
};
/// Those of a lane (`ColumnLanes`), of which a piece has `Step` for each `Length` rows of theirs.
template <int Step, int Length, class Index, class Given>
__device__ LaneRows<Index> rows_of_lane(Index lane, const Given& given) {
  const Index of_piece = given.lanes_of_piece, length = given.length, rows = given.rows;
  const Index begin = lane / of_piece * length, number = lane % of_piece;
  const Index first = begin + number / Step * (Step * Length);
  const Index after = begin + length < rows ? begin + length : rows;
  return {first + number % Step, first + Step * Length < after ? first + Step * Length : after};
}

__device__ inline void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace sherd::cuda
