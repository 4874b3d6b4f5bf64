// RMS normalisation; its kernels are layer normalisation's.
#include "runtime/ops/rms_norm.h"

#include "runtime/cuda/layer_norm.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

void rms_norm(const ops::RmsNorm& op, Inputs in, Outputs out) {
  const Tensor& x = in[0];
  if (x.numel() == 0) return;
  LayerNormCall call;
  call.dtype = x.dtype();
  call.columns = x.shape().back();
  call.rows = x.numel() / call.columns;
  call.x = x.raw();
  call.weight = raw_or_null(in[1]);
  call.eps = op.eps;
  call.y = out[0].raw();
  call.rstd = out[1].raw();
  call.stream = stream_of(x.device());
  launch_layer_norm(call);
  check_launch(op.name);
}

void rms_norm_grad(const ops::RmsNormGrad& op, Inputs in, Outputs out) {
  const Tensor& x = in[1];
  LayerNormGradCall call;
  call.dtype = x.dtype();
  call.columns = x.shape().back();
  if (call.columns == 0) return;
  call.rows = x.numel() / call.columns;
  call.gy = in[0].raw();
  call.x = x.raw();
  call.weight = raw_or_null(in[2]);
  call.rstd = in[3].raw();
  call.more = raw_or_null(in[4]);
  call.gx = out[0].raw();
  call.gweight = out[1].raw();
  call.stream = stream_of(x.device());
  const Tensor partial = empty(Shape{call.parts(), call.kinds(), call.columns}, {in[3].dtype(), x.device()});
  call.partial = partial.raw();
  launch_layer_norm_grad(call);
  check_launch(op.name);
}

}  // namespace

void add_rms_norm() {
  add_kernel<rms_norm>(DeviceType::cuda);
  add_kernel<rms_norm_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
