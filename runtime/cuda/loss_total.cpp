// Losses summed over all elements.
#include "runtime/cuda/loss_total.h"

#include "runtime/cuda/check.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

LossCall describe(bool mean, const Tensor& x, const Tensor& t) {
  return {x.dtype(), mean, x.numel(), x.raw(), t.raw(), stream_of(x.device())};
}

}  // namespace

void run_loss_total(std::string_view op, bool mean, Inputs in, Outputs out, const void* loss,
                    LaunchLoss launch) {
  const LossCall call = describe(mean, in[0], in[1]);
  const Tensor partial = empty(Shape{call.chunks()}, {DType::f64, in[0].device()});
  auto* const sums = reinterpret_cast<double*>(partial.raw());
  if (call.n > 0) check_cuda(launch(loss, call, sums), op);
  launch_join_chunks(call, sums, out[0].raw());
  check_launch(op);
}

void run_loss_total_grad(std::string_view op, bool mean, Mask needs, Inputs in, Outputs out, const void* loss,
                         LaunchLossGrad launch) {
  if (in[1].numel() == 0) return;
  std::size_t next = 0;
  const auto room = [&](std::size_t i) { return has(needs, i) ? out[next++].raw() : nullptr; };
  void* const gx = room(0);
  void* const gt = room(1);
  check_cuda(launch(loss, describe(mean, in[1], in[2]), in[0].raw(), gx, gt), op);
}

}  // namespace sherd::cuda
