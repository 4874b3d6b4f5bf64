#include "runtime/ops/multinomial.h"

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/ops.h"

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

}  // namespace ops

Tensor multinomial(const Tensor& weights) {
  check<ShapeError>(weights.rank() >= 1 && weights.shape().back() > 0,
                    "multinomial: weights of shape {} leave nothing to draw", weights.shape());
  const std::int64_t rows = weights.numel() / weights.shape().back();
  return apply(ops::Multinomial{Context::current().generator().reserve(rows)}, weights);
}

}  // namespace sherd
