#include "runtime/ops/softmax.h"

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
Specs Softmax::infer(SpecSpan in) const {
  check<DTypeError>(is_floating(in[0].dtype), "{}: takes floating dtypes, got {}; cast the input first",
                    log ? "log_softmax" : "softmax", name_of(in[0].dtype));
  return {in[0]};
}

Tensors Softmax::grad(const GradArgs& args) const {
  const Tensor in[] = {args.outputs[0], args.gy[0]};
  if (args.create_graph) return SoftmaxGrad{log}.reference(in);
  return {apply(SoftmaxGrad{log}, in[0], in[1])};
}

Tensors Softmax::reference(Inputs in) const {
  const Tensor& x = in[0];
  if (x.numel() == 0) return {clone(x)};
  if (x.rank() == 0) return {log ? sub(x, x) : div(x, x)};
  const Tensor shifted = sub(x, amax(x, {-1}, Keep::dims).detach());
  const Tensor total = sum(exp(shifted), {-1}, Keep::dims);
  return {log ? sub(shifted, sherd::log(total)) : div(exp(shifted), total)};
}

Tensors SoftmaxGrad::reference(Inputs in) const {
  const Tensor &y = in[0], &gy = in[1];
  const Shape last = y.rank() == 0 ? Shape{} : Shape{-1};
  if (log) return {sub(gy, mul(exp(y), sum(gy, last, Keep::dims)))};
  return {mul(y, sub(gy, sum(mul(gy, y), last, Keep::dims)))};
}

}  // namespace ops

namespace {
/// The kernel works along the last axis; others are moved there and back.
Tensor along(const Tensor& x, std::int64_t axis, bool log) {
  const int at = normalize_axis("softmax", axis, x.rank());
  if (x.rank() == 0 || at == x.rank() - 1) return apply(ops::Softmax{log}, x);
  return transpose(apply(ops::Softmax{log}, transpose(x, at, -1)), at, -1);
}
}  // namespace

Tensor softmax(const Tensor& x, std::int64_t axis) {
  detail::check_given("softmax", x);
  return along(x, axis, false);
}
Tensor log_softmax(const Tensor& x, std::int64_t axis) {
  detail::check_given("log_softmax", x);
  return along(x, axis, true);
}

}  // namespace sherd
