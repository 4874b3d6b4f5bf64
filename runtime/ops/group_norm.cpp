#include "runtime/ops/group_norm.h"

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/layer_norm.h"

namespace sherd {
namespace {

/// A tensor of each channel as it broadcasts against x, or one of each group against rows of groups.
Tensor per_channel(const Tensor& t, const Tensor& x) {
  Shape along{t.numel()};
  for (int i = 2; i < x.rank(); ++i) along.push_back(1);
  return reshape(t, along);
}

}  // namespace

namespace ops {

Specs GroupNorm::infer(SpecSpan in) const {
  const Spec& x = in[0];
  check<DTypeError>(is_floating(x.dtype), "group_norm: takes floating dtypes, got {}", name_of(x.dtype));
  check<ShapeError>(x.shape.rank() >= 2, "group_norm: input (N, C, ...), got shape {}", x.shape);
  const std::int64_t channels = x.shape[1];
  const DType wide = compute_dtype(x.dtype);
  check<ValueError>(groups > 0 && channels % groups == 0, "group_norm: {} groups do not divide {} channels",
                    groups, channels);
  for (const Spec& t : {in[1], in[2]})
    check<ShapeError>(t.is_none() || (t.shape == Shape{channels} && t.dtype == wide),
                      "group_norm: weight or bias of shape {} and {} for {} channels in {}", t.shape,
                      name_of(t.dtype), channels, name_of(wide));
  const Spec rows{{x.shape[0] * groups}, wide, x.device};
  return {x, rows, rows};
}

Tensors GroupNorm::grad(const GradArgs& args) const {
  if (args.create_graph) return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor in[] = {args.gy[0], args.inputs[0], args.inputs[1], args.outputs[1], args.outputs[2]};
  Tensors grads = apply_many(GroupNormGrad{}, in);
  for (std::size_t i = 0; i < 3; ++i)
    if (!args.need(i)) grads[i] = {};
  return grads;
}

Tensors GroupNorm::reference(Inputs in) const {
  const Tensor x = detail::to_compute_dtype(in[0]);  // so that 16-bit floats are rounded once
  const std::int64_t rows = x.shape()[0] * groups;
  const Tensor lines[] = {reshape(x, {rows, x.numel() / std::max<std::int64_t>(rows, 1)}), {}, {}};
  const Tensors normal = apply_many(LayerNorm{eps}, lines);
  Tensor y = reshape(normal[0], x.shape());
  if (in[1].defined()) y = mul(y, per_channel(in[1], x));
  if (in[2].defined()) y = add(y, per_channel(in[2], x));
  return {to(y, in[0].dtype()), normal[1], normal[2]};
}

Specs GroupNormGrad::infer(SpecSpan in) const {
  const Spec channels{{in[1].shape[1]}, in[3].dtype, in[1].device};
  return {in[1], channels, channels};
}

Tensors GroupNormGrad::reference(Inputs in) const {
  const DType wide = in[3].dtype();
  const Tensor gy = to(in[0], wide), x = to(in[1], wide);
  const std::int64_t rows = in[3].numel(), n = x.shape()[0], channels = x.shape()[1];
  const Shape lines{rows, x.numel() / std::max<std::int64_t>(rows, 1)};
  const Tensor g = in[2].defined() ? mul(gy, per_channel(in[2], x)) : gy;
  const Tensor grad[] = {reshape(g, lines), reshape(x, lines), {}, in[3], in[4], {}};
  const Tensor gx = apply_many(LayerNormGrad{}, grad)[0];
  const Tensor normal = mul(sub(reshape(x, lines), unsqueeze(in[3], 1)), unsqueeze(in[4], 1));
  const Shape planes{n, channels, x.numel() / std::max<std::int64_t>(n * channels, 1)};
  const auto sums = [&](const Tensor& t) { return sum(reshape(t, planes), {0, 2}); };
  return {to(reshape(gx, x.shape()), in[1].dtype()), sums(mul(gy, reshape(normal, x.shape()))), sums(gy)};
}

}  // namespace ops

Tensor group_norm(const Tensor& x, std::int64_t groups, const Tensor& weight, const Tensor& bias,
                  double eps) {
  detail::check_given("group_norm", x);
  const auto wide = [&](const Tensor& t) { return t.defined() ? to(t, compute_dtype(x.dtype())) : t; };
  const Tensor in[] = {x, wide(weight), wide(bias)};
  return apply_many(ops::GroupNorm{groups, eps}, in)[0];
}

}  // namespace sherd
