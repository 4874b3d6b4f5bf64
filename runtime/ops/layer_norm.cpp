#include "runtime/ops/layer_norm.h"

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/sum.h"

namespace sherd {
namespace ops {
Specs LayerNorm::infer(SpecSpan in) const {
  const Spec& x = in[0];
  check<DTypeError>(is_floating(x.dtype), "layer_norm: takes floating dtypes, got {}; cast the input first",
                    name_of(x.dtype));
  check<ShapeError>(x.shape.rank() >= 1, "layer_norm: a 0-d tensor has no axis to normalise");
  const std::int64_t n = x.shape.back();
  for (int i = 1; i < 3; ++i) {
    if (in[static_cast<std::size_t>(i)].is_none()) continue;
    const Spec& p = in[static_cast<std::size_t>(i)];
    check<DTypeError>(p.dtype == x.dtype, "layer_norm: input is {} and its {} {}; cast one of them",
                      name_of(x.dtype), i == 1 ? "weight" : "bias", name_of(p.dtype));
    check<ShapeError>(p.shape == Shape{n}, "layer_norm: {} of shape {} for {} columns",
                      i == 1 ? "weight" : "bias", p.shape, n);
  }
  Spec rows{x.shape, x.dtype == DType::f64 ? DType::f64 : DType::f32, x.device};
  rows.shape.erase(rows.shape.rank() - 1);
  return {x, rows, rows};
}

Tensors LayerNorm::grad(const GradArgs& args) const {
  if (args.create_graph) return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor in[] = {args.gy[0],      args.inputs[0],
                       args.inputs[1],  args.outputs[1],
                       args.outputs[2], args.beside.so_far.empty() ? Tensor() : args.beside.so_far[0]};
  Tensors grads;
  if (args.beside.gx_sums != nullptr && args.inputs[0].rank() > 1) {
    grads = apply_many(LayerNormGradSums{}, in);
    *args.beside.gx_sums = grads[3];
    grads.resize(3);
  } else {
    grads = apply_many(LayerNormGrad{}, in);
  }
  for (std::size_t i = 0; i < 3; ++i)
    if (!args.need(i)) grads[i] = {};
  return grads;
}

Tensors LayerNorm::reference(Inputs in) const {
  const Tensor x = detail::to_compute_dtype(in[0]);
  const auto wide = [&](const Tensor& t) { return to(t, x.dtype()); };
  const Tensor about = sherd::mean(x, {-1}, Keep::dims);
  // The mean again from the deviations, so that equal numbers deviate by nothing.
  const Tensor mean = add(about, sherd::mean(sub(x, about), {-1}, Keep::dims)), centred = sub(x, mean);
  const Tensor rstd = rsqrt(add(sherd::mean(square(centred), {-1}, Keep::dims), eps));
  Tensor y = mul(centred, rstd);
  if (in[1].defined()) y = mul(y, wide(in[1]));
  if (in[2].defined()) y = add(y, wide(in[2]));
  return {to(y, in[0].dtype()), squeeze(mean, -1), squeeze(rstd, -1)};
}

Specs LayerNormGrad::infer(SpecSpan in) const {
  const Spec affine{{in[1].shape.back()}, in[1].dtype, in[1].device};
  return {in[1], affine, affine};
}

Tensors LayerNormGrad::reference(Inputs in) const {
  const DType narrow = in[1].dtype(), wide = in[3].dtype();
  const Tensor gy = to(in[0], wide), rstd = unsqueeze(in[4], -1);
  const Tensor normal = mul(sub(to(in[1], wide), unsqueeze(in[3], -1)), rstd);
  const Tensor g = in[2].defined() ? mul(gy, to(in[2], wide)) : gy;
  const auto along = [](const Tensor& t) { return mean(t, {-1}, Keep::dims); };
  Tensor gx = mul(sub(sub(g, along(g)), mul(normal, along(mul(g, normal)))), rstd);
  if (in[5].defined()) gx = add(gx, to(in[5], wide));
  const std::int64_t columns = in[1].shape().back(), rows = columns == 0 ? 0 : in[1].numel() / columns;
  const auto down = [&](const Tensor& t) { return to(sum(reshape(t, {rows, columns}), {0}), narrow); };
  return {to(gx, narrow), down(mul(gy, normal)), down(gy)};
}

Specs LayerNormGradSums::infer(SpecSpan in) const {
  Specs specs = LayerNormGrad{}.infer(in);
  specs.push_back(specs[1]);
  return specs;
}

void LayerNormGradSums::run(Inputs in, Outputs out) const {
  run_again(OpModel<LayerNormGrad>(LayerNormGrad{}), in, out.first(3));
  const Mask all_but_last = bit(static_cast<std::size_t>(in[1].rank() - 1)) - 1;
  run_again(OpModel<Sum>(Sum{{.axes = all_but_last}}), Inputs(&out[0], 1), out.subspan(3));
}

}  // namespace ops

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  detail::check_given("layer_norm", x);
  const Tensor in[] = {x, weight, bias};
  return apply_many(ops::LayerNorm{eps}, in)[0];
}

}  // namespace sherd
