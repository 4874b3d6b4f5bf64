// One side of a diagonal.
#include "runtime/cuda/triangle.h"

#include "runtime/cuda/rank.h"
#include "runtime/ops/triangle.h"
#include "runtime/tensor.h"

namespace sherd::cuda {
namespace {

void triangle(const ops::Triangle& op, Inputs in, Outputs out) {
  const Tensor& x = in[0];
  if (x.numel() == 0) return;
  launch_triangle({x.numel(), x.shape()[x.rank() - 2], x.shape().back(), op.offset, op.lower,
                   size_of(x.dtype()), x.raw(), out[0].raw(), stream_of(x.device())});
  check_launch(op.name);
}

}  // namespace

void add_triangle() { add_kernel<triangle>(DeviceType::cuda); }

}  // namespace sherd::cuda
