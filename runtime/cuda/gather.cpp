// Picks along the last axis, and their inverse.
#include "runtime/cuda/gather.h"

#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/along.h"
#include "runtime/ops/topk.h"

namespace sherd::cuda {
namespace {

const std::int64_t* integers(const Tensor& t) { return reinterpret_cast<const std::int64_t*>(t.raw()); }

void gather(const ops::Gather& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]), index = contiguous(in[1]);
  const std::int64_t picks = index.shape().back();
  DeviceState& state = state_of(x.device());
  launch_gather({x.dtype(), index.numel() / picks, x.shape().back(), picks, x.raw(), integers(index),
                 out[0].raw(), state.faults(), state.stream()});
  check_launch(op.name);
}

/// Where the index is shorter than x along another axis, the reference cuts x.
void gather_along(const ops::GatherAlong& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor &x = in[0], &index = in[1];
  PickCall call{x.dtype(),       1,           x.shape()[op.axis], index.shape()[op.axis], x.raw(),
                integers(index), out[0].raw()};
  std::int64_t inner = 1;
  for (int i = 0; i < x.rank(); ++i) {
    if (i == op.axis) continue;
    if (index.shape()[i] != x.shape()[i])
      return sherd::detail::adopt_reference(op.name, op.reference(in), out);
    (i < op.axis ? call.rows : inner) *= x.shape()[i];
  }
  DeviceState& state = state_of(x.device());
  call.faults = state.faults();
  call.stream = state.stream();
  launch_gather_along(call, inner);
  check_launch(op.name);
}

void scatter(const ops::Scatter& op, Inputs in, Outputs out) {
  zero_(alias(out[0], out[0].layout()));
  if (in[0].numel() == 0 || op.columns == 0) return;
  const Tensor values = contiguous(in[0]), index = contiguous(in[1]);
  const std::int64_t picks = index.shape().back();
  DeviceState& state = state_of(values.device());
  launch_scatter({values.dtype(), index.numel() / picks, op.columns, picks, values.raw(), integers(index),
                  out[0].raw(), state.faults(), state.stream()});
  check_launch(op.name);
}

}  // namespace

void add_gather() {
  add_kernel<gather>(DeviceType::cuda);
  add_kernel<gather_along>(DeviceType::cuda);
  add_kernel<scatter>(DeviceType::cuda);
}

}  // namespace sherd::cuda
