#include "runtime/ops/rms_norm.h"

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {

Specs RmsNorm::infer(SpecSpan in) const {
  const Spec& x = in[0];
  check<DTypeError>(is_floating(x.dtype), "rms_norm: takes floating dtypes, got {}; cast the input first",
                    name_of(x.dtype));
  check<ShapeError>(x.shape.rank() >= 1, "rms_norm: a 0-d tensor has no axis to normalise");
  if (const Spec& weight = in[1]; !weight.is_none()) {
    check<DTypeError>(weight.dtype == x.dtype, "rms_norm: input is {} and its weight {}; cast one of them",
                      name_of(x.dtype), name_of(weight.dtype));
    check<ShapeError>(weight.shape == Shape{x.shape.back()}, "rms_norm: weight of shape {} for {} columns",
                      weight.shape, x.shape.back());
  }
  Spec rows{x.shape, compute_dtype(x.dtype), x.device};
  rows.shape.erase(rows.shape.rank() - 1);
  return {x, rows};
}

Tensors RmsNorm::grad(const GradArgs& args) const {
  if (args.create_graph) return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor in[] = {args.gy[0], args.inputs[0], args.inputs[1], args.outputs[1],
                       args.beside.so_far.empty() ? Tensor() : args.beside.so_far[0]};
  Tensors grads = apply_many(RmsNormGrad{}, in);
  for (std::size_t i = 0; i < 2; ++i)
    if (!args.need(i)) grads[i] = {};
  return grads;
}

Tensors RmsNorm::reference(Inputs in) const {
  const Tensor x = detail::to_compute_dtype(in[0]);
  const Tensor rstd = rsqrt(add(mean(square(x), {-1}, Keep::dims), eps));
  Tensor y = mul(x, rstd);
  if (in[1].defined()) y = mul(y, to(in[1], x.dtype()));
  return {to(y, in[0].dtype()), squeeze(rstd, -1)};
}

Specs RmsNormGrad::infer(SpecSpan in) const {
  return {in[1], {{in[1].shape.back()}, in[1].dtype, in[1].device}};
}

Tensors RmsNormGrad::reference(Inputs in) const {
  const DType narrow = in[1].dtype(), wide = in[3].dtype();
  const Tensor gy = to(in[0], wide), rstd = unsqueeze(in[3], -1), normal = mul(to(in[1], wide), rstd);
  const Tensor g = in[2].defined() ? mul(gy, to(in[2], wide)) : gy;
  Tensor gx = mul(sub(g, mul(normal, mean(mul(g, normal), {-1}, Keep::dims))), rstd);
  if (in[4].defined()) gx = add(gx, to(in[4], wide));
  const std::int64_t columns = in[1].shape().back(), rows = columns == 0 ? 0 : in[1].numel() / columns;
  return {to(gx, narrow), to(sum(reshape(mul(gy, normal), {rows, columns}), {0}), narrow)};
}

}  // namespace ops

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  detail::check_given("rms_norm", x);
  const Tensor in[] = {x, weight};
  return apply_many(ops::RmsNorm{eps}, in)[0];
}

}  // namespace sherd
