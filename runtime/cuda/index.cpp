// Writing rows by their numbers.
#include "runtime/cuda/index.h"

#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/index.h"

namespace sherd::cuda {
namespace {

void write_rows(const ops::WriteRows& op, Inputs in, Outputs out) {
  const Tensor index = contiguous(in[1]), values = contiguous(in[2]);
  if (values.numel() == 0) return;
  const Tensor table = out[0].is_contiguous() ? out[0] : clone(out[0]);
  const Tensor last = full({table.shape()[0]}, -1, {DType::i64, table.device()});
  DeviceState& state = state_of(table.device());
  launch_write_rows({table.shape()[0], values.spec().bytes() / index.numel(), index.numel(),
                     reinterpret_cast<const std::int64_t*>(index.raw()), values.raw(), table.raw(),
                     reinterpret_cast<long long*>(last.raw()), state.faults(), state.stream()});
  check_launch(op.name);
  if (!table.is(out[0])) copy_(alias(out[0], out[0].layout()), table);
}

}  // namespace

void add_index() { add_kernel<write_rows>(DeviceType::cuda); }

}  // namespace sherd::cuda
