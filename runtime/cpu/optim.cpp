#include "runtime/cpu/optim.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <vector>

#include "runtime/exact_squares.h"
#include "runtime/instances.h"
#include "runtime/math.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

constexpr std::int64_t chunk = 1 << 14;  // elements of one tile, counted over the whole list

/// Calls `body(slot, begin, end, tile)` for the pieces of the list's elements laid end to end that each tile
/// covers.
template <class Slot, class F>
void for_elements(std::span<const Slot> slots, const F& body) {
  std::vector<std::int64_t> starts{0};
  starts.reserve(slots.size() + 1);
  for (const Slot& s : slots) starts.push_back(starts.back() + s.n);
  parallel_for(starts.back(), chunk, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t tile = begin / chunk;
    auto i =
        static_cast<std::size_t>(std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin()) - 1;
    for (; begin < end; ++i) {
      const std::int64_t stop = std::min(end, starts[i + 1]);
      if (begin < stop) body(slots[i], begin - starts[i], stop - starts[i], tile);
      begin = stop;
    }
  });
}

template <class Slot>
std::int64_t tile_count(std::span<const Slot> slots) {
  std::int64_t n = 0;
  for (const Slot& s : slots) n += s.n;
  return (n + chunk - 1) / chunk;
}

/// The scalars of one step, rounded to float where PyTorch's kernels round them.
struct AdamFactors {
  float keep, decay, beta1, share1, beta2, share2, root2, eps, rate;

  AdamFactors(const AdamCall& o, double step)
      : keep(o.decoupled ? static_cast<float>(1 - o.lr * o.weight_decay) : 1.f),
        decay(o.decoupled ? 0.f : static_cast<float>(o.weight_decay)),
        beta1(static_cast<float>(o.beta1)),
        share1(static_cast<float>(1 - o.beta1)),
        beta2(static_cast<float>(o.beta2)),
        share2(static_cast<float>(1 - o.beta2)),
        root2(static_cast<float>(std::sqrt(1 - math::pow(o.beta2, step)))),
        eps(static_cast<float>(o.eps)),
        rate(static_cast<float>(-(o.lr / (1 - math::pow(o.beta1, step))))) {}
};

void adam_piece(const AdamFactors& f, float* __restrict p, const float* __restrict g, float* __restrict m,
                float* __restrict v, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float kept = p[i] * f.keep;
    const float grad = std::fma(kept, f.decay, g[i]);
    m[i] = std::fma(f.share1, grad, m[i] * f.beta1);
    v[i] = std::fma(f.share2 * grad, grad, v[i] * f.beta2);
    p[i] = kept + f.rate * m[i] / (math::sqrt(v[i]) / f.root2 + f.eps);
  }
}

}  // namespace

void adam(std::span<const AdamSlot> slots, const AdamCall& call) {
  for_elements(slots, [&](const AdamSlot& s, std::int64_t begin, std::int64_t end, std::int64_t) {
    adam_piece(AdamFactors(call, s.step), s.p + begin, s.g + begin, s.m + begin, s.v + begin, end - begin);
  });
}

void sgd(std::span<const SgdSlot> slots, const SgdCall& call) {
  const float rate = static_cast<float>(-call.lr), momentum = static_cast<float>(call.momentum);
  const float decay = static_cast<float>(call.weight_decay), share = static_cast<float>(1 - call.dampening);
  const bool nesterov = call.nesterov;
  for_elements(slots, [&](const SgdSlot& s, std::int64_t begin, std::int64_t end, std::int64_t) {
    const float carried = s.first ? 0.f : momentum;
    for (std::int64_t i = begin; i < end; ++i) {
      float step = std::fma(s.p[i], decay, s.g[i]);
      if (s.momentum) {
        s.momentum[i] = s.first ? step : std::fma(s.momentum[i], carried, share * step);
        step = nesterov ? std::fma(s.momentum[i], momentum, step) : s.momentum[i];
      }
      s.p[i] = std::fma(rate, step, s.p[i]);
    }
  });
}

namespace {

template <bool centered, bool carries>
void rmsprop_piece(const RmspropCall& call, const RmspropSlot& s, std::int64_t begin, std::int64_t end) {
  const float rate = static_cast<float>(-call.lr), alpha = static_cast<float>(call.alpha),
              share = static_cast<float>(1 - call.alpha), eps = static_cast<float>(call.eps),
              decay = static_cast<float>(call.weight_decay), momentum = static_cast<float>(call.momentum);
  float* __restrict p = s.p;
  const float* __restrict g = s.g;
  float* __restrict squares = s.squares;
  float* __restrict average = s.average;
  float* __restrict carried = s.momentum;
  for (std::int64_t i = begin; i < end; ++i) {
    const float grad = std::fma(p[i], decay, g[i]);
    squares[i] = std::fma(share * grad, grad, squares[i] * alpha);
    float variance = squares[i];
    if constexpr (centered) {
      average[i] = std::fma(share, grad, average[i] * alpha);
      variance = std::fma(-average[i], average[i], variance);
      variance = variance < 0 ? 0.f : variance;  // by rounding; NaN stays
    }
    float move = grad / (math::sqrt(variance) + eps);
    if constexpr (carries) move = carried[i] = std::fma(carried[i], momentum, move);
    p[i] = std::fma(rate, move, p[i]);
  }
}

}  // namespace

