// Losses summed over all elements.
#include "runtime/ops/loss_total.h"

#include "runtime/cuda/loss_total.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

LossTotalCall describe(const ops::LossTotal& op, const Tensor& x, const Tensor& t) {
  return {x.dtype(), op.kind, op.mean, x.numel(), x.raw(), t.raw(), stream_of(x.device())};
}

void loss_total(const ops::LossTotal& op, Inputs in, Outputs out) {
  const LossTotalCall call = describe(op, in[0], in[1]);
  const Tensor partial = empty(Shape{call.chunks()}, {DType::f64, in[0].device()});
  launch_loss_total(call, reinterpret_cast<double*>(partial.raw()), out[0].raw());
  check_launch(op.name);
}

void loss_total_grad(const ops::LossTotalGrad& op, Inputs in, Outputs out) {
  if (in[1].numel() == 0) return;
  std::size_t next = 0;
  const auto room = [&](std::size_t i) { return has(op.needs, i) ? out[next++].raw() : nullptr; };
  void* const gx = room(0);
  void* const gt = room(1);
  launch_loss_total_grad(describe(op.forward, in[1], in[2]), in[0].raw(), gx, gt);
  check_launch(op.name);
}

}  // namespace

void add_loss_total() {
  add_kernel<loss_total>(DeviceType::cuda);
  add_kernel<loss_total_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
