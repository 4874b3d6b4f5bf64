// Sums of what is put at positions of a line, in whole numbers: their order is none, so atomics give the same
// bits on every run. A destination's numbers are units of its largest one, so small sums lose nothing to
// large ones beside them.
#include "runtime/cuda/block.cuh"
#include "runtime/cuda/launch.cuh"
#include "runtime/cuda/picking.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

constexpr unsigned special = 255;  // the exponent of infinities and NaN
constexpr unsigned plus_infinity = 1, minus_infinity = 2, not_a_number = 4;  // of a sum of those
constexpr int fraction_bits = 23, bias = 127;

/// For each destination its largest exponent, 0 where nothing is put, and its sum: in units of 2^-`spare` of
/// that exponent's last place, or what of infinities and NaN it has.
struct FixedSums {
  unsigned long long* sums;
  unsigned* tops;
  int spare;

  explicit FixedSums(const AddCall& c)
      : sums(static_cast<unsigned long long*>(c.scratch)), tops(reinterpret_cast<unsigned*>(sums + c.numel)) {
    spare = 63 - (fraction_bits + 1);
    while (spare > 0 && std::int64_t{1} << (63 - (fraction_bits + 1) - spare) < c.picks.count) --spare;
  }
};

/// The exponent of a number's last place, of subnormal ones that of the least normal.
__device__ unsigned exponent_of(float x) {
  const unsigned exponent = __float_as_uint(x) >> fraction_bits & special;
  return exponent == 0 ? 1 : exponent;
}

/// Calls `body(destination, value)` for each pick that has one.
template <class T, class F>
__device__ void for_picks(const AddCall& c, const F& body) {
  const auto count = static_cast<std::uint32_t>(c.picks.count), step = gridDim.x * threads_per_block;
  for (std::uint32_t i = blockIdx.x * threads_per_block + threadIdx.x; i < count; i += step) {
    const PickPlace p = place_of(c.picks, i);
    const std::int64_t at = c.index[p.index];
    if (at >= 0 && at < c.picks.columns)
      body(p.x + at * c.picks.x_axis, widen(static_cast<const T*>(c.values)[i]));
    else
      c.faults(c.name, at, p.index, c.picks.columns);
  }
}

template <class T>
__global__ void __launch_bounds__(threads_per_block) find_tops(const AddCall c, const FixedSums s) {
  wait_for_earlier();
  for_picks<T>(c, [&](std::int64_t to, float x) { atomicMax(s.tops + to, exponent_of(x)); });
}

template <class T>
__global__ void __launch_bounds__(threads_per_block) add_units(const AddCall c, const FixedSums s) {
  wait_for_earlier();
  for_picks<T>(c, [&](std::int64_t to, float x) {
    const unsigned bits = __float_as_uint(x), exponent = exponent_of(x), top = s.tops[to];
    if (top == special) {
      if (exponent == special)
        atomicOr(s.sums + to, x != x ? not_a_number : x > 0 ? plus_infinity : minus_infinity);
      return;
    }
    const unsigned fraction = bits & ((1u << fraction_bits) - 1), below = top - exponent;
    const bool normal = (bits >> fraction_bits & special) != 0;
    std::int64_t units = static_cast<std::int64_t>(normal ? fraction | 1u << fraction_bits : fraction)
                         << s.spare;
    if (below > 0) units = below > 62 ? 0 : (units + (std::int64_t{1} << (below - 1))) >> below;
    atomicAdd(s.sums + to, static_cast<unsigned long long>(x < 0 ? -units : units));
  });
}

template <class T>
__global__ void __launch_bounds__(threads_per_block) write_totals(const AddCall c, const FixedSums s) {
  wait_for_earlier();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  T* y = static_cast<T*>(c.y);
  const T* base = static_cast<const T*>(c.base);
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < c.numel;
       i += step) {
    const unsigned top = s.tops[i];
    if (top == 0) {
      if (c.base != c.y) y[i] = c.based ? base[i] : narrow<T>(0.f);
      continue;
    }
    const unsigned long long sum = s.sums[i];
    double total = 0;
    if (top != special)
      total = scalbn(static_cast<double>(static_cast<std::int64_t>(sum)),
                     static_cast<int>(top) - bias - fraction_bits - s.spare);
    else if (sum == plus_infinity || sum == minus_infinity)
      total = sum == plus_infinity ? HUGE_VAL : -HUGE_VAL;
    else
      total = NAN;
    if (c.based) total += static_cast<double>(widen(base[i]));
    y[i] = narrow<T>(static_cast<float>(total));
  }
}

}  // namespace

void launch_add_fixed(const AddCall& c) {
  const FixedSums s(c);
  cudaMemsetAsync(c.scratch, 0, c.scratch_bytes(), c.stream);
  for_floating(c.dtype, [&]<class T>() {
    if constexpr (std::is_same_v<compute_t<T>, float>) {
      const unsigned blocks = blocks_for(c.picks.count);
      launch_early(find_tops<T>, blocks, threads_per_block, c.stream, c, s);
      launch_early(add_units<T>, blocks, threads_per_block, c.stream, c, s);
      launch_early(write_totals<T>, blocks_for(c.numel), threads_per_block, c.stream, c, s);
    }
  });
}

}  // namespace sherd::cuda
