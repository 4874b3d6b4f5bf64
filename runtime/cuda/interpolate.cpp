// Scaling of images.
#include "runtime/ops/interpolate.h"

#include "runtime/cuda/interpolate.h"
#include "runtime/cuda/rank.h"

namespace sherd::cuda {
namespace {

template <class Op>
InterpolateCall describe(const Op& op, const Tensor& from, const Tensor& to) {
  return {from.dtype(),          op.down, op.across, from.shape()[0] * from.shape()[1], from.raw(), to.raw(),
          stream_of(to.device())};
}

void interpolate(const ops::Interpolate& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  launch_interpolate(describe(op, in[0], out[0]));
  check_launch(op.name);
}

void interpolate_grad(const ops::InterpolateGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  launch_interpolate_grad(describe(op, in[0], out[0]));
  check_launch(op.name);
}

}  // namespace

void add_interpolate() {
  add_kernel<interpolate>(DeviceType::cuda);
  add_kernel<interpolate_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
