// Negative log likelihood of class indices.
#include "runtime/ops/nll.h"

#include <algorithm>
#include <vector>

#include "runtime/cpu/targets.h"
#include "runtime/dtype.h"
#include "runtime/kernel.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

constexpr std::int64_t rows_of_tile = 4096;

/// Losses and weights of some rows, summed.
struct Sums {
  double loss = 0, weight = 0;
};

template <class T, class C>
Sums sum_of_rows(const ops::Nll& op, const T* x, const std::int64_t* targets, const C* weight,
                 std::int64_t begin, std::int64_t end, std::int64_t classes, T* each) {
  Sums sums;
  for (std::int64_t r = begin; r < end; ++r) {
    const std::int64_t t = targets[r];
    C loss = 0;
    if (t != op.ignore_index) {
      const C counts = weight ? weight[t] : C(1);
      loss = -static_cast<C>(x[r * classes + t]) * counts;
      sums.loss += loss;
      sums.weight += counts;
    }
    if (each) each[r] = static_cast<T>(loss);
  }
  return sums;
}

void nll(const ops::Nll& op, Inputs in, Outputs out) {
  const Tensor &scores = in[0], &weight = in[2];
  const std::int64_t rows = scores.shape()[0], classes = scores.shape()[1];
  const std::int64_t* targets = in[1].data<std::int64_t>();
  const std::int64_t bad = first_bad_target(targets, rows, classes, op.ignore_index);
  check<ValueError>(bad < 0, "{}: target {} of row {} is outside [0, {}) and is not ignore_index {}", op.call,
                    bad < 0 ? 0 : targets[bad], bad, classes, op.ignore_index);
  with_floating(op.name, scores.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    T* loss = reinterpret_cast<T*>(out[0].raw());
    std::vector<Sums> tiles(static_cast<std::size_t>((rows + rows_of_tile - 1) / rows_of_tile));
    parallel_for(rows, rows_of_tile, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; b += rows_of_tile)
        tiles[static_cast<std::size_t>(b / rows_of_tile)] = sum_of_rows<T, C>(
            op, scores.data<T>(), targets, data_or_null<C>(weight), b, std::min(b + rows_of_tile, end),
            classes, op.reduction == Reduction::none ? loss : nullptr);
    });
    Sums sums;
    for (const Sums& tile : tiles) sums.loss += tile.loss, sums.weight += tile.weight;
    *reinterpret_cast<C*>(out[1].raw()) = static_cast<C>(sums.weight);
    if (op.reduction == Reduction::mean) sums.loss /= sums.weight;
    if (op.reduction != Reduction::none) *loss = static_cast<T>(static_cast<C>(sums.loss));
  });
}

void nll_grad(const ops::NllGrad& op, Inputs in, Outputs out) {
  const std::int64_t rows = in[1].numel(), classes = op.classes;
  const std::int64_t* targets = in[1].data<std::int64_t>();
  const bool each = op.forward.reduction == Reduction::none;
  with_floating(op.name, op.dtype, [&]<class T>() {
    using C = compute_t<T>;
    const T* gy = in[0].data<T>();
    const C* weight = data_or_null<C>(in[3]);
    const C divisor = op.forward.reduction == Reduction::mean ? *in[2].data<C>() : C(1);
    T* gx = reinterpret_cast<T*>(out[0].raw());
    const std::int64_t grain = std::max<std::int64_t>(1, (1 << 15) / std::max<std::int64_t>(classes, 1));
    parallel_for(rows, grain, [&](std::int64_t begin, std::int64_t end) {
      std::fill(gx + begin * classes, gx + end * classes, T(C(0)));
      for (std::int64_t r = begin; r < end; ++r) {
        const std::int64_t t = targets[r];
        if (t == op.forward.ignore_index) continue;
        const C scale = -static_cast<C>(gy[each ? r : 0]) / divisor;
        gx[r * classes + t] = static_cast<T>(weight ? weight[t] * scale : scale);
      }
    });
  });
}

}  // namespace

void add_nll() {
  add_kernel<nll>(DeviceType::cpu);
  add_kernel<nll_grad>(DeviceType::cpu);
}

}  // namespace sherd::cpu
