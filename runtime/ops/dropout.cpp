#include "runtime/ops/dropout.h"

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/random.h"

namespace sherd {
namespace ops {

Specs Dropout::infer(SpecSpan in) const {
  check<DTypeError>(is_floating(in[0].dtype), "dropout: takes floating dtypes, got {}; cast the input first",
                    name_of(in[0].dtype));
  return {in[0]};
}

Tensors Dropout::reference(Inputs in) const {
  const Tensor& x = in[0];
  const Tensor uniform = apply(Uniform{{x.shape(), DType::f32, x.device()}, key, 0, 1});
  const Tensor scaled = mul(x, p < 1 ? 1 / (1 - p) : 0.0), zero = Tensor::scalar(0, {x.dtype(), x.device()});
  return {where(less(uniform, p), zero, scaled)};
}

// The same mask on the gradient; linear, so it is its own derivative.
Tensors Dropout::grad(const GradArgs& args) const { return {apply(*this, args.gy[0])}; }

}  // namespace ops

Tensor dropout(const Tensor& x, double p) {
  detail::check_given("dropout", x);
  check<ValueError>(p >= 0 && p <= 1, "dropout: probability {} is outside [0, 1]", p);
  if (p == 0) return x;
  return apply(ops::Dropout{p, Context::current().generator().reserve(x.numel())}, x);
}

}  // namespace sherd
