#include <algorithm>
#include <type_traits>

#include "runtime/cuda/fold.cuh"
#include "runtime/ops/power.h"

namespace sherd::cuda {
namespace {

constexpr std::int64_t enough_blocks = 528;  // across rows: what the largest GPU has room for
constexpr std::int64_t least_length = 128;

template <class T>
using accumulator_t = std::conditional_t<std::is_integral_v<T>, std::int64_t, compute_t<T>>;

/// A sum of elements over a divisor.
template <class T, class To, class Acc>
struct Summing {
  static constexpr bool reads_first = false;
  using Element = T;
  using Run = std::conditional_t<std::is_same_v<T, bool>, std::int32_t, Acc>;  // a run is short
  using Total = std::conditional_t<std::is_floating_point_v<Acc>, double, Acc>;
  void* out;
  double divisor = 1;

  __device__ Run term(compute_t<T> element, compute_t<T>) const { return static_cast<Run>(element); }
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
  fold(c, Summing<T, To, Acc>{c.out, c.divisor}, Summing<T, Acc, Acc>{c.partial, 1},
       Summing<Acc, To, Acc>{c.out, c.divisor});
}

/// A sum of powers of sizes, in f64, which holds those of every f32: of elements, or of what pieces of them
/// have.
template <class T, bool joins>
struct SummingPowers {
  static constexpr bool reads_first = false;
  using Element = std::conditional_t<joins, double, T>;
  using Run = double;
  using Total = double;
  PowerSumCall c;

  __device__ double term(compute_t<Element> element, compute_t<Element>) const {
    const double x = static_cast<double>(element);
    if constexpr (joins) return x;
    return ops::with_size_to(c.power, [x](auto size) { return size(x); });
  }
  __device__ void store(std::int64_t i, double total) const {
    const double value = c.root ? math::sqrt(total) : total;
    c.wide[i] = value;
    if (c.out != nullptr) static_cast<T*>(c.out)[i] = narrow<T>(value);
  }
};

/// Runs that lanes have added up, as a thread of `fold_columns` adds its own.
template <class Acc, class To>
struct SummingLanes : Summing<Acc, To, Acc> {
  using Run = double;
  __device__ Run term(Acc run, Acc) const { return run; }
};

template <class Acc, class To>
void sum_lanes(const SumCall& c, const ColumnLanes& lanes, const SummingLanes<Acc, To>& rule) {
  const Pieces all{lanes.pieces, lanes.of_piece(), c.inner, 1, lanes.of_piece()};
  launch_columns<block_rows, 1>(rule, all, static_cast<const Acc*>(c.x), c.stream);
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

ColumnLanes::ColumnLanes(std::int64_t of, std::int64_t columns, DType dtype) : rows(of) {
  const FoldCall call{.dtype = dtype, .reduce = rows, .inner = columns};
  pieces = call.pieces();
  length = (rows + pieces - 1) / pieces;
  runs = (length + block_rows * run_length - 1) / (block_rows * run_length);
}
std::int64_t ColumnLanes::of_piece() const { return runs * block_rows; }

void launch_sum_of_lanes(const SumCall& c) {
  const ColumnLanes lanes(c.reduce, c.inner, c.dtype);
  for_floating(c.dtype, [&]<class T>() {
    using Acc = accumulator_t<T>;
    if (lanes.pieces == 1) return sum_lanes<Acc, T>(c, lanes, {{c.out, c.divisor}});
    sum_lanes<Acc, Acc>(c, lanes, {{c.partial, 1}});
    fold_pieces<true>(Summing<Acc, T, Acc>{c.out, c.divisor}, {1, lanes.pieces, c.inner, 1, lanes.pieces},
                      c.partial, c.stream);
  });
}

void launch_sum(const SumCall& c) {
  for_any(c.dtype, [&]<class T>() { sum<T>(c); });
}

void launch_power_sum(const PowerSumCall& c) {
  PowerSumCall piece = c;
  piece.root = false;
  piece.wide = static_cast<double*>(c.partial);
  piece.out = nullptr;
  for_floating(c.dtype, [&]<class T>() {
    fold(c, SummingPowers<T, false>{c}, SummingPowers<T, false>{piece}, SummingPowers<T, true>{c});
  });
}

}  // namespace sherd::cuda
