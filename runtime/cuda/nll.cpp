// Negative log likelihood of class indices.
#include "runtime/ops/nll.h"

#include "runtime/cuda/nll.h"
#include "runtime/cuda/rank.h"

namespace sherd::cuda {
namespace {

NllCall describe(const ops::Nll& op, DType dtype, std::int64_t classes, const Tensor& targets,
                 const Tensor& weight) {
  DeviceState& state = state_of(targets.device());
  return {dtype,
          targets.numel(),
          classes,
          op.ignore_index,
          op.reduction == Reduction::mean,
          nullptr,
          data_or_null<std::int64_t>(targets),
          raw_or_null(weight),
          state.faults(),
          state.stream()};
}

void nll(const ops::Nll& op, Inputs in, Outputs out) {
  const Tensor& scores = in[0];
  NllCall call = describe(op, scores.dtype(), scores.shape()[1], in[1], in[2]);
  call.scores = scores.raw();
  const bool each = op.reduction == Reduction::none;
  const Tensor partial = empty(Shape{2 * call.blocks()}, {DType::f64, scores.device()});
  launch_nll(call, reinterpret_cast<double*>(partial.raw()), each ? nullptr : out[0].raw(),
             each ? out[0].raw() : nullptr, out[1].raw());
  check_launch(op.name);
}

void nll_grad(const ops::NllGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  launch_nll_grad(describe(op.forward, op.dtype, op.classes, in[1], in[3]), in[0].raw(),
                  op.forward.reduction == Reduction::none, in[2].raw(), out[0].raw());
  check_launch(op.name);
}

}  // namespace

void add_nll() {
  add_kernel<nll>(DeviceType::cuda);
  add_kernel<nll_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
