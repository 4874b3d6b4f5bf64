// Softmax and its logarithm.
#include "runtime/ops/softmax.h"

#include "runtime/cuda/rank.h"
#include "runtime/cuda/softmax.h"
#include "runtime/cuda/three_axes.h"
#include "runtime/ops.h"
#include "runtime/ops/sum.h"

namespace sherd::cuda {
namespace {

std::int64_t columns_of(const Tensor& x) { return x.rank() == 0 ? 1 : x.shape().back(); }

void softmax(const ops::Softmax& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  const std::int64_t columns = columns_of(x);
  launch_softmax(
      {x.dtype(), op.log, x.numel() / columns, columns, x.raw(), out[0].raw(), stream_of(x.device())});
  check_launch(op.name);
}

void softmax_grad(const ops::SoftmaxGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor y = contiguous(in[0]), gy = contiguous(in[1]);
  const std::int64_t columns = columns_of(y);
  launch_softmax_grad({y.dtype(), op.log, y.numel() / columns, columns, y.raw(), gy.raw(), out[0].raw(),
                       stream_of(y.device())});
  check_launch(op.name);
}

void logsumexp(const ops::LogSumExp& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  ThreeAxes three = as_three_axes(in[0], op.axes);
  if (three.reduce == 0) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  if (three.inner > 1)  // rows of what is summed
    three.x = contiguous(transpose(reshape(three.x, {three.outer, three.reduce, three.inner}), 1, 2));
  launch_logsumexp({three.x.dtype(), three.outer * three.inner, three.reduce, three.x.raw(), out[0].raw(),
                    stream_of(three.x.device())});
  check_launch(op.name);
}

}  // namespace

void add_softmax() {
  add_kernel<logsumexp>(DeviceType::cuda);
  add_kernel<softmax>(DeviceType::cuda);
  add_kernel<softmax_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
