// Random draws by weight.
#include "runtime/ops/multinomial.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "runtime/ops.h"
#include "runtime/parallel.h"
#include "runtime/random.h"
#include "runtime/replay.h"

namespace sherd::cpu {
namespace {

/// The sum of a row of `n` weights, or ValueError; running sums go to `running`, if there is one.
double total_of(const double* w, std::int64_t n, std::int64_t row, double* running = nullptr) {
  double total = 0;
  for (std::int64_t j = 0; j < n; ++j) {
    if (!(w[j] >= 0 && w[j] <= std::numeric_limits<double>::max()))
      fail<ValueError>("multinomial: weight {} at {} of row {} is not a finite number >= 0", w[j], j, row);
    total += w[j];
    if (running) running[j] = total;
  }
  check<ValueError>(std::isfinite(total),
                    "multinomial: the weights of row {} add up to more than f64 holds; scale them", row);
  check<ValueError>(total > 0, "multinomial: the weights of row {} are all zero", row);
  return total;
}

void multinomial(const ops::Multinomial& op, Inputs in, Outputs out) {
  const Tensor weights = to(in[0], DType::f64);
  const std::int64_t columns = weights.shape().back();
  auto* chosen = reinterpret_cast<std::int64_t*>(out[0].raw());
  const RandomKey key = key_to_draw(op.key);
  for (std::int64_t row = 0; row < out[0].numel(); ++row) {
    const double* w = weights.data<double>() + row * columns;
    const double total = total_of(w, columns, row);
    const std::uint64_t counter = key.offset + static_cast<std::uint64_t>(row / 4);
    const double share = uniform_numbers(key.seed, counter)[static_cast<int>(row % 4)] * total;
    double running = 0;
    std::int64_t last = 0;  // rounding may leave the share at the very end: then the last possible index
    for (std::int64_t j = 0; j < columns; ++j) {
      if (w[j] <= 0) continue;
      last = j;
      running += w[j];
      if (running > share) break;
    }
    chosen[row] = last;
  }
}

/// `count` draws of each row with replacement: each is found among the running sums by halves.
void draw_with_replacement(RandomKey key, const Tensor& weights, std::int64_t count, std::int64_t* chosen) {
  const std::int64_t columns = weights.shape().back(), rows = weights.numel() / columns;
  std::vector<double> running(static_cast<std::size_t>(columns));
  for (std::int64_t row = 0; row < rows; ++row) {
    const double* w = weights.data<double>() + row * columns;
    const double total = total_of(w, columns, row, running.data());
    std::int64_t last = columns - 1;
    while (w[last] <= 0) --last;
    parallel_for(count, 1 << 10, [&](std::int64_t begin, std::int64_t end) {
      UniformNumbers four{};
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t number = row * count + i;
        if (i == begin || number % 4 == 0)
          four = uniform_numbers(key.seed, key.offset + static_cast<std::uint64_t>(number / 4));
        const double share = four[static_cast<int>(number % 4)] * total;
        const auto above = std::upper_bound(running.begin(), running.end(), share);
        chosen[number] = std::min<std::int64_t>(above - running.begin(), last);
      }
    });
  }
}

void many_draws(const ops::ManyDraws& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor weights = to(in[0], DType::f64);
  if (op.replace)
    return draw_with_replacement(key_to_draw(op.key), weights, op.count,
                                 reinterpret_cast<std::int64_t*>(out[0].raw()));
  const std::int64_t columns = weights.shape().back();
  for (std::int64_t row = 0; row < weights.numel() / columns; ++row) {
    const double* w = weights.data<double>() + row * columns;
    total_of(w, columns, row);
    const auto some = std::count_if(w, w + columns, [](double x) { return x > 0; });
    check<ValueError>(some >= op.count,
                      "multinomial: {} draws without replacement, but row {} has {} weights above 0",
                      op.count, row, some);
  }
  copy_(alias(out[0], out[0].layout()), op.reference(in)[0]);
}

}  // namespace

void add_multinomial() {
  add_kernel<multinomial>(DeviceType::cpu);
  add_kernel<many_draws>(DeviceType::cpu);
}

}  // namespace sherd::cpu
