// Running sums and products along the last axis.
#include "runtime/cuda/recurrence.h"

#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/recurrence.h"

namespace sherd::cuda {
namespace {

template <class O>
void run(const O& op, Inputs in, const Tensor& b, const Tensor& a, bool reverse, Outputs out) {
  const Tensor& h = out[0];
  if (h.numel() == 0) return;
  if (!is_floating(h.dtype()) && h.dtype() != DType::i64)
    return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  RecurrenceCall call;
  call.dtype = h.dtype();
  call.reverse = reverse;
  call.columns = h.shape().back();
  call.rows = h.numel() / call.columns;
  call.b = raw_or_null(b);
  call.a = raw_or_null(a);
  call.h = h.raw();
  call.stream = stream_of(h.device());
  Tensor partial;
  if (const std::int64_t stretches = call.stretches(); stretches > 1) {
    const std::int64_t bytes = call.rows * stretches * RecurrenceCall::bytes_of_stretch;
    partial = empty(Shape{bytes / size_of(DType::i64)}, {DType::i64, h.device()});
    call.partial = partial.raw();
  }
  launch_recurrence(call);
  check_launch(op.name);
}

void recurrence(const ops::Recurrence& op, Inputs in, Outputs out) {
  run(op, in, in[0], in[1], op.reverse, out);
}
void running_product(const ops::RunningProduct& op, Inputs in, Outputs out) {
  run(op, in, {}, in[0], false, out);
}

}  // namespace

void add_recurrence() {
  add_kernel<recurrence>(DeviceType::cuda);
  add_kernel<running_product>(DeviceType::cuda);
}

}  // namespace sherd::cuda
