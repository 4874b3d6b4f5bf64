// Running sums and products along the last axis.
#include "runtime/cuda/recurrence.h"

#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/recurrence.h"

namespace sherd::cuda {
namespace {

void recurrence(const ops::Recurrence& op, Inputs in, Outputs out) {
  const Tensor& b = in[0];
  if (b.numel() == 0) return;
  if (!is_floating(b.dtype()) && b.dtype() != DType::i64)
    return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  RecurrenceCall call;
  call.dtype = b.dtype();
  call.reverse = op.reverse;
  call.columns = b.shape().back();
  call.rows = b.numel() / call.columns;
  call.b = b.raw();
  call.a = raw_or_null(in[1]);
  call.h = out[0].raw();
  call.stream = stream_of(b.device());
  Tensor partial;
  if (const std::int64_t stretches = call.stretches(); stretches > 1) {
    const std::int64_t bytes = call.rows * stretches * RecurrenceCall::bytes_of_stretch;
    partial = empty(Shape{bytes / size_of(DType::i64)}, {DType::i64, b.device()});
    call.partial = partial.raw();
  }
  launch_recurrence(call);
  check_launch(op.name);
}

}  // namespace

void add_recurrence() { add_kernel<recurrence>(DeviceType::cuda); }

}  // namespace sherd::cuda
