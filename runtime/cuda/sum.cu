#include <algorithm>
#include <type_traits>

#include "runtime/cuda/fold.cuh"
#include "runtime/ops/power.h"

namespace sherd::cuda {
namespace {

constexpr std::int64_t enough_blocks = 1056;  // across rows: what the largest GPU has room for, twice
constexpr std::int64_t least_length = 128;

template <class T>
using accumulator_t = std::conditional_t<std::is_integral_v<T>, std::int64_t, compute_t<T>>;

/// A sum of elements or of powers of their sizes, over a divisor.
template <class T, class To, class Acc>
struct Summing {
  static constexpr bool reads_first = false;
  using Element = T;
  using Run = std::conditional_t<std::is_same_v<T, bool>, std::int32_t, Acc>;  // a run is short
  using Total = std::conditional_t<std::is_floating_point_v<Acc>, double, Acc>;
  void* out;
  double divisor = 1;
  int power = 0;  ///< as in SumCall

  __device__ Run term(compute_t<T> element, compute_t<T>) const {
    const Run x = static_cast<Run>(element);
    if constexpr (std::is_floating_point_v<Acc>)
      if (power != 0) return ops::with_size_to(power, [x](auto size) { return size(x); });
    return x;
  }
  __device__ void store(std::int64_t i, Total total) const {
    if constexpr (std::is_integral_v<Acc>)
      static_cast<To*>(out)[i] = static_cast<To>(total);
    else
      static_cast<To*>(out)[i] = static_cast<To>(static_cast<Acc>(total) / static_cast<Acc>(divisor));
  }
};

template <class T, class To = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>,
          class Acc = accumulator_t<T>>
void sum(const SumCall& c) {
  fold(c, Summing<T, To, Acc>{c.out, c.divisor, c.power}, Summing<T, Acc, Acc>{c.partial, 1, c.power},
       Summing<Acc, To, Acc>{c.out, c.divisor});
}

}  // namespace

std::int64_t FoldCall::pieces() const {
  const std::int64_t results = outer * inner;
  if (inner == 1) {
    const std::int64_t wanted = (reduce + piece_length - 1) / piece_length;
    return results >= rows_without_pieces ? 1 : std::clamp<std::int64_t>(wanted, 1, 1024);
  }
  if (results == 0 || reduce <= 4 * least_length) return 1;
  const std::int64_t width = block_columns * 16 / size_of(dtype),  // of a block whose loads are wide
      blocks = outer * ((inner + width - 1) / width);
  return std::clamp<std::int64_t>(enough_blocks / blocks, 1, (reduce + least_length - 1) / least_length);
}

void launch_sum(const SumCall& c) {
  if (c.power == 0) return for_any(c.dtype, [&]<class T>() { sum<T>(c); });
  for_floating(c.dtype, [&]<class T>() { sum<T, double, double>(c); });  // they hold every square of f32
}

}  // namespace sherd::cuda
