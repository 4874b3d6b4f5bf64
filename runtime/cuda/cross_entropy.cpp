// Cross entropy against class indices.
#include "runtime/ops/cross_entropy.h"

#include "runtime/cuda/cross_entropy.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

RowLosses form_of(Reduction reduction) {
  return reduction == Reduction::mean  ? RowLosses::mean
         : reduction == Reduction::sum ? RowLosses::sum
                                       : RowLosses::each;
}

/// Dense logits, and, if the loss is to have the bits of wider ones, aligned as those would be.
Tensor dense_logits(const Tensor& logits, DType loss) {
  const std::uintptr_t wide = loss == logits.dtype() ? 1 : 16;
  return logits.is_contiguous() && reinterpret_cast<std::uintptr_t>(logits.raw()) % wide == 0 ? logits
                                                                                              : clone(logits);
}

/// The call; the loss goes to `loss`.
CrossEntropyCall call_of(const ops::CrossEntropy& op, const Tensor& logits, const Tensor& targets,
                         const Tensor& loss, const Tensor& count, const Tensor& row_loss) {
  CrossEntropyCall call;
  call.dtype = logits.dtype();
  call.loss_dtype = loss.dtype();
  call.form = form_of(op.reduction);
  call.ignore_index = op.ignore_index;
  call.rows = logits.shape()[0];
  call.columns = logits.shape()[1];
  call.logits = logits.raw();
  call.targets = reinterpret_cast<const std::int64_t*>(targets.raw());
  call.loss = loss.raw();
  call.count = count.raw();
  call.row_loss = row_loss.raw();
  DeviceState& state = state_of(logits.device());
  call.faults = state.faults();
  call.stream = state.stream();
  return call;
}

void cross_entropy(const ops::CrossEntropy& op, Inputs in, Outputs out) {
  const Tensor logits = dense_logits(in[0], out[0].dtype()), targets = contiguous(in[1]),
               row_loss = empty({in[0].shape()[0]}, {out[1].dtype(), in[0].device()});
  CrossEntropyCall call = call_of(op, logits, targets, out[0], out[2], row_loss);
  call.normalizers = out[1].raw();
  launch_cross_entropy(call);
  check_launch(op.name);
}

void cross_entropy_in_place(const ops::CrossEntropyInPlace& op, Inputs in, Outputs out) {
  const Tensor& logits = in[0];
  const TensorOptions wide{compute_dtype(logits.dtype()), logits.device()};
  const Tensor count = empty({}, wide), row_loss = empty({logits.shape()[0]}, wide);
  const CrossEntropyCall call = call_of(op.forward, logits, in[1], out[1], count, row_loss);
  if (!one_pass(call)) return op.run(in, out);
  launch_cross_entropy_over(call);
  check_launch(op.name);
}

void scale_unless_one(const ops::ScaleUnlessOne& op, Inputs in, Outputs) {
  if (in[0].numel() == 0) return;
  launch_scale_unless_one(in[0].dtype(), in[1].dtype(), in[0].raw(), in[1].raw(), in[0].numel(),
                          stream_of(in[0].device()));
  check_launch(op.name);
}

void cross_entropy_grad(const ops::CrossEntropyGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor gy = contiguous(in[0]), logits = contiguous(in[1]), targets = contiguous(in[2]);
  launch_cross_entropy_grad({logits.dtype(), gy.dtype(), form_of(op.forward.reduction),
                             op.forward.ignore_index, logits.shape()[0], logits.shape()[1], gy.raw(),
                             logits.raw(), reinterpret_cast<const std::int64_t*>(targets.raw()), in[3].raw(),
                             in[4].raw(), out[0].raw(), stream_of(logits.device())});
  check_launch(op.name);
}

void cross_entropy_grad_in_place(const ops::CrossEntropyGradInPlace& op, Inputs in, Outputs) {
  Tensor over[] = {in[1]};
  cross_entropy_grad(op.grad, in, over);
}

}  // namespace

void add_cross_entropy() {
  add_kernel<cross_entropy>(DeviceType::cuda);
  add_kernel<cross_entropy_grad>(DeviceType::cuda);
  add_kernel<cross_entropy_grad_in_place>(DeviceType::cuda);
  add_kernel<cross_entropy_in_place>(DeviceType::cuda);
  add_kernel<scale_unless_one>(DeviceType::cuda);
}

}  // namespace sherd::cuda
