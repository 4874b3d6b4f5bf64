// Layer normalisation.
#include "runtime/ops/layer_norm.h"

#include "runtime/cuda/layer_norm.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

Tensor dense(const Tensor& t) { return t.defined() ? contiguous(t) : t; }
void layer_norm(const ops::LayerNorm& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor x = dense(in[0]), weight = dense(in[1]), bias = dense(in[2]);
  const std::int64_t columns = x.shape().back();
  launch_layer_norm({x.dtype(), x.numel() / columns, columns, x.raw(), raw_or_null(weight), raw_or_null(bias),
                     op.eps, out[0].raw(), out[1].raw(), out[2].raw(), stream_of(x.device())});
  check_launch(op.name);
}

void launch_grad(std::string_view op, Inputs in, Outputs out) {
  const Tensor gy = dense(in[0]), x = dense(in[1]), weight = dense(in[2]);
  LayerNormGradCall call;
  call.dtype = x.dtype();
  call.columns = x.shape().back();
  if (call.columns == 0) return;
  call.rows = x.numel() / call.columns;
  call.gy = gy.raw();
  call.x = x.raw();
  call.weight = raw_or_null(weight);
  const Tensor mean = dense(in[3]), rstd = dense(in[4]);
  call.mean = mean.raw();
  call.rstd = rstd.raw();
  const Tensor more = dense(in[5]);
  call.more = raw_or_null(more);
  call.gx = out[0].raw();
  call.gweight = out[1].raw();
  call.gbias = out[2].raw();
  if (out.size() > 3) call.sums = out[3].raw();
  call.stream = stream_of(x.device());
  const Tensor partial = empty(Shape{call.parts(), call.kinds(), call.columns}, {mean.dtype(), x.device()});
  call.partial = partial.raw();
  launch_layer_norm_grad(call);
  check_launch(op);
}

void layer_norm_grad(const ops::LayerNormGrad& op, Inputs in, Outputs out) { launch_grad(op.name, in, out); }
void layer_norm_grad_sums(const ops::LayerNormGradSums& op, Inputs in, Outputs out) {
  launch_grad(op.name, in, out);
}

}  // namespace

void add_layer_norm() {
  add_kernel<layer_norm>(DeviceType::cuda);
  add_kernel<layer_norm_grad>(DeviceType::cuda);
  add_kernel<layer_norm_grad_sums>(DeviceType::cuda);
}

}  // namespace sherd::cuda