void rmsprop(std::span<const RmspropSlot> slots, const RmspropCall& call) {
  for_elements(slots, [&](const RmspropSlot& s, std::int64_t begin, std::int64_t end, std::int64_t) {
    const bool centered = s.average != nullptr, carries = s.momentum != nullptr;
    (centered  ? carries ? rmsprop_piece<true, true> : rmsprop_piece<true, false>
      : carries ? rmsprop_piece<false, true>
               : rmsprop_piece<false, false>)(call, s, begin, end);
  });
}

// ---- The norm.

template <class T>
double max_abs(std::span<const Values<T>> list) {
  using C = compute_t<T>;
  std::vector<C> tops(static_cast<std::size_t>(tile_count(list)));
  for_elements(list, [&](const Values<T>& values, std::int64_t begin, std::int64_t end, std::int64_t tile) {
    // As bits, because magnitudes order like integers there, NaN above all: integer maxima vectorise and keep
    // it.
    using Bits = typename math::detail::Format<C>::Int;
    Bits top = std::bit_cast<Bits>(tops[tile]);
    for (std::int64_t i = begin; i < end; ++i) {
      top = std::max(top, std::bit_cast<Bits>(std::fabs(static_cast<C>(values.data[i]))));
    }
    tops[tile] = std::bit_cast<C>(top);
  });
  double best = 0;
  for (C top : tops) best = top > best || std::isnan(top) ? static_cast<double>(top) : best;
  return best;
}

namespace {

constexpr std::int64_t piece = 1024;  // elements that are summed in f64 before they go to the limbs

/// Those of a piece, `n` of them.
template <class T, class Add>
void add_piece(const T* data, std::int64_t n, const Add& add) {
  using C = compute_t<T>;
  if constexpr (std::is_same_v<C, double>) {
    for (std::int64_t i = 0; i < n; ++i) add_square(data[i], add);
  } else {
    constexpr std::int64_t lanes = 16;
    using Grid = SquaresGrid<mantissa_bits<T>>;
    C x[piece] = {};
    std::int32_t top = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      x[i] = std::fabs(static_cast<C>(data[i]));
      top = std::max(top, std::bit_cast<std::int32_t>(x[i]));
    }
    const C largest = std::bit_cast<C>(top);
    if (largest == 0) return;
    if (!std::isfinite(largest)) {
      for (std::int64_t i = 0; i < n; ++i) add_square(static_cast<double>(x[i]), add);
      return;
    }
    const Grid grid = Grid::of(static_cast<double>(largest));
    const auto least = static_cast<C>(grid.least);
    double above[lanes] = {}, below[lanes] = {};
    std::int32_t small = 0;
    for (std::int64_t i = 0; i < piece; i += lanes)
      for (std::int64_t j = 0; j < lanes; ++j) {
        const bool sums = x[i + j] >= least;
        small += !sums && x[i + j] != 0;
        const double value = sums ? static_cast<double>(x[i + j]) : 0.0, square = value * value;
        const double on_grid = Grid::split ? (square + grid.splitter) - grid.splitter : square;
        above[j] += on_grid;
        if (Grid::split) below[j] += square - on_grid;
      }
    std::int64_t high = 0, low = 0;
    for (std::int64_t j = 0; j < lanes; ++j) {
      high += static_cast<std::int64_t>(above[j] * grid.to_high);
      low += static_cast<std::int64_t>(below[j] * grid.to_low);
    }
    grid.finish(high, low, add);
    for (std::int64_t i = 0; small > 0 && i < n; ++i)
      if (x[i] < least) add_square(static_cast<double>(x[i]), add);
  }
}

}  // namespace

template <class T>
void add_squares(std::span<const Values<T>> list, std::int64_t* limbs) {
  for_elements(list, [&](const Values<T>& values, std::int64_t begin, std::int64_t end, std::int64_t) {
    std::array<std::uint64_t, ExactSquares::limbs> sums{};
    const auto add = [&](int limb, std::uint64_t value) { sums[static_cast<std::size_t>(limb)] += value; };
    for (; begin < end; begin += piece) add_piece(values.data + begin, std::min(piece, end - begin), add);
    for (std::size_t i = 0; i < sums.size(); ++i)
      if (sums[i] != 0)
        std::atomic_ref(limbs[i]).fetch_add(static_cast<std::int64_t>(sums[i]), std::memory_order_relaxed);
  });
}

template <class T>
void scale(std::span<const MutableValues<T>> list, double factor) {
  for_elements(list, [&](const MutableValues<T>& values, std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t i = begin; i < end; ++i)
      values.data[i] = T(
          static_cast<compute_t<T>>(static_cast<double>(static_cast<compute_t<T>>(values.data[i])) * factor));
  });
}

[[gnu::used]] const auto optim_instances = instances_for<floating_dtypes>(
    []<class T>() { return std::tuple(&max_abs<T>, &add_squares<T>, &scale<T>); });

}  // namespace sherd::cpu
