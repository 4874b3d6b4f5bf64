// Random draws by weight.
#include "runtime/ops/multinomial.h"

#include <cmath>

#include "runtime/ops.h"
#include "runtime/random.h"
#include "runtime/replay.h"

namespace sherd::cpu {
namespace {

void multinomial(const ops::Multinomial& op, Inputs in, Outputs out) {
  const Tensor weights = to(in[0], DType::f64);
  const std::int64_t columns = weights.shape().back();
  auto* chosen = reinterpret_cast<std::int64_t*>(out[0].raw());
  const RandomKey key = key_to_draw(op.key);
  for (std::int64_t row = 0; row < out[0].numel(); ++row) {
    const double* w = weights.data<double>() + row * columns;
    double total = 0;
    for (std::int64_t j = 0; j < columns; ++j) {
      check<ValueError>(w[j] >= 0 && std::isfinite(w[j]),
                        "multinomial: weight {} at {} of row {} is not a finite number >= 0", w[j], j, row);
      total += w[j];
    }
    check<ValueError>(std::isfinite(total),
                      "multinomial: the weights of row {} add up to more than f64 holds; scale them", row);
    check<ValueError>(total > 0, "multinomial: the weights of row {} are all zero", row);
    const std::uint64_t counter = key.offset + static_cast<std::uint64_t>(row / 4);
    const double share = uniform_from(philox(key.seed, counter)[static_cast<int>(row % 4)]) * total;
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

}  // namespace

void add_multinomial() { add_kernel<multinomial>(DeviceType::cpu); }

}  // namespace sherd::cpu
