#include "runtime/ops/linear_gelu.h"

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/gelu.h"
#include "runtime/ops/linear.h"
#include "runtime/ops/matmul.h"
#include "runtime/ops/sum.h"

namespace sherd {
namespace ops {
namespace {

/// Computes `op` into `out`.
template <class O>
void into(const O& op, Inputs in, Tensor& out) {
  run_again(OpModel<O>(op), in, Outputs(&out, 1));
}

}  // namespace

Specs LinearGelu::infer(SpecSpan in) const {
  const Spec all[] = {in[0], in[1], in[2], Spec::none()};
  const Spec out = Linear{}.infer(all)[0];
  return {out, out};
}

void LinearGelu::run(Inputs in, Outputs out) const {
  const Tensor all[] = {in[0], in[1], in[2], {}};
  into(Linear{}, all, out[1]);
  into(Gelu{}, Inputs(&out[1], 1), out[0]);
}

Tensors LinearGelu::grad(const GradArgs& args) const {
  if (args.create_graph) return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Shape &x_shape = args.specs[0].shape, &w_shape = args.specs[1].shape;
  const std::int64_t rows = rows_of(x_shape);
  const Shape flat{rows, w_shape[0]};
  const Tensor gy = reshape(args.gy[0], flat), before = reshape(args.outputs[1], flat);
  Tensor g, sums;
  if (args.need(2)) {
    const Tensor in[] = {gy, before};
    Tensors both = apply_many(GeluGradSums{}, in);
    g = both[0];
    sums = both[1];
  } else {
    g = apply(ElementwiseGrad<Gelu, 0>{}, gy, before);
  }
  Tensors grads(3);
  if (args.need(0)) grads[0] = reshape(apply(MatMul{}, g, args.inputs[1]), x_shape);
  if (args.need(1)) grads[1] = apply(MatMul{true, false}, g, reshape(args.inputs[0], {rows, w_shape[1]}));
  grads[2] = sums;
  return grads;
}

Tensors LinearGelu::reference(Inputs in) const {
  const Tensor y = linear(in[0], in[1], in[2]);
  return {gelu(y), y};
}

Specs GeluGradSums::infer(SpecSpan in) const {
  return {in[1], {{in[1].shape[1]}, in[1].dtype, in[1].device}};
}

void GeluGradSums::run(Inputs in, Outputs out) const {
  into(ElementwiseGrad<Gelu, 0>{}, in, out[0]);
  into(Sum{{.axes = 0b1}}, Inputs(&out[0], 1), out[1]);
}

}  // namespace ops

Tensor linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  detail::check_given("linear_gelu", x, weight);
  const Tensor in[] = {x, weight, bias};
  return apply_many(ops::LinearGelu{}, in)[0];
}

}  // namespace sherd
