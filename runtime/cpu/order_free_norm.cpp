// The order-free norm and clipping by it, over lists of tensors.
#include "runtime/cpu/order_free_norm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "runtime/cpu/list_tiles.h"
#include "runtime/cpu/rows.h"
#include "runtime/exact_squares.h"
#include "runtime/instances.h"
#include "runtime/list_step.h"
#include "runtime/math.h"
#include "runtime/ops.h"
#include "runtime/ops/order_free_norm.h"

namespace sherd::cpu {

template <class T>
double max_abs(std::span<const std::span<const T>> list) {
  using C = compute_t<T>;
  std::vector<C> tops(static_cast<std::size_t>(tile_count(list)));
  for_elements(list, [&](std::span<const T> values, std::int64_t begin, std::int64_t end, std::int64_t tile) {
    // As bits, because magnitudes order like integers there, NaN above all.
    using Bits = typename math::detail::Format<C>::Int;
    Bits largest = std::bit_cast<Bits>(tops[tile]);
    Lanes<Bits> top(largest);
    for_vectors<C>(end - begin, [&](std::int64_t i, auto count) {
      const auto size = std::bit_cast<Lanes<Bits>>(fabs(Lanes<C>(take<C>(values.data() + begin + i, count))));
      top = where(size > top, size, top);
    });
    const auto each = top.vector();
    for (int l = 0; l < lanes<C>; ++l) largest = std::max<Bits>(largest, each[l]);
    tops[tile] = std::bit_cast<C>(largest);
  });
  double best = 0;
  for (C top : tops) best = top > best || std::isnan(top) ? static_cast<double>(top) : best;
  return best;
}

namespace {

constexpr std::int64_t piece = 1024;  // elements that are summed in f64 before they go to the limbs

/// The sums of a grid, of which each lane has its own.
struct GridSums {
  Vec<double> above[2] = {}, below[2] = {};

  /// Adds the squares of sixteen magnitudes, each of them at least the least of the grid or 0. A product of
  /// two floats is a double, so `fma` rounds to the grid once and gives what lies below it exactly.
  template <class Grid>
  void add(const Grid& grid, Vec<float> x) {
    Vec<double> halves[2];
    widen(x, halves);
    const Vec<double> splitter = splat(grid.splitter);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Vec<double> v = halves[i];
      if constexpr (Grid::split) {
        const Vec<double> on_grid = fma(v, v, splitter) - splitter;
        above[i] = above[i] + on_grid;
        below[i] = below[i] + fma(v, v, -on_grid);
      } else {
        above[i] = fma(v, v, above[i]);
      }
    }
  }
  static std::int64_t total(const Vec<double> (&sums)[2], double factor) {
    std::int64_t all = 0;
    for (const Vec<double>& v : sums)
      for (int l = 0; l < lanes<double>; ++l) all += static_cast<std::int64_t>(v[l] * factor);
    return all;
  }
};

/// Those of a piece, `n` of them.
template <class T, class Add>
void add_piece(const T* data, std::int64_t n, const Add& add) {
  using C = compute_t<T>;
  if constexpr (std::is_same_v<C, double>) {
    for (std::int64_t i = 0; i < n; ++i) add_square(data[i], add);
  } else {
    using Grid = SquaresGrid<mantissa_bits<T>>;
    using Bits = Vec<std::int32_t>;
    C x[piece];
    Bits tops{};  // magnitudes as bits are in order, NaN above all
    for_vectors<C>(n, [&](std::int64_t i, auto count) {
      const Bits bits = std::bit_cast<Bits>(take<C>(data + i, count)) & 0x7fffffff;
      store(x + i, std::bit_cast<Vec<C>>(bits));
      tops = bits > tops ? bits : tops;
    });
    std::int32_t top = 0;
    for (int l = 0; l < lanes<C>; ++l) top = std::max(top, tops[l]);
    const C largest = std::bit_cast<C>(top);
    if (largest == 0) return;
    if (!std::isfinite(largest)) {
      for (std::int64_t i = 0; i < n; ++i) add_square(static_cast<double>(x[i]), add);
      return;
    }
    const Grid grid = Grid::of(static_cast<double>(largest));
    const Vec<C> least = splat(static_cast<C>(grid.least));
    GridSums sums;
    Bits small{};  // lanes that have seen what is left out
    for (std::int64_t i = 0; i < n; i += lanes<C>) {
      const Vec<C> v = load(x + i);
      __builtin_prefetch(data + piece + i);  // of the next piece, while this one computes
      const auto sums_it = v >= least;
      small |= ~sums_it & std::bit_cast<Bits>(v);
      sums.add(grid, std::bit_cast<Vec<C>>(sums_it & std::bit_cast<Bits>(v)));
    }
    grid.finish(GridSums::total(sums.above, grid.to_high), GridSums::total(sums.below, grid.to_low), add);
    if (!any(small)) return;
    for (std::int64_t i = 0; i < n; ++i)
      if (x[i] < static_cast<C>(grid.least)) add_square(static_cast<double>(x[i]), add);
  }
}

}  // namespace

