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

/// (outer, columns, inner) of `shape` along `axis`; false where the index is shorter along another axis.
bool along(PickCall& call, std::int64_t& inner, int axis, const Shape& shape, const Shape& index) {
  call.rows = inner = 1;
  call.columns = shape[axis];
  call.picks = index[axis];
  for (int i = 0; i < shape.rank(); ++i) {
    if (i == axis) continue;
    if (index[i] != shape[i]) return false;
    (i < axis ? call.rows : inner) *= shape[i];
  }
  return true;
}

void complete(PickCall& call, const Tensor& x, const Tensor& index, const Tensor& y) {
  DeviceState& state = state_of(x.device());
  call.dtype = x.dtype();
  call.x = x.raw();
  call.index = integers(index);
  call.y = y.raw();
  call.faults = state.faults();
  call.stream = state.stream();
}

void gather_along(const ops::GatherAlong& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  PickCall call;
  std::int64_t inner = 1;
  if (!along(call, inner, op.axis, in[0].shape(), in[1].shape()))
    return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  complete(call, in[0], in[1], out[0]);
  launch_gather_along(call, inner);
  check_launch(op.name);
}

/// One position a line, which meets no other; the reference adds and orders the others.
void scatter_along(const ops::ScatterAlong& op, Inputs in, Outputs out) {
  PickCall call;
  std::int64_t inner = 1;
  const bool alone = along(call, inner, op.axis, op.shape, in[1].shape()) && call.picks == 1 &&
                     (op.put == Put::replace || !in[0].defined());
  if (!alone || in[1].numel() == 0) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  const Tensor y = alias(out[0], out[0].layout()), values = contiguous(in[2]);
  in[0].defined() ? copy_(y, in[0]) : zero_(y);
  complete(call, values, in[1], out[0]);
  launch_scatter_apart(call, inner);
  check_launch(op.name);
}

void scatter(const ops::Scatter& op, Inputs in, Outputs out) {
  zero_(alias(out[0], out[0].layout()));
  if (in[0].numel() == 0) return;  // without columns every position is reported
  const Tensor values = contiguous(in[0]), index = contiguous(in[1]);
  const std::int64_t picks = index.shape().back();
  DeviceState& state = state_of(values.device());
  const PickCall call{values.dtype(),  index.numel() / picks, op.columns,     picks,         values.raw(),
                      integers(index), out[0].raw(),          state.faults(), state.stream()};
  op.distinct || picks == 1 ? launch_scatter_apart(call, 1) : launch_scatter(call);
  check_launch(op.name);
}

}  // namespace

void add_gather() {
  add_kernel<gather>(DeviceType::cuda);
  add_kernel<gather_along>(DeviceType::cuda);
  add_kernel<scatter_along>(DeviceType::cuda);
  add_kernel<scatter>(DeviceType::cuda);
}

}  // namespace sherd::cuda
