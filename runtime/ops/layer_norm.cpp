#include "runtime/ops/layer_norm.h"

#include "runtime/apply.h"
#include "runtime/cpu/norm.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
namespace {

template <class T>
const T* data_or_null(const Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}

Tensor dense(const Tensor& t) { return t.defined() ? contiguous(t) : t; }

}  // namespace

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

void LayerNorm::run(Cpu, Inputs in, Outputs out) const {
  if (out[0].numel() == 0) return;
  const Tensor x = dense(in[0]), weight = dense(in[1]), bias = dense(in[2]);
  const std::int64_t columns = x.shape().back();
  dispatch_floating(name, x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = compute_t<T>;
    cpu::layer_norm(x.data<T>(), data_or_null<T>(weight), data_or_null<T>(bias), eps, x.numel() / columns,
                    columns, reinterpret_cast<T*>(out[0].raw()), reinterpret_cast<C*>(out[1].raw()),
                    reinterpret_cast<C*>(out[2].raw()));
  });
}

Tensors LayerNorm::grad(const GradArgs& args) const {
  if (args.create_graph) return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor in[] = {args.gy[0], args.inputs[0], args.inputs[1], args.outputs[1], args.outputs[2]};
  Tensors grads = apply_many(LayerNormGrad{}, in);
  for (std::size_t i = 0; i < 3; ++i)
    if (!args.need(i)) grads[i] = {};
  return grads;
}

Tensors LayerNorm::reference(Inputs in) const {
  const Tensor& x = in[0];
  const Tensor centred = sub(x, mean(x, {-1}, Keep::dims));
  const Tensor variance = mean(square(centred), {-1}, Keep::dims);
  Tensor y = mul(centred, rsqrt(add(variance, eps)));
  if (in[1].defined()) y = mul(y, in[1]);
  return {in.size() > 2 && in[2].defined() ? add(y, in[2]) : y};
}

Specs LayerNormGrad::infer(SpecSpan in) const {
  const Spec affine{{in[1].shape.back()}, in[1].dtype, in[1].device};
  return {in[1], affine, affine};
}

void LayerNormGrad::run(Cpu, Inputs in, Outputs out) const {
  const Tensor gy = dense(in[0]), x = dense(in[1]), weight = dense(in[2]);
  const std::int64_t columns = x.shape().back(), rows = columns == 0 ? 0 : x.numel() / columns;
  dispatch_floating(name, x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = compute_t<T>;
    cpu::layer_norm_backward(gy.data<T>(), x.data<T>(), data_or_null<T>(weight), in[3].data<C>(),
                             in[4].data<C>(), rows, columns, reinterpret_cast<T*>(out[0].raw()),
                             reinterpret_cast<T*>(out[1].raw()), reinterpret_cast<T*>(out[2].raw()));
  });
}

}  // namespace ops

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const Tensor in[] = {x, weight, bias};
  return apply_many(ops::LayerNorm{eps}, in)[0];
}

}  // namespace sherd