template <class T>
void add_squares(std::span<const std::span<const T>> list, std::int64_t* limbs) {
  for_elements(list, [&](std::span<const T> values, std::int64_t begin, std::int64_t end, std::int64_t) {
    std::array<std::uint64_t, ExactSquares::limbs> sums{};
    const auto add = [&](int limb, std::uint64_t value) { sums[static_cast<std::size_t>(limb)] += value; };
    for (; begin < end; begin += piece) add_piece(values.data() + begin, std::min(piece, end - begin), add);
    for (std::size_t i = 0; i < sums.size(); ++i)
      if (sums[i] != 0)
        std::atomic_ref(limbs[i]).fetch_add(static_cast<std::int64_t>(sums[i]), std::memory_order_relaxed);
  });
}

template <class T>
void scale(std::span<const std::span<T>> list, double factor) {
  for_elements(list, [&](std::span<T> values, std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t i = begin; i < end; ++i)
      values[i] =
          T(static_cast<compute_t<T>>(static_cast<double>(static_cast<compute_t<T>>(values[i])) * factor));
  });
}

[[gnu::used]] const auto optim_instances = instances_for<floating_dtypes>(
    []<class T>() { return std::tuple(&max_abs<T>, &add_squares<T>, &scale<T>); });

namespace {

/// Calls `body.operator()<T>(tensors)` for the tensors of each floating dtype that occurs.
template <class F>
void by_dtype(std::string_view op, Inputs in, const F& body) {
  for (const DType dtype : all_dtypes) {
    std::vector<Tensor> tensors;
    for (const Tensor& t : in)
      if (t.dtype() == dtype) tensors.push_back(t);
    if (!tensors.empty()) with_floating(op, dtype, [&]<class T>() { body.template operator()<T>(tensors); });
  }
}

/// The same with the tensors' values: `body(span of a span for each)`.
template <class F>
void values_by_dtype(std::string_view op, Inputs in, const F& body) {
  by_dtype(op, in, [&]<class T>(std::vector<Tensor>& tensors) {
    std::vector<std::span<const T>> list;
    for (Tensor& t : tensors) {
      t = contiguous(t);
      list.emplace_back(t.data<T>(), static_cast<std::size_t>(t.numel()));
    }
    body(std::span<const std::span<const T>>(list));
  });
}

double& scalar(const Tensor& t) { return *reinterpret_cast<double*>(t.raw()); }

void largest_magnitude(const ops::LargestMagnitude& op, Inputs in, Outputs out) {
  double largest = 0;
  values_by_dtype(op.name, in, [&](auto values) {
    const double here = max_abs(values);
    if (here > largest || std::isnan(here)) largest = here;
    if (std::isnan(largest)) largest = std::numeric_limits<double>::quiet_NaN();  // one of many bit patterns
  });
  scalar(out[0]) = largest;
}

void square_sums(const ops::SquareSums& op, Inputs in, Outputs out) {
  auto* limbs = reinterpret_cast<std::int64_t*>(out[0].raw());
  std::fill_n(limbs, static_cast<int>(ExactSquares::limbs), 0);
  values_by_dtype(op.name, in, [&](auto values) { add_squares(values, limbs); });
}

void norm_of_sums(const ops::NormOfSums&, Inputs in, Outputs out) {
  scalar(out[0]) = root_of(in[0].data<std::int64_t>());
}

void clip_scale(const ops::ClipScale& op, Inputs in, Outputs) {
  const double factor = std::min(op.limit / (scalar(in[0]) + 1e-6), 1.0);  // NaN stays: it is for all tensors
  for (const Tensor& t : in.subspan(1)) detail::dense_data(op.name, t);    // all or none
  if (factor == 1.0) return;
  by_dtype(op.name, in.subspan(1), [&]<class T>(const std::vector<Tensor>& tensors) {
    std::vector<std::span<T>> list;
    for (const Tensor& t : tensors)
      list.emplace_back(reinterpret_cast<T*>(t.raw()), static_cast<std::size_t>(t.numel()));
    scale<T>(list, factor);
  });
}

}  // namespace

void add_order_free_norm() {
  add_kernel<largest_magnitude>(DeviceType::cpu);
  add_kernel<square_sums>(DeviceType::cpu);
  add_kernel<norm_of_sums>(DeviceType::cpu);
  add_kernel<clip_scale>(DeviceType::cpu);
}

}  // namespace sherd::cpu
