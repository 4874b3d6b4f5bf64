// A linear layer's GELU, and its gradient with that of the bias in one pass.
#include "runtime/cuda/gelu_sums.h"

#include "runtime/apply.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/linear.h"
#include "runtime/ops/linear_gelu.h"

namespace sherd::cuda {
namespace {

void linear_gelu(const ops::LinearGelu& op, Inputs in, Outputs out) {
  const Tensor& y = out[0];
  if (size_of(y.dtype()) != 2 || y.numel() == 0) return op.run(in, out);
  const Tensor all[] = {in[0], in[1], in[2], {}};
  run_again(OpModel<ops::Linear>(ops::Linear{}), all, Outputs(&out[1], 1));
  launch_narrow_gelu(y.dtype(), out[1].raw(), y.raw(), y.numel(), stream_of(y.device()));
  check_launch(op.name);
}

void gelu_grad_sums(const ops::GeluGradSums& op, Inputs in, Outputs out) {
  const Tensor& x = in[1];
  GeluSumsCall call;
  call.dtype = x.dtype();
  call.rows = x.shape()[0];
  call.columns = x.shape()[1];
  if (call.columns == 0) return;
  call.gy = in[0].raw();
  call.x = x.raw();
  call.gx = out[0].raw();
  call.sums = out[1].raw();
  call.stream = stream_of(x.device());
  const Tensor partial = empty(Shape{call.parts(), call.columns}, {compute_dtype(x.dtype()), x.device()});
  call.partial = partial.raw();
  launch_gelu_sums(call);
  check_launch(op.name);
}

}  // namespace

void add_gelu_sums() {
  add_kernel<linear_gelu>(DeviceType::cuda);
  add_kernel<gelu_grad_sums>(DeviceType::cuda);
}

}  // namespace sherd::cuda
