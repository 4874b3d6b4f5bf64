#include "runtime/ops/multinomial.h"

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/random.h"

namespace sherd {
namespace ops {

namespace {

void check_weights(const Spec& weights) {
  check<DTypeError>(is_floating(weights.dtype), "multinomial: weights must be floating, got {}",
                    name_of(weights.dtype));
  check<ShapeError>(weights.shape.rank() >= 1 && weights.shape.back() > 0,
                    "multinomial: weights of shape {} leave nothing to draw", weights.shape);
}

}  // namespace

Specs Multinomial::infer(SpecSpan in) const {
  check_weights(in[0]);
  Spec out = in[0];
  out.dtype = DType::i64;
  out.shape.erase(out.shape.rank() - 1);
  return {out};
}

Specs ManyDraws::infer(SpecSpan in) const {
  check_weights(in[0]);
  Spec out = in[0];
  check<ValueError>(count >= 0, "multinomial: {} draws", count);
  check<ValueError>(replace || count <= out.shape.back(),
                    "multinomial: {} draws without replacement of {} weights", count, out.shape.back());
  out.dtype = DType::i64;
  out.shape[out.shape.rank() - 1] = count;
  return {out};
}

Tensors ManyDraws::reference(Inputs in) const {
  const Tensor& weights = in[0];
  const Shape& shape = weights.shape();
  if (replace) {
    Shape repeated = shape;
    repeated.insert(repeated.rank() - 1, count);
    return {apply(Multinomial{key}, expand(unsqueeze(weights, -2), repeated))};
  }
  // Two words a weight: 24 bits would often be equal, or zero.
  Shape both = shape;
  both.insert(0, 2);
  const Tensor bits = to(apply(Uniform{{both, DType::f32, weights.device()}, key, 0, 1}), DType::f64);
  const Tensor uniform = add(add(select(bits, 0, 0), mul(select(bits, 0, 1), 0x1p-24)), 0x1p-49);
  return {contiguous(topk(div(to(weights, DType::f64), neg(log(uniform))), count).indices)};
}

}  // namespace ops

Tensor multinomial(const Tensor& weights) {
  detail::check_given("multinomial", weights);
  check<ShapeError>(weights.rank() >= 1 && weights.shape().back() > 0,
                    "multinomial: weights of shape {} leave nothing to draw", weights.shape());
  const std::int64_t rows = weights.numel() / weights.shape().back();
  return apply(ops::Multinomial{Context::current().generator().reserve(rows)}, weights);
}

Tensor multinomial(const Tensor& weights, std::int64_t count, Replacement replacement) {
  detail::check_given("multinomial", weights);
  ops::ManyDraws op{count, replacement == Replacement::with};
  op.infer(Specs{weights.spec()});
  std::int64_t words = 0;
  const bool fits = op.replace
                        ? !__builtin_mul_overflow(weights.numel() / weights.shape().back(), count, &words)
                        : !__builtin_mul_overflow(weights.numel(), 2, &words);
  check<ShapeError>(fits, "multinomial: {} draws of shape {} are more than can be counted", count,
                    weights.shape());
  op.key = Context::current().generator().reserve(words);
  return apply(op, weights);
}

}  // namespace sherd
