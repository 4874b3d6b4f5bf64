// Softmax and its logarithm.
#include "runtime/ops/softmax.h"

#include "runtime/cuda/rank.h"
#include "runtime/cuda/softmax.h"
#include "runtime/ops.h"

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

}  // namespace

void add_softmax() {
  add_kernel<softmax>(DeviceType::cuda);
  add_kernel<softmax_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
