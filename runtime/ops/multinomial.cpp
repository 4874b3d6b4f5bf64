#include "runtime/ops/multinomial.h"

#include <cmath>

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/random.h"

namespace sherd {
namespace ops {

Specs Multinomial::infer(SpecSpan in) const {
  check<DTypeError>(is_floating(in[0].dtype), "multinomial: weights must be floating, got {}",
                    name_of(in[0].dtype));
  check<ShapeError>(in[0].shape.rank() >= 1 && in[0].shape.back() > 0,
                    "multinomial: weights of shape {} leave nothing to draw", in[0].shape);
  Spec out = in[0];
  out.dtype = DType::i64;
  out.shape.erase(out.shape.rank() - 1);
  return {out};
}

void Multinomial::run(Cpu, Inputs in, Outputs out) const {
  const Tensor weights = to(contiguous(in[0]), DType::f64);
  const std::int64_t columns = weights.shape().back();
  auto* chosen = reinterpret_cast<std::int64_t*>(out[0].raw());
  for (std::int64_t row = 0; row < out[0].numel(); ++row) {
    const double* w = weights.data<double>() + row * columns;
    double total = 0;
    for (std::int64_t j = 0; j < columns; ++j) {
      check<ValueError>(w[j] >= 0 && std::isfinite(w[j]),
                        "multinomial: weight {} at {} of row {} is not a finite number >= 0", w[j], j, row);
      total += w[j];
    }
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

}  // namespace ops

Tensor multinomial(const Tensor& weights) {
  check<ShapeError>(weights.rank() >= 1 && weights.shape().back() > 0,
                    "multinomial: weights of shape {} leave nothing to draw", weights.shape());
  const std::int64_t rows = weights.numel() / weights.shape().back();
  return apply(ops::Multinomial{Context::current().generator().reserve(rows)}, weights);
}

}  // namespace sherd
